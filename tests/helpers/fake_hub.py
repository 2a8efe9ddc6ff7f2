"""A Hugging Face Hub and file server on 127.0.0.1 that serves a folder, counts requests and fails on demand.

    FOLDER/files/NAME                          plain files at `files_url`/NAME, with ranges
    FOLDER/models/ORG/NAME/...                 a model at `main`; datasets/ have the same layout
    FOLDER/.kept/KIND/ORG/NAME/REVISION/...    what `commit` keeps

The sha of a repository is a hash of its contents: after an edit the next request sees another one. The old one is still
served if `commit` was called before the edit. Trusted because the real libraries (`huggingface_hub`, `datasets`,
`transformers`, `fsspec`) are its clients in every test that uses it.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = r"([^/]+?(?:/[^/]+?)??)"  # gpt2 or org/model
RESOLVE = re.compile(rf"/(?:(datasets)/)?{NAME}/resolve/([^/]+)/(.+)")
API = re.compile(rf"/api/(models|datasets)/{NAME}(?:/(revision|tree|preupload|commit)/([^/]+)(?:/(.*))?)?")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Fault:
    """What goes wrong with the next `times` requests (None: with all). close_after does not apply to HEAD."""

    times: int | None = None
    status: int | None = None  # answer this instead
    headers: dict = field(default_factory=dict)  # with any answer, for example Retry-After
    silent: bool = False  # never answer
    close_after: int | None = None  # bytes of the body, though Content-Length has promised all

    def concerns(self, method: str) -> bool:
        return self.times != 0 and not (method == "HEAD" and self.close_after is not None)


@dataclass
class Request:
    """A request and its answer; in `Hub.requests` before it is answered."""

    method: str
    path: str  # as sent, with the query
    status: int | None = None  # None: not answered (yet)
    sent: int = 0  # bytes of the body

    def matches(self, pattern: str) -> bool:
        path = unquote(self.path.partition("?")[0])
        return path == pattern or fnmatchcase(path, pattern)


class Refusal(Exception):
    """An answer that is an error; huggingface_hub raises the class that belongs to the code."""

    def __init__(self, status: int, code: str = "", message: str = ""):
        super().__init__(message)
        self.status, self.code = status, code


class Hub:
    """The server: up at `url` inside `with`, or from `start` to `stop`; a restart keeps the address.

    `faults` maps a path, or a pattern like "*/resolve/*/train.jsonl", to a Fault; the first that applies is used. Repositories in `private`, "org/name", are read with `token` only, and nothing
    is written without it.
    """

    def __init__(self, folder, private=(), token: str = "hf_token_of_the_tests"):
        self.folder, self.token, self.port = Path(folder).resolve(), token, 0
        self.private = set(private)
        self.requests: list[Request] = []
        self.faults: dict[str, Fault] = {}
        self.lock = threading.Lock()

    def start(self) -> "Hub":
        self.stopped = threading.Event()
        self.server = _Server(("127.0.0.1", self.port), _Handler)
        self.server.hub, self.port = self, self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.files_url = f"http://localhost:{self.port}/files"  # after HF_ENDPOINT it would be taken for a repository
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """End at once, even if clients wait; from now on connections are refused."""
        self.stopped.set()
        self.server.shutdown()
        with suppress(OSError):  # to close is not enough: forked processes have the same socket
            self.server.socket.shutdown(socket.SHUT_RDWR)
        self.server.server_close()

    __enter__ = start

    def __exit__(self, *_) -> None:
        self.stop()

    def environment(self, folder=None) -> dict[str, str]:
        """Return variables for `adopt`: a process that uses this Hub without a token, with an empty HF_HOME in `folder`."""
        folder = Path(folder or self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        home = tempfile.mkdtemp(prefix="home-", dir=folder)
        values = {"HF_ENDPOINT": self.url, "HF_HOME": home}
        values |= {"HF_HUB_CACHE": f"{home}/hub", "HF_DATASETS_CACHE": f"{home}/datasets"}
        values |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "5")
        values |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_UPDATE_DOWNLOAD_COUNTS"), "0")
        values |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        off = ("XET", "TELEMETRY", "PROGRESS_BARS", "UPDATE_CHECK")
        return values | {f"HF_HUB_DISABLE_{name}": "1" for name in off}

    def sent(self, path: str) -> int:
        """Return the bytes sent of the files that match a path or pattern."""
        return sum(r.sent for r in list(self.requests) if r.matches(path))

    def fault(self, request: Request) -> Fault:
        for path, fault in list(self.faults.items()):
            with self.lock:
                if request.matches(path) and fault.concerns(request.method):
                    fault.times = fault.times and fault.times - 1
                    return fault
        return Fault()

    # ---- a repository, such as "models/org/name", is a folder at every revision --------------------------------------

    def commit(self, repository: str) -> str:
        """Keep a repository as it is now under its sha; return the sha."""
        kept = self.folder / ".kept" / repository / self.sha(self.folder / repository)
        shutil.copytree(self.folder / repository, kept)
        return kept.name

    def at(self, repository: str, revision: str) -> Path:
        folder, kept = self.folder / repository, self.folder / ".kept" / repository / revision
        if revision == "main" or (not kept.is_dir() and revision == self.sha(folder)):
            return folder
        if not kept.is_dir():
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return kept

    def write(self, repository: str, operations: list[dict]) -> str:
        """Write the files of a commit; return the new sha."""
        for value in (operation["value"] for operation in operations if operation["key"] == "file"):
            file = self.folder / repository / value["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(base64.b64decode(value["content"]))
        return self.sha(self.folder / repository)

    def sha(self, folder: Path) -> str:
        return digest(repr(self.files(folder)).encode())

    def files(self, folder: Path) -> dict[str, str]:
        """Return the hash of every file in a folder, by its path there."""
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return {file.relative_to(folder).as_posix(): digest(file.read_bytes()) for file in files}


def adopt(environment: dict[str, str]) -> None:
    """Apply these variables to a forked process: its libraries have read their environment already."""
    import datasets.config
    from huggingface_hub import constants, hf_api

    os.environ |= environment
    url, cache = environment["HF_ENDPOINT"], Path(environment["HF_DATASETS_CACHE"])
    constants.ENDPOINT = hf_api.api.endpoint = datasets.config.HF_ENDPOINT = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = environment["HF_HUB_OFFLINE"] == "1"
    constants.HF_HUB_CACHE = datasets.config.HF_HUB_CACHE = environment["HF_HUB_CACHE"]
    datasets.config.HF_DATASETS_CACHE, datasets.config.DOWNLOADED_DATASETS_PATH = cache, cache / "downloads"
    constants.HF_HUB_DISABLE_XET, datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = True, False
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        setattr(constants, name, float(environment[name]))


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.hub, self.url, self.sha = self.server.hub, urlsplit(self.path), ""
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.record = Request(self.command, self.path)
        self.hub.requests.append(self.record)
        self.fault = self.hub.fault(self.record)
        if self.fault.silent:
            self.hub.stopped.wait()
            self.close_connection = True
            return
        try:
            if self.fault.status:
                raise Refusal(self.fault.status, message="a fault of the tests")
            self.answer(self.url.path, self.headers.get("Authorization"))
        except Refusal as no:
            headers = {"X-Error-Code": no.code, "X-Error-Message": str(no), "X-Repo-Commit": self.sha}
            self.reply(no.status, {"error": str(no)}, {name: value for name, value in headers.items() if value})

    do_HEAD = do_POST = do_GET

    def answer(self, path: str, authorization: str | None):
        self.known = authorization == f"Bearer {self.hub.token}"
        if path == "/api/validate-yaml":
            self.reply(200, {"errors": [], "warnings": []})
        elif not self.known and self.command == "POST":
            raise Refusal(401, message="Invalid username or password.")
        elif path == "/api/repos/create":
            self.create(**json.loads(self.body))
        elif path.startswith("/files/"):
            self.file(self.hub.folder / unquote(path[1:]))
        elif match := RESOLVE.fullmatch(path):
            kind, name, revision, file = (unquote(part or "models") for part in match.groups())
            root = self.hub.at(self.repository(kind, name), revision)
            self.sha = self.hub.sha(root)  # in a 404 too: clients remember what a commit does not have
            self.file(root / file)
        elif match := API.fullmatch(path):
            kind, name, verb, revision, file = (unquote(part or "") for part in match.groups())
            self.api(self.repository(kind, name), verb, revision or "main", file)
        else:
            raise Refusal(404, message=f"there is no {path} here")

    def repository(self, kind: str, name: str) -> str:
        """Return the key of a repository that exists, if this client may see it."""
        if not (self.hub.folder / kind / name).is_dir() or (name in self.hub.private and not self.known):
            status, message = (404, "") if self.known else (401, "Invalid username or password.")
            raise Refusal(status, "RepoNotFound", message)
        return f"{kind}/{name}"

    def create(self, name: str, organization: str, visibility: str, **_):
        name = f"{organization}/{name}"
        (self.hub.folder / "models" / name).mkdir(parents=True)
        self.hub.private |= {name} if visibility == "private" else set()
        self.reply(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def api(self, repository: str, verb: str, revision: str, path: str):
        hub, name = self.hub, repository.partition("/")[2]
        root = hub.at(repository, revision)
        files = hub.files(root)
        if verb in ("", "revision"):
            siblings = [{"rfilename": f, "blobId": id, "size": (root / f).stat().st_size} for f, id in files.items()]
            stats = {"private": name in hub.private, "gated": False, "disabled": False}
            self.reply(200, {"id": name, "sha": hub.sha(root), "siblings": siblings, "tags": [], "likes": 0} | stats)
        elif verb == "tree":
            if not (top := root / path).is_dir():
                raise Refusal(404, "EntryNotFound", f"{path} does not exist on {revision}")
            items = sorted(top.rglob("*") if "recursive=true" in self.url.query else top.iterdir())
            entries = [{"path": i.relative_to(root).as_posix(), "size": i.stat().st_size} for i in items]
            for item, entry in zip(items, entries, strict=True):
                entry |= {"type": "directory" if item.is_dir() else "file", "oid": files.get(entry["path"], "0" * 40)}
            self.reply(200, entries)
        elif verb == "preupload":  # uploads are never LFS, which is another protocol
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            paths = [file["path"] for file in json.loads(self.body)["files"]]
            self.reply(200, {"files": [{"path": path, "oid": files.get(path)} | plain for path in paths]})
        else:
            sha = hub.write(repository, [json.loads(line) for line in self.body.splitlines()])
            url = f"{hub.url}/{repository.removeprefix('models/')}/commit/{sha}"
            self.reply(200, {"success": True, "commitOid": sha, "commitUrl": url})

    def file(self, file: Path):
        if not file.is_file():
            raise Refusal(404, "EntryNotFound", f"{file.name} does not exist")
        body, modified = file.read_bytes(), formatdate(file.stat().st_mtime, usegmt=True)
        size, etag, status = len(body), f'"{digest(body)}"', 200
        headers = {"ETag": etag, "Last-Modified": modified, "Accept-Ranges": "bytes"}
        headers |= {"Content-Type": "application/octet-stream"} | ({"X-Repo-Commit": self.sha} if self.sha else {})
        if asked := RANGE.fullmatch(self.headers.get("Range", "")):
            start, end = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
            status, body, headers["Content-Range"] = 206, body[start:end], f"bytes {start}-{end - 1}/{size}"
        self.reply(status, body, headers)

    def reply(self, status: int, body: bytes | dict | list, headers: dict | None = None):
        fault, self.record.status = self.fault, status
        if not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {"Content-Type": "application/json"} | (headers or {})
        self.send_response(status)
        for name, value in (headers | fault.headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = memoryview(body)[: fault.close_after]
        for start in range(0, len(body), 1 << 16):
            part = body[start : start + (1 << 16)]
            self.record.sent += len(part)  # before the write, so that a client that has read all of it finds it here
            self.wfile.write(part)
        self.close_connection |= fault.close_after is not None
