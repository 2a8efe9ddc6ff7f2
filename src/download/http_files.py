"""HTTP and object-store downloads, once per machine or shared disk: resumable, verified, never of mixed versions.

One process per machine (or shared disk) looks up the version and downloads. It writes the record last, so a download
without a record is incomplete. This is own code, because `datasets` and `fsspec` restart an interrupted download, and
`huggingface_hub` resumes one without checking its version. Tests: tests/download/test_http_files.py.
"""

import gzip
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlparse

from src.config.errors import UsageError, one_line, warn
from src.download import remote_version
from src.download.fetch_records import fetch_once, is_offline
from src.download.remote_version import FileChanged
from src.runtime import console
from src.storage import atomic_folder
from src.storage.shared_work import SharedWork, write_atomic

CHUNK = 1 << 20  # bytes
RECORD, PART, PART_VERSION = "fetched.json", "part", "part.json"


def server_version(file: str) -> list | None:
    """Return the version of a downloaded file: [hash of the URL, size, ETag or time]. Return None for other files."""
    record_file = Path(file).parent / RECORD
    if Path(file).parent.parent.name != "downloads" or not record_file.exists():
        return None
    record = json.loads(record_file.read_text())
    return [Path(file).parent.name, record["bytes"], record["etag"] or record["modified"] or os.stat(file).st_mtime_ns]


def fetch_file(url: str, field: str, root: Path, work: SharedWork) -> str:
    """Return the path of the local copy of `url`. One process downloads it unless the copy is complete and current."""
    folder = root / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:32]
    what = f"downloading {url}"

    def fetch() -> dict:
        folder.mkdir(parents=True, exist_ok=True)
        with work.exclusive(folder / RECORD, what):  # another launch may download the same file
            return _fetch(url, field, folder, work)

    return str(folder / fetch_once(url, fetch, work, what)["file"])


def _fetch(url: str, field: str, folder: Path, work: SharedWork) -> dict:
    """Return the record of a complete copy in `folder`. The copy is current if the server answers."""
    record = _read_record(folder)
    if is_offline():
        if record is None:
            raise UsageError(
                f"{field}: {url}: not fetched yet, and HF_HUB_OFFLINE is set: unset it and run once (make data)"
            )
        return record
    try:
        version = remote_version.look_up(url, field)
        if record and remote_version.is_unchanged(record, version):
            return record
        return _download(url, field, version, folder, work)
    except OSError as error:  # includes the errors of requests and fsspec
        reason = one_line(error)
    if record:
        warn(f"{url} cannot be reached ({reason}): using the copy downloaded before", any_rank=True)
        return record
    raise UsageError(f"{field}: {url}: not fetched: {reason}. Run the same command again to resume the download")


def _read_record(folder: Path) -> dict | None:
    """Return the record of the download in `folder`. Return None without a record, or if the file has another size."""
    if not (folder / RECORD).exists():
        return None
    record = json.loads((folder / RECORD).read_text())
    file = folder / record["file"]
    return record if file.exists() and file.stat().st_size == record["bytes"] else None


def _download(url: str, field: str, version: dict, folder: Path, work: SharedWork) -> dict:
    """Download a file, with retries, and return its record.

    Only attempts that gain no bytes count as failures. Raise OSError after TRIES failures in a row.
    """
    part = folder / PART
    failures = farthest = 0
    while True:
        _drop_unless_resumable(part, version)
        try:
            _transfer(url, field, version, part, work)
            before, version = version, remote_version.look_up(url, field)
            if changed := remote_version.difference(before, version):
                raise FileChanged(f"{url} changed while it was downloaded: its {changed}")
            return _publish(url, version, folder)
        except FileChanged as error:
            part.unlink(missing_ok=True)
            reason = one_line(error)
        except OSError as error:
            reason = one_line(error)
        size = part.stat().st_size if part.exists() else 0
        failures = 0 if size > farthest else failures + 1
        farthest = max(farthest, size)
        if failures >= remote_version.TRIES:
            raise OSError(f"{reason} (tried {failures} times)")
        time.sleep(2**failures / 2)
        version = remote_version.look_up(url, field)


def _drop_unless_resumable(part: Path, version: dict) -> None:
    """Delete a partial download that cannot be resumed: its version or length differs or is unknown."""
    version_file = part.with_name(PART_VERSION)
    same = part.exists() and version_file.exists() and json.loads(version_file.read_text()) == version
    known = version["bytes"] is not None and (version["etag"] or version["modified"])
    if not (same and known and part.stat().st_size <= version["bytes"]):
        part.unlink(missing_ok=True)
        write_atomic(version_file, json.dumps(version))


def _transfer(url: str, field: str, version: dict, part: Path, work: SharedWork) -> None:
    """Download the whole file to `part`. Raise OSError if it ends early, FileChanged if its version differs."""
    if not url.startswith("http"):
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        system.get_file(path, str(part))
    elif not part.exists() or part.stat().st_size != version["bytes"]:
        _transfer_http(url, field, version, part, work)
    size = part.stat().st_size
    if version["bytes"] not in (None, size):
        raise OSError(f"the connection ended after {size:,} of {version['bytes']:,} bytes")


def _transfer_http(url: str, field: str, version: dict, part: Path, work: SharedWork) -> None:
    begun = part.stat().st_size if part.exists() else 0
    validator = version["etag"] or version["modified"]
    headers = {"Range": f"bytes={begun}-", "If-Range": validator} if begun else {}
    with remote_version.open_url("GET", url, headers) as answer:
        remote_version.check_answer(url, version, answer.status_code, answer.headers, begun)
        remote_version.require_data(answer)
        if answer.status_code != 206:
            begun = 0  # the server cannot resume, so it sends the whole file
        bar = console.bar(f"downloading {_file_name(url)}", version["bytes"], "B", begun, scale=True, delay=1)
        with closing(bar), open(part, "ab" if begun else "wb") as file:
            for chunk in _chunks(answer):
                if file.tell() == 0:
                    _refuse_web_page(url, field, answer, chunk)
                file.write(chunk)
                file.flush()  # if this process is killed, the next one resumes here
                bar.update(len(chunk))
        if not remote_version.is_plain(answer.headers):
            _decompress(part, answer.headers["Content-Encoding"])
        if "Content-Length" not in answer.headers and "chunked" not in answer.headers.get("Transfer-Encoding", ""):
            warn(f"{url}: the server does not send the length, so a truncated file would not be noticed", any_rank=True)


def _chunks(answer) -> Iterator[bytes]:
    """Yield the raw bytes of a response. urllib3 raises if there are fewer than its Content-Length."""
    from urllib3.exceptions import HTTPError

    try:
        yield from answer.raw.stream(CHUNK, decode_content=False)
    except HTTPError as error:
        raise OSError(f"the connection ended early: {error}") from error


def _refuse_web_page(url: str, field: str, answer, start: bytes) -> None:
    """Raise UsageError if the server sends a web page instead of data, such as a login page."""
    kind = answer.headers.get("Content-Type", "")
    if "html" in kind and start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise UsageError(
            f"{field}: {url}: the server sent a web page ({kind}) instead of data: check the URL, or whether it needs "
            "a login"
        )


def _decompress(part: Path, encoding: str) -> None:
    """Decompress `part` in place. Raise OSError if the compressed data is truncated."""
    if encoding not in ("gzip", "x-gzip"):
        raise OSError(f"the server sends Content-Encoding: {encoding}, but only gzip can be decompressed")
    plain = part.with_name(f"{PART}.plain")
    try:
        with gzip.open(part) as source, open(plain, "wb") as target:
            shutil.copyfileobj(source, target)
    except EOFError as error:
        raise OSError("the compressed file ended early") from error
    plain.replace(part)


def _publish(url: str, version: dict, folder: Path) -> dict:
    """Rename the complete part to its final name, then write and return its record."""
    name, part = _file_name(url), folder / PART
    atomic_folder.fsync(part)
    part.replace(folder / name)
    (folder / PART_VERSION).unlink(missing_ok=True)
    record = version | {"file": name, "bytes": (folder / name).stat().st_size}
    write_atomic(folder / RECORD, json.dumps(record))
    return record


def _file_name(url: str) -> str:
    name = Path(unquote(urlparse(url).path)).name or "file"
    return f"_{name}" if name in (PART, PART_VERSION, f"{PART}.plain", RECORD) else name
