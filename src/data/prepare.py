"""Preparation (tokenization) of a split: once per disk, in parts, by processes of one rank; published complete.

The rows depend only on the data, so they are the same for any number of processes. Tests: tests/data/test_prepare.py.
"""

import json
import os
import shutil
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from src.config.errors import Failure, UsageError
from src.config.schema import RunConfig
from src.data.arrow_columns import column_readers, has_media, keep_encoded, refuse_mixed_types
from src.data.cache_key import cache_key
from src.data.prepared_split import ARRAYS, STATS
from src.data.raw_rows import RawRows, load_raw_rows
from src.data.row_errors import RowLocations, encode_rows, read_rows
from src.data.sources import Source
from src.distributed.stop_signals import end_with_parent
from src.runtime import console
from src.storage import atomic_folder
from src.storage.cache_folder import cache_root
from src.storage.shared_work import SharedWork
from src.tasks import Task

if TYPE_CHECKING:
    from datasets import Dataset

WEEK = 7 * 24 * 3600  # seconds
PART = 4 << 20  # bytes of raw rows in a part; a process works on one part at a time
PARTS = 4096  # maximum number of parts: with more rows each part is larger
BLOCK = 4 << 20  # bytes of raw rows that are loaded, encoded and packed together
BLOCK_ROWS = 10_000  # maximum rows of a block
NUMBERS = {"kept": bool, "length": np.int64, "targets": np.int64, "cut": np.int64, "hashes": np.uint64}
SUMS = ("source_rows", "tokens", "targets", "rows_cut", "tokens_cut", "without_target")


def prepare_rows(cfg: RunConfig, task: Task, source: Source, work: SharedWork) -> Path:
    """Return the folder of a source's prepared rows. If it is missing, one process prepares them; the others wait."""
    folder = cache_root(cfg) / "prepared" / cache_key(task, source)

    def prepare() -> None:
        of_host = folder.with_name(f"{folder.name}.{work.host}")  # where locks reach no other host, each prepares
        if not of_host.exists():  # else an earlier start was killed before the rename
            atomic_folder.publish(of_host, partial(_write_split, cfg, task, source))
        try:
            of_host.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(of_host, ignore_errors=True)  # another host was faster
        _remove_abandoned(folder.parent)

    work.run_once(folder, prepare, f"preparing {source.split} data")
    for name, entry in atomic_folder.read_json(folder / atomic_folder.MANIFEST).get("files", {}).items():
        if (folder / name).stat().st_size != entry["size"]:
            raise UsageError(f"cache_dir: {folder / name} is damaged: remove the folder {folder}, and start again")
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Remove unfinished folders of killed preparations that are older than a week."""
    for unfinished in parent.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - unfinished.stat().st_mtime > WEEK:
                shutil.rmtree(unfinished)


# ---- all rows of a split ---------------------------------------------------------------------------------------------


def _write_split(cfg: RunConfig, task: Task, source: Source, folder: Path) -> None:
    """Write the prepared rows of a source and their statistics to `folder`."""
    before = source.key()
    processes = cfg.preprocessing_num_workers * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the other ranks wait
    raw = load_raw_rows(source, cfg, partial(in_processes, processes))
    stats = {"examples": 0} if raw is None else _write_parts(task, raw, processes, folder)  # None: no such split
    if source.key() != before:
        raise UsageError(f"{source.field}: {source} changed while it was read: start again when it is complete")
    (folder / STATS).write_text(json.dumps(stats))


def _write_parts(task: Task, raw: RawRows, processes: int, folder: Path) -> dict:
    """Write all parts and the arrays of numbers per row. Return the statistics."""
    source, count = raw.source, len(raw.rows)
    if count == 0:
        raise UsageError(f"{source.split} data: {source} holds no rows")
    columns, features = task.inspect_columns(raw.rows, source.split)
    refuse_mixed_types(raw.rows.data.schema, columns, source.files, f"{source.field}: {source}")
    rows = raw.rows.with_format(None).select_columns(columns)
    size = raw.rows.data.nbytes + bytes_in_files(rows)
    block = max(1, min(BLOCK_ROWS, BLOCK * count // max(1, size)))
    raw = replace(raw, rows=rows if task.decode_media else keep_encoded(rows))
    bounds = enumerate(pairwise(part_bounds(count, size)))
    parts = [(range(start, stop, block), folder / f"part_{i:05}.arrow") for i, (start, stop) in bounds]
    stats: dict[str, Any] = dict.fromkeys((*SUMS, "longest", "examples"), 0)
    digests, blocks = [], []
    bar = console.bar(f"preparing {source.split}", len(parts), "part", shown=len(parts) > 1)
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in ARRAYS}
        stack.callback(bar.close)
        write = partial(write_part, task, raw, features.arrow_schema)
        for part in stack.enter_context(closing(in_processes(processes, write, parts))):
            for name in SUMS:
                stats[name] += part[name]
            for name, file in files.items():
                file.write(part[name].tobytes())
            stats["longest"] = max(stats["longest"], int(part["lengths"].max(initial=0)))
            stats["examples"] += len(part["lengths"])
            digests.append((str(features.arrow_schema), part["digest"]))
            blocks.append([parts[len(blocks)][1].name, part["blocks"]])
            bar.update()
    if not stats["source_rows"]:
        raise UsageError(source.explain_no_rows(count))
    if not stats["targets"]:
        rows = f"none of the {stats['source_rows']} rows of {source} has anything to train on"
        raise UsageError(f"{source.split} data: {rows}: every row is too short, or all of its labels are masked (-100)")
    digest = xxhash.xxh3_128_hexdigest(repr(digests).encode())
    return stats | {"rows": digest, "unread": raw.unread[:4], "splits": raw.splits, "parts": blocks}


def part_bounds(rows: int, size: int) -> list[int]:
    """Return the bounds of the parts of `rows` rows of `size` bytes. They depend on nothing else."""
    parts = max(1, min(rows, PARTS, -(-size // PART)))
    return [rows * i // parts for i in range(parts + 1)]


def bytes_in_files(rows: "Dataset") -> int:
    """Return about how many bytes the files hold that rows of images name, from the sizes of a hundred files."""
    if not has_media(rows):
        return 0
    chosen = range(0, len(rows), max(1, len(rows) // 100))
    values = [value for row in keep_encoded(rows).select(chosen) for value in row.values() if isinstance(value, dict)]
    files = [value["path"] for value in values if value.get("path") and value.get("bytes") is None]
    return len(rows) * sum(os.path.getsize(file) for file in files if os.path.exists(file)) // len(chosen)


# ---- one part --------------------------------------------------------------------------------------------------------


def write_part(task: Task, raw: RawRows, schema: pa.Schema, part: tuple[range, Path]) -> dict[str, Any]:
    """Encode the raw rows of a range (its step is the block size) and write them to a file. Return their numbers."""
    (starts, path), digest, blocks = part, xxhash.xxh3_128(), []
    numbers = {name: [np.zeros(0, dtype)] for name, dtype in NUMBERS.items()}
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in starts:
            ids = range(start, min(start + starts.step, starts.stop))
            chosen = raw.source.choose_rows(raw, ids)
            kept = np.ones(len(ids), bool) if chosen is None else chosen
            numbers["kept"].append(kept)
            if not kept.any():
                continue
            ids = ids if chosen is None else (start + np.flatnonzero(kept)).tolist()
            locations = RowLocations(raw.source.split, ids, raw.describe_row)
            rows, batch = encode_rows(task, read_rows(raw.rows, ids, locations), locations, schema)
            writer.write_batch(batch)
            digest.update(batch.serialize())
            blocks.append(batch.num_rows)
            for name in ("length", "targets", "cut"):
                numbers[name].append(np.asarray(rows[name], np.int64))
            numbers["hashes"].append(np.array([xxhash.xxh3_64_intdigest(c) for c in _contents(batch)], np.uint64))
    kept, lengths, targets, cut, hashes = (np.concatenate(arrays) for arrays in numbers.values())
    sums = (kept.sum(), lengths.sum(), targets.sum(), (cut > 0).sum(), cut.sum(), (targets == 0).sum())
    stats = {name: int(total) for name, total in zip(SUMS, sums, strict=True)}
    arrays = {"lengths": lengths.astype(np.int32), "hashes": hashes, "kept": kept}
    return stats | arrays | {"digest": digest.hexdigest(), "blocks": blocks}


def _contents(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield the bytes of each prepared row, or of each document of a packed row, to find duplicates by hash."""
    readers: dict[str, Any] = dict(sorted(column_readers(batch)))
    readers.pop("bytes", None)
    for i in range(batch.num_rows):
        if "documents" in readers:
            ids, ends = readers["input_ids"](i), np.cumsum([0, *readers["documents"](i)])
            yield from (ids[a:b].tobytes() for a, b in pairwise(ends))
        else:
            yield b"|".join(_value_bytes(read(i)) for read in readers.values())


def _value_bytes(value) -> bytes:
    """Return all bytes of an array (its repr would omit the middle), and the repr of any other value."""
    if isinstance(value, np.ndarray | np.generic):
        return repr(value.shape).encode() + value.tobytes()
    return repr(value).encode()


# ---- processes -------------------------------------------------------------------------------------------------------


def in_processes(processes: int, function: Callable[[Any], Any], items: list) -> Generator:
    """Yield `function(item)` of each item, in order, computed in up to `processes` forked processes."""
    processes = min(processes, len(items))
    if processes < 2:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(processes, get_context("fork"), _begin_process, (function,)) as pool:
        try:
            yield from pool.map(_call, items)
        except BrokenProcessPool:
            raise Failure("a process that prepares data died, perhaps because host memory was full") from None


_inherited: list[Callable[[Any], Any]] = []  # the function of a child process


def _begin_process(function: Callable[[Any], Any]) -> None:
    """Keep the function, which is inherited, not pickled. End with the parent, whose file lock this process holds, too."""
    _inherited.append(function)
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of a tokenizer do not survive a fork


def _call(item: Any) -> Any:
    try:
        return _inherited[-1](item)
    except (UsageError, OSError):
        raise
    except Exception:  # of any class: only text reaches the parent for sure
        raise Failure(f"a process that prepares data failed:\n{traceback.format_exc()}") from None
