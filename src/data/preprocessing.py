"""Preprocessing (tokenization) of a split, once per machine or shared disk, in pieces shared by all processes.

The pieces depend only on the rows, so the bytes are the same for any number of processes. A new start reuses the pieces
of a killed one. Tests: tests/data/test_preprocessing.py.
"""

import hashlib
import json
import os
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from src.config.errors import Failure, UsageError
from src.config.schema import RunConfig
from src.data.arrow_cache import RawRows, load_raw_rows
from src.data.arrow_columns import has_media, keep_encoded, refuse_mixed_types
from src.data.encode_fingerprint import encode_fingerprint
from src.data.prepared_pieces import STATS, write_piece, write_stats
from src.data.sources import Source
from src.runtime import console
from src.storage.cache_folder import cache_root
from src.storage.shared_work import SharedWork, write_atomic
from src.tasks import Task

if TYPE_CHECKING:
    from datasets import Dataset

PIECE = 4 << 20  # bytes of raw rows in a piece; a process works on one piece at a time
PIECES = 4096  # maximum number of pieces: with more rows each piece is larger
BLOCK = 4 << 20  # bytes of raw rows that are loaded, encoded and packed together
BLOCK_ROWS = 10_000  # maximum rows of a block
WEEK = 7 * 24 * 3600
# Files that, besides `encode`, determine the prepared bytes
CODE = ("preprocessing.py", "prepared_pieces.py", "file_readers.py", "arrow_columns.py")


def prepare_rows(cfg: RunConfig, task: Task, source: Source, work: SharedWork) -> Path:
    """Return the folder of a source's prepared rows. Prepare them if facts.json, which is written last, is missing."""
    folder = cache_root(cfg) / "prepared" / _key(task, source)
    if not (folder / STATS).exists():
        _prepare(cfg, task, source, work, folder)
    for name, size in json.loads((folder / STATS).read_text()).get("bytes", {}).items():
        found = (folder / name).stat().st_size if (folder / name).exists() else "no"
        if found != size:
            raise UsageError(
                f"{folder / name} has {found} bytes instead of {size}: remove the folder {folder} to prepare it again"
            )
    return folder


def _key(task: Task, source: Source) -> str:
    """Return the cache key of prepared rows: a hash of the data, task, code and version of `datasets`."""
    import datasets

    code = [(Path(__file__).parent / name).read_text() for name in CODE] + [encode_fingerprint(task)]
    parts = (source.key(), source.split, task.fingerprint(), task.decode_media, code, datasets.__version__)
    parts += (_tokenizer_settings(task),)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _tokenizer_settings(task: Task) -> list[tuple[str, str]]:
    """Return the settings of a task's tokenizer that tokenizer.json lacks, such as the end-of-text token.

    A base model and its instruct variant may differ in nothing else."""
    tokenizer = getattr(task, "tokenizer", None)
    special = sorted(getattr(tokenizer, "special_tokens_map", {}).items())
    names = ("truncation_side", "split_special_tokens")
    return [(name, str(value)) for name, value in special] + [
        (name, str(getattr(tokenizer, name, ""))) for name in names
    ]


def _prepare(cfg: RunConfig, task: Task, source: Source, work: SharedWork, folder: Path) -> None:
    raw = load_raw_rows(source, cfg, work)
    what = f"{source.split} data"
    if raw is None:  # the dataset has no such split
        work.run_once(folder / STATS, lambda: write_atomic(folder / STATS, '{"examples": 0}'), what)
        return
    count = len(raw.rows)
    if count == 0:
        raise UsageError(f"{what}: {source} holds no rows")
    columns, features = task.inspect_columns(raw.rows, source.split)
    refuse_mixed_types(raw.rows.data.schema, columns, source.files, f"{source.field}: {source}")
    rows = raw.rows.with_format(None).select_columns(columns)
    size = raw.rows.data.nbytes + bytes_in_files(rows)
    bounds = piece_bounds(count, size)
    targets = [folder / f"piece_{i:05}.json" for i in range(len(bounds) - 1)]
    block = max(1, min(BLOCK_ROWS, BLOCK * count // max(1, size)))
    raw = replace(raw, rows=rows if task.decode_media else keep_encoded(rows))
    shown, parent = os.environ.get("LOCAL_RANK", "0") == "0" and len(targets) > 1, os.getpid()
    bar = console.bar(f"preparing {source.split}", len(targets), "piece", shown=shown)

    def make(i: int) -> None:
        write_piece(task, raw, features, range(bounds[i], bounds[i + 1], block), targets[i], work)
        if shown and os.getpid() == parent:  # of all processes, one per machine
            bar.update(sum(target.exists() for target in targets) - bar.n)

    try:
        _run_with_helpers(cfg.preprocessing_num_workers, work, targets, make, f"preparing {what}")
        work.run_once(folder / STATS, lambda: _finish(task, raw, targets, work), what)
    except UsageError:
        if work.world_size == 1:  # the user must fix the data, so these pieces cannot be reused
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        bar.close()


def bytes_in_files(rows: "Dataset") -> int:
    """Return about how many bytes the files hold that rows of images name, from the sizes of a hundred files."""
    if not has_media(rows):
        return 0
    chosen = range(0, len(rows), max(1, len(rows) // 100))
    values = [value for row in keep_encoded(rows).select(chosen) for value in row.values() if isinstance(value, dict)]
    files = [value["path"] for value in values if value.get("path") and value.get("bytes") is None]
    return len(rows) * sum(os.path.getsize(file) for file in files if os.path.exists(file)) // len(chosen)


def piece_bounds(rows: int, size: int) -> list[int]:
    """Return the piece bounds for `rows` rows of `size` bytes. They depend on nothing else."""
    pieces = max(1, min(rows, PIECES, -(-size // PIECE)))
    return [rows * i // pieces for i in range(pieces + 1)]


def _finish(task: Task, raw: RawRows, targets: list[Path], work: SharedWork) -> None:
    """Write the statistics. Remove temporary files, and unfinished folders of other data that are older than a week."""
    write_stats(raw, targets, work)
    folder = targets[0].parent
    if work.locks_work():  # without file locks another process may still read them
        for left in (*folder.glob("*.npz"), *folder.glob("*.lock"), *folder.glob("*.tmp")):
            left.unlink(missing_ok=True)
    for other in folder.parent.iterdir():
        with suppress(OSError):
            if other.is_dir() and not (other / STATS).exists() and time.time() - other.stat().st_mtime > WEEK:
                shutil.rmtree(other, ignore_errors=True)


def _run_with_helpers(
    processes: int, work: SharedWork, targets: list[Path], make: Callable[[int], None], what: str
) -> None:
    """Make all pieces, together with all processes on this disk and up to `processes` − 1 children of this one."""
    missing = sum(not target.exists() for target in targets)
    context, parent = get_context("fork"), os.getpid()
    pipes = [context.Pipe(duplex=False) for _ in range(min(processes, missing) - 1)]
    receivers = [receiver for receiver, _ in pipes]
    children = [
        context.Process(target=_help_parent, args=(sender, parent, work, targets, make, what), daemon=True)
        for _, sender in pipes
    ]

    def make_unless_a_child_failed(i: int) -> None:
        _raise_error_of_a_child(receivers)
        make(i)

    for child in children:
        child.start()
    try:
        work.run_all(targets, make_unless_a_child_failed, what)
        while any(child.is_alive() for child in children):
            _raise_error_of_a_child(receivers)
            time.sleep(0.05)
        _raise_error_of_a_child(receivers)
        if failed := [child.exitcode for child in children if child.exitcode]:
            raise Failure(
                f"{what}: a child process died (exit code {failed[0]}; −9: killed, perhaps because host memory was full)"
            )
    finally:
        for child in children:
            child.kill()


def _help_parent(
    sender, parent: int, work: SharedWork, targets: list[Path], make: Callable[[int], None], what: str
) -> NoReturn:
    """Make pieces in a child process until all exist or the parent has ended; send an error to the parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of a tokenizer do not survive a fork

    def make_while_parent_lives(i: int) -> None:
        if os.getppid() != parent:
            os._exit(1)
        make(i)

    try:
        work.run_all(targets, make_while_parent_lives, what)
    except (UsageError, OSError) as error:
        sender.send(error)
        os._exit(1)
    except BaseException:
        sender.send(Failure(f"{what}: a child process failed:\n{traceback.format_exc()}"))
        os._exit(1)
    os._exit(0)


def _raise_error_of_a_child(receivers: list) -> None:
    for receiver in receivers:
        if receiver.poll():
            raise receiver.recv()
