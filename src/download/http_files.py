"""Download files over http(s) or fsspec once per disk; resume, verify, never mix versions.

Tests: tests/download/test_http_files.py. One process of those that see the disk asks and downloads; a download is complete
when its record is there, which is written last. With HF_HUB_OFFLINE=1, or without a network, what was fetched before is used.
"""

import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlparse

from urllib3.exceptions import HTTPError

from src.config.errors import UsageError, warn
from src.config.redact import redact
from src.runtime import console
from src.storage import atomic_folder
from src.storage.shared_work import SharedWork, write_atomic

SILENCE = (10, 120)  # seconds to wait for a connection, and for the next byte
TRIES = 3  # attempts that bring no byte, before the file is given up
CHUNK = 1 << 20
WITH_DATA = (200, 203, 206)  # statuses of answers that hold the file

fetched: dict[str, dict] = {}  # what this run was fetched from, for environment.json


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def ask_once(key: str, root: Path, work: SharedWork, find: Callable[[], dict], what: str) -> dict:
    """Return what `find()` returns, called by one process of the launch on this disk, and once."""
    if key in fetched:
        return fetched[key]
    fetched[key] = found = work.compute_once(key, find, what)
    return found


# ---- files -----------------------------------------------------------------------------------------------------------


def server_version(file: str) -> list | None:
    """Return what the server said of a fetched file, by which it can be told from others; None for any other file."""
    known = Path(file).parent / "fetched.json"
    if Path(file).parent.parent.name != "downloads" or not known.exists():
        return None
    told = json.loads(known.read_text())
    return [Path(file).parent.name, told["bytes"], told["etag"] or told["modified"] or os.stat(file).st_mtime_ns]


def fetch_file(url: str, field: str, root: Path, work: SharedWork, origins: dict[str, str]) -> str:
    """Return the local copy of the file at `url`, downloaded by one process if it is not there or changed since."""
    folder = root / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:32]
    told = ask_once(url, root, work, lambda: _current(url, field, folder, work), f"downloading {url}")
    local = str(folder / told["file"])
    origins[local] = url
    return local


def _current(url: str, field: str, folder: Path, work: SharedWork) -> dict:
    """Return the record of a complete and current download of `url` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with work.exclusive(folder / "fetched.json", f"downloading {url}"):  # other launches may fetch the same
        return _fetched(url, field, folder, work)


def _fetched(url: str, field: str, folder: Path, work: SharedWork) -> dict:
    known = folder / "fetched.json"
    told = json.loads(known.read_text()) if known.exists() else None
    if told and not ((local := folder / told["file"]).exists() and local.stat().st_size == told["bytes"]):
        told = None
    if told and is_offline():
        return told
    if is_offline():
        raise UsageError(f"{field}: {url}: not fetched yet, and HF_HUB_OFFLINE is set: run once without it (make data)")
    try:
        fresh = _http(url, folder, told, work) if url.startswith("http") else _other(url, folder)
    except OSError as error:  # what requests and fsspec raise is of this kind, too
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if told:
            warn(f"{url} cannot be reached ({reason}): what was fetched before is used", alone=True)
            return told
        raise UsageError(
            f"{url}: not fetched: {reason}. What has come is kept; the same command goes on from there"
        ) from error
    except ValueError as error:
        raise UsageError(f"{field}: {url}: {error}") from error
    if fresh:
        write_atomic(known, json.dumps(fresh))
    return fresh or told


def _http(url: str, folder: Path, told: dict | None, work: SharedWork) -> dict | None:
    """Download `url`, going on from where an attempt before was cut off; return its record, or None if `told` is current."""
    import requests

    part, about, name = folder / "part", folder / "part.json", _name(url)
    failures = 0
    while True:
        begun = part.stat().st_size if part.exists() and about.exists() else 0
        version = json.loads(about.read_text()) if begun else {}
        headers = {"Accept-Encoding": "identity"}
        if begun and version["version"]:
            headers |= {"Range": f"bytes={begun}-", "If-Range": version["version"]}
        elif told and told["etag"]:
            headers["If-None-Match"] = told["etag"]
        elif told and told["modified"]:
            headers["If-Modified-Since"] = told["modified"]
        came, reason = 0, ""
        try:
            with requests.get(url, headers=headers, stream=True, timeout=SILENCE) as answer:
                if answer.status_code == 304 and told:
                    return None
                if answer.status_code in (401, 403, 404, 410):
                    raise ValueError(f"the server answers {answer.status_code} {answer.reason}")
                if answer.status_code == 416 and begun:  # the part is as long as the file, or longer
                    about.unlink(missing_ok=True)
                    continue
                answer.raise_for_status()
                if answer.status_code not in WITH_DATA:  # 202: it is being prepared; 304, though nothing is here
                    raise requests.RequestException(f"the server answers {answer.status_code} {answer.reason}")
                if answer.status_code == 206 and (reason := _unfit(answer, version, begun)):
                    about.unlink(missing_ok=True)
                    if not begun:
                        raise requests.RequestException(reason)
                    continue
                begun = begun if answer.status_code == 206 else 0
                version = version if begun else _version(answer)
                write_atomic(about, json.dumps(version))
                with open(part, "ab" if begun else "wb") as target:
                    for chunk in _shown(_plain_chunks(answer), url, begun, version["total"]):
                        if not begun + came:
                            _refuse_page(answer, chunk, about)
                        target.write(chunk)
                        target.flush()  # what is killed now goes on from here
                        came += len(chunk)
                        work.peers.raise_if_failed()
            size, total = part.stat().st_size, version["total"]
            if size != begun + came or size != (total or size):
                reason = f"the connection ended after {size:,} of {total or 0:,} bytes"
            elif _replaced(url, version):
                about.unlink(missing_ok=True)
                reason = "the file changed while it was downloaded"
            else:
                if version["open"]:
                    warn(
                        f"{url}: the server does not say how long it is, so an early end would not be noticed",
                        alone=True,
                    )
                atomic_folder.fsync(part)
                part.replace(folder / name)
                about.unlink(missing_ok=True)
                return {"url": redact(url), "file": name, "bytes": size} | {
                    key: version[key] for key in ("etag", "modified")
                }
        except requests.RequestException as error:
            if told and not came and isinstance(error, requests.ConnectionError | requests.Timeout):
                raise  # who has a copy need not wait for a server that is not there
            reason = " ".join(str(error).split())[:300]
        failures = 0 if came and begun else failures + 1  # who lets us go on may be cut off any number of times
        if failures >= TRIES:
            raise OSError(f"{reason} (tried {TRIES} times)")
        time.sleep(2**failures / 2)


def _plain_chunks(answer):
    """Yield the bytes of a file; of one that is sent compressed, too, an early end is an error, which requests does not notice."""
    import requests

    if answer.headers.get("Content-Encoding", "identity") not in ("gzip", "x-gzip"):
        yield from answer.iter_content(CHUNK)
        return
    unpack = zlib.decompressobj(31)
    try:
        for chunk in answer.raw.stream(CHUNK, decode_content=False):
            while chunk:
                if unpack.eof:  # several members, one after the other
                    unpack = zlib.decompressobj(31)
                if plain := unpack.decompress(chunk):
                    yield plain
                chunk = unpack.unused_data
    except (zlib.error, HTTPError) as error:
        raise requests.ConnectionError(f"the compressed file cannot be read: {error}") from error
    if not unpack.eof:
        raise requests.ConnectionError("the compressed file ended early")


def _version(answer) -> dict:
    """Return what an answer with a whole file says of it: its ETag and time, its bytes, and by which of them a part can be asked for."""
    etag, modified = (answer.headers.get(word) for word in ("ETag", "Last-Modified"))
    strong = etag if etag and not etag.startswith("W/") else None
    # Of what a store keeps compressed, the length is another, and a part is none.
    plain = answer.headers.get("Content-Encoding", "identity") == "identity"
    length = answer.headers.get("Content-Length")
    ended = length or "chunked" in answer.headers.get(
        "Transfer-Encoding", ""
    )  # else the connection's end is that of the file
    return {
        "etag": etag,
        "modified": modified,
        "total": int(length) if length and plain else None,
        "version": (strong or modified) if plain else None,
        "open": not ended,
    }


def _unfit(answer, version: dict, begun: int) -> str | None:
    """Return why the rest of a file (206) cannot be put behind the part of it that is there, or None."""
    said = answer.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said)
    if not match or int(match[1]) != begun or int(match[3]) != (version.get("total") or int(match[3])):
        total = version.get("total") or "an unknown number of"
        return f"the server answers Content-Range: {said or 'nothing'}, to a request from byte {begun} of {total} bytes"
    for header, key in (("ETag", "etag"), ("Last-Modified", "modified")):
        was, now = version.get(key), answer.headers.get(header)
        if was != now and (now or header == "ETag" or not version.get("etag")):
            return f"the rest of the file is that of another version: {header} is {now}, and was {was}"
    version["total"] = int(match[3])
    return None


def _replaced(url: str, version: dict) -> bool:
    """Return whether the server has another version than the one that has come, where it says so."""
    import requests

    try:
        answer = requests.head(url, headers={"Accept-Encoding": "identity"}, allow_redirects=True, timeout=SILENCE[0])
    except requests.RequestException:
        return False
    pairs = [
        (version[key], answer.headers.get(word)) for key, word in (("etag", "ETag"), ("modified", "Last-Modified"))
    ]
    strong = [(was, now) for was, now in pairs if was and now and not (was + now).count("W/")]
    return answer.ok and any(was != now for was, now in strong)


def _refuse_page(answer, first: bytes, about: Path) -> None:
    """Raise ValueError where a web page comes instead of data, as from a server that wants a login first."""
    kind = answer.headers.get("Content-Type", "")
    if "html" in kind and first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        about.unlink(missing_ok=True)
        raise ValueError(
            f"the server answers with a web page ({kind}), not with data: is a login needed, or the URL another?"
        )


def _other(url: str, folder: Path) -> dict:
    """Copy a file from any other kind of store that fsspec knows (s3, gs, hf, …)."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
        told = system.info(path)
        system.get_file(path, str(folder / "part"))
    except ImportError as error:
        raise ValueError(str(error)) from error
    came, now = (folder / "part").stat().st_size, system.info(path)
    if came != (told.get("size") if told.get("size") is not None else came) or any(
        told.get(key) != now.get(key) for key in ("size", "ETag", "etag", "mtime")
    ):
        raise OSError(f"{came:,} bytes came of {told.get('size'):,}, or the file changed meanwhile")
    atomic_folder.fsync(folder / "part")
    (folder / "part").replace(folder / _name(url))
    size = (folder / _name(url)).stat().st_size
    return {
        "url": redact(url),
        "file": _name(url),
        "bytes": size,
        "etag": told.get("ETag") or told.get("etag"),
        "modified": None,
    }


def _name(url: str) -> str:
    name = Path(unquote(urlparse(url).path)).name or "file"
    return f"_{name}" if name in ("part", "part.json", "fetched.json") else name


def _shown(chunks, url: str, begun: int, total: int | None):
    """Yield `chunks` under a progress bar in bytes."""
    bar = console.bar(f"downloading {_name(url)}", total, "B", begun, scale=True, delay=1)
    try:
        for chunk in chunks:
            yield chunk
            bar.update(len(chunk))
    finally:
        bar.close()
