"""Cache folder for downloads and prepared data: samples, and work that one process does once per machine or shared disk.

Processes coordinate through file locks only, never through a collective. So this works before a process group exists,
between launches that start together, and on nodes with a shared disk or local disks. The kernel releases the lock of a
process that dies, and the next process does its work. An atomic rename publishes each result, and every process would
write the same bytes. So a file system that ignores locks only costs repeated work.

Tests: tests/engine/storage/test_shared_work.py and tests/samples/.
"""

import errno
import hashlib
import json
import shutil
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock, Timeout

from engine.config.errors import UsageError, errors_of, warn
from engine.config.paths import REPOSITORY
from engine.config.run_config import RunConfig
from engine.storage.code_hash import code_hash

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
NOTICE_AFTER = 10.0  # seconds of waiting before a message


def run_once(target: Path, make: Callable[[], None], what: str) -> None:
    """Call `make()`, which creates `target` atomically, in one process. Return when `target` exists.

    If `make` fails, its process raises the error, and the next process tries it: the launcher ends the other ranks, or
    they meet the same error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cache_dir: {target.parent} cannot be created: {error}") from error
    if not target.exists():
        with exclusive(target, what):
            if not target.exists():
                make()


def exclusive(target: Path, what: str) -> AbstractContextManager:
    """Take the lock of `target` for a `with` block: no process of any launch can work on it in the meantime.

    A folder that is read-only has no lock and needs none."""
    lock = FileLock(f"{target}.lock")
    try:
        return lock.acquire(timeout=NOTICE_AFTER)
    except Timeout:
        warn(f"waiting for another process: {what}")
        return lock.acquire()
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        return nullcontext()


# ---- the folder, and the sample datasets made in it: one for each file of samples/ -----------------------------------


def cache_root(cfg: RunConfig) -> Path:
    """Return the cache folder for downloads and prepared data: one per host if `cache_per_node` is set."""
    import datasets

    root = Path(cfg.cache_dir) if cfg.cache_dir else Path(datasets.config.HF_DATASETS_CACHE).expanduser()
    return root / f"node_{socket.gethostname()}" if cfg.cache_per_node else root


def sample_module(name: str) -> ModuleType | None:
    """Return the module samples/NAME.py; None if there is no such sample."""
    if name not in {path.stem for path in (REPOSITORY / "samples").glob("[a-z]*.py")}:
        return None
    return import_module(f"samples.{name}")


def sample_folder(name: str, cache: Path) -> str | None:
    """Return the folder of the sample `name` in `cache`, made on first use; None if no sample of this name makes one.

    Its name holds a hash of the code that makes it, and of what `depends_on()` of the sample returns. So changed code,
    another checkout, or changed input has rows of its own."""
    sample = sample_module(name)
    if sample is None or not hasattr(sample, "make"):
        return None
    input_key = depends_on(sample)
    key = code_hash([*shared_sample_files(), Path(str(sample.__file__))]) + input_key
    target = cache.absolute() / "samples" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def make() -> None:
        print(f"building the sample dataset {name} in {target}", flush=True)
        temporary = target.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        sample.make(temporary)
        if depends_on(sample) != input_key:
            shutil.rmtree(temporary)
            raise UsageError(f"{sample.__file__}: what depends_on() returns changed while make() ran: start again")
        temporary.rename(target)

    run_once(target, make, f"building the sample dataset {name}")
    return str(target)


def shared_sample_files() -> list[Path]:
    """Return the files that samples share, samples/_*.py."""
    return sorted((REPOSITORY / "samples").glob("_*.py"))


def depends_on(sample: Any) -> str:
    """Return what `depends_on()` of a sample returns, as JSON; an empty string if it defines none.

    Raise UsageError if it fails, or returns anything but text, numbers, lists and dicts of them."""
    if not hasattr(sample, "depends_on"):
        return ""
    with errors_of(f"{sample.__file__}: depends_on() (it returns text, numbers, or lists and dicts of them)"):
        return json.dumps(sample.depends_on(), sort_keys=True)


def sample_tokenizer(name: str, cache: Path) -> str | None:
    """Return the folder of the tokenizer of the sample `name`; None if there is no such sample, or it has none."""
    folder = sample_folder(name, cache)
    return f"{folder}/tokenizer" if folder and Path(folder, "tokenizer").exists() else None
