"""An S3 of this machine (moto), a proxy before it that delays, refuses or loses requests, and runs that train in a store."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from addons.stores._store import Store
from tests.helpers import kit

BUCKET = "s3://bucket"
HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "expect", "date", "server")


@contextmanager
def s3():
    """Start moto, and yield the variables by which s3fs finds it; skip the test where one of the two is not installed."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    port = kit.free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        kit.until(lambda: _answers(port), 60)
        client = http.client.HTTPConnection("127.0.0.1", port)
        client.request("PUT", "/bucket")
        assert client.getresponse().status == 200
        yield environment(port)
    finally:
        server.terminate()
        server.wait()


def environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key-of-the-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _answers(port: int) -> bool:
    try:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        client.request("GET", "/")
        return bool(client.getresponse().status)
    except OSError:
        return False


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server. `fault(number, method, path)` returns what happens to a request: None, a status to
    answer with, "lose" (it is carried out, and its response is lost), or a function to call before it is passed on."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.upstream = address.removeprefix("http://")
        self.fault = lambda number, method, path: None
        self.number = 0
        self.guard = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """Ignore a client that was killed."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def handle_any(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with server.guard:
            server.number += 1
            fault = server.fault(server.number, self.command, self.path)
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if callable(fault):
            fault()
        client = http.client.HTTPConnection(server.upstream, timeout=60)
        client.request(self.command, self.path, body, dict(self.headers))
        response = client.getresponse()
        content = response.read()
        if fault == "lose":
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any


# ---- runs ------------------------------------------------------------------------------------------------------------


def newest_whole(address: str) -> int:
    """Return the step of the newest checkpoint with a manifest in the store, 0 if there is none."""
    store = Store(address, "address")
    newest = 0
    for name in store.list("checkpoints"):
        match = re.fullmatch(r"checkpoints/step_(\d+)/manifest.json", name)
        with suppress(ValueError):  # half a manifest, in a store on a disk
            newest = max(newest, int(match[1]) if match and json.loads(store.read(name) or b"") else 0)
    return newest


def download(address: str, folder: Path) -> Path:
    """Return a folder with all files of an address."""
    store = Store(address, "address")
    shutil.rmtree(folder, ignore_errors=True)
    for name in store.list():
        store.get(name, folder / name)
    return folder


def resumed_from(text: str) -> int | None:
    """Return the step at which a run began according to what it printed; None if it ended before it said so."""
    match = re.search(r"Resuming from step ([\d,]+) ", text)
    if match:
        return int(match[1].replace(",", ""))
    return 0 if "first step after" in text else None


def forget(cache: Path) -> None:
    """Remove the local folders of runs in stores, as on another machine."""
    shutil.rmtree(cache / "stores", ignore_errors=True)


def with_environment(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("AWS_") and name not in variables]:
        monkeypatch.delenv(name)
