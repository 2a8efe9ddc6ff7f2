"""Files of a store of fsspec below one address: every request is tried several times, every failure is an OSError.

Tests: tests/addons/stores/test_run_in_store.py.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.config.errors import UsageError, one_line, reason_of
from engine.storage import atomic_folder

WAITS = (0.5, 2.0, 5.0)  # seconds before each further try; fsspec's own tries come on top
# Stores that refuse a second write of one name when fsspec asks for it (docs/cloud.md says which of them were tried).
CONDITIONAL = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "file", "local", "memory"}
READS = ("find", "cat_file", "get_file", "rm_file")  # to upload, what is missing is an upload that was retried
DISKS = {"file", "local"}
BY_OPEN = {*DISKS, "memory"}  # fsspec asks these by the mode "xb" only
VERSIONS = ("ETag", "etag", "generation", "oid", "mtime", "LastModified", "last_modified", "created")


class Store:
    """The files below an address, by their names relative to it. Any thread may call it."""

    def __init__(self, address: str, field: str):
        self.address = address.rstrip("/")
        self.scheme = address.partition("://")[0].lower()
        if "::" in address or self.scheme in ("http", "https"):
            raise UsageError(f"{field}: {address}: give a folder in a store, such as s3://bucket/run")
        try:
            import fsspec

            options = {"auto_mkdir": True} if self.scheme in DISKS else {}
            self.files, root = fsspec.core.url_to_fs(
                self.address, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except Exception as error:  # an unknown scheme, a missing package, credentials that cannot be read
            raise UsageError(f"{field}: {address}: {reason_of(error)}") from error
        self.root = str(root).rstrip("/")
        self.is_conditional = self.scheme in CONDITIONAL

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        for seconds in (*WAITS, None):
            try:
                return getattr(self.files, method)(*args, **options)
            except Exception as error:  # each store has its own
                is_missing = isinstance(error, FileNotFoundError) and method in READS
                if is_missing or isinstance(error, FileExistsError):
                    raise
                if seconds is None:
                    raise OSError(f"{self.address}: {one_line(error)}") from error
                time.sleep(seconds)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def list(self, folder: str = "") -> dict[str, list]:
        """Return {name: [size, version]} of all files below a folder, or of the one file with this name; "": of all."""
        names = {}
        for path, about in self._call("find", self._path(folder), detail=True).items():
            name = str(path)[len(self.root) + 1 :]
            is_file = about.get("type", "file") == "file"  # else a folder that appeared between two requests
            is_inside = not name or not {"", ".."} & {*name.split("/")}  # or it could name any file of this machine
            if is_file and is_inside:
                version = next((str(about[key]) for key in VERSIONS if about.get(key) is not None), "")
                names[name] = [about["size"], version]
        return names

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file, None if it is not there."""
        with suppress(FileNotFoundError):
            return self._call("cat_file", self._path(name))
        return None

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that is not there yet; return False if it is there: perhaps of a request without a response."""
        try:
            if self.scheme in BY_OPEN:
                with self._call("open", self._path(name), "xb") as file:
                    file.write(data)
            else:
                self._call("pipe_file", self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def put(self, path: Path, name: str) -> None:
        """Upload a file; at any moment the store has the earlier one or the new one, whole."""
        if self.scheme not in DISKS:
            self._call("put_file", str(path), self._path(name))
            return
        part = self._path(name) + ".part"  # a disk would have half of it if this process is killed
        self._call("put_file", str(path), part)
        self._call("mv", part, self._path(name))

    def get(self, name: str, path: Path) -> None:
        """Download a file; at any moment `path` is complete or absent."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        self._call("get_file", self._path(name), str(part))
        atomic_folder.fsync(part)
        part.replace(path)

    def delete(self, *names: str) -> None:
        """Delete files one after the other; one that is gone already is no error."""
        for name in names:
            with suppress(FileNotFoundError):
                self._call("rm_file", self._path(name))

    def copy(self, name: str, target: str) -> None:
        """Copy a file within the store."""
        self._call("cp_file", self._path(name), self._path(target))
