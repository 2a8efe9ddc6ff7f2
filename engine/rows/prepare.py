"""Preparation (tokenization) of a split: once per disk, in blocks, by processes of one rank; published complete.

The rows depend only on the data, so they are the same for any number of processes. Tests: tests/engine/rows/test_prepare.py.
"""

import hashlib
import inspect
import json
import os
import pickle
import shutil
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import compress
from pathlib import Path
from socket import gethostname
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from engine.config.errors import Counted, Failure, UsageError, kept_warnings, one_line, warn_once
from engine.config.run_config import RunConfig
from engine.process import console
from engine.process.worker_processes import in_processes
from engine.rows.columns import named_in_errors, with_columns
from engine.rows.examples import Block, Examples, load_examples
from engine.rows.file_parts import Row, bad_rows_error
from engine.rows.prepared_split import ARRAYS, COUNTS, ROWS, STATS, SUMS, column_readers
from engine.rows.sources import Source
from engine.storage import atomic_folder, verify_hashes
from engine.storage.cache_folder import cache_root, run_once
from engine.storage.code_hash import code_hash

NOT_ENCODING = ("engine.task", "builtins", "typing")  # modules of classes above a task


class RowTask(Protocol):
    """What preparation asks of a task: all that stands on this side of the prepared rows (engine/task.py explains it)."""

    cfg: RunConfig
    decode_media: bool
    reads_chats: bool
    row_description: str
    without_targets: str
    id_columns: tuple[str, ...]
    encode_helpers: tuple[ModuleType, ...]

    def fingerprint(self) -> Any: ...
    def inspect_columns(self, examples: Any, split: str) -> tuple[list[str], Any]: ...
    def encode(self, batch: dict[str, list], locations: Any) -> dict[str, list]: ...
    def pack(self, rows: dict[str, list]) -> dict[str, list]: ...


def prepare_rows(cfg: RunConfig, task: RowTask, source: Source) -> Path:
    """Return the folder of a source's prepared rows. If it is missing, one process prepares them; the others wait."""
    folder = cache_root(cfg) / "prepared" / cache_key(task, source)

    def prepare() -> None:
        of_host = folder.with_name(f"{folder.name}.{gethostname()}")  # where locks reach no other host, each prepares
        if not of_host.exists():  # else an earlier start was killed before the rename
            _say_why_again(folder, source)
            atomic_folder.publish(of_host, partial(_write_split, cfg, task, source))
        try:
            of_host.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(of_host, ignore_errors=True)  # another host was faster

    run_once(folder, prepare, f"preparing {source.split} data")
    sizes = {name: entry["size"] for name, entry in verify_hashes.read_manifest(folder).get("files", {}).items()}
    for name, size in (sizes or {verify_hashes.MANIFEST: None}).items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise UsageError(f"cache_dir: {folder / name} is damaged: remove the folder {folder}, and start again")
    return folder


# ---- cache key -------------------------------------------------------------------------------------------------------


def cache_key(task: RowTask, source: Source) -> str:
    """Return the cache key of prepared rows: a hash of the data and what the task makes of it, and one of the code."""
    import datasets

    # A base model and its instruct variant may differ only in settings that tokenizer.json lacks, such as end of text.
    tokenizer = getattr(task, "tokenizer", None)
    settings = {name: getattr(tokenizer, name, "") for name in ("truncation_side", "split_special_tokens")}
    settings = sorted((n, str(value)) for n, value in (getattr(tokenizer, "special_tokens_map", {}) | settings).items())
    rows = (source.key(), source.split, task.fingerprint(), task.decode_media, settings)
    rows += (sorted(task.cfg.columns.items()),) + ("drop",) * (task.cfg.long_rows == "drop")
    code = code_hash(encode_files(task))
    hashes = [hashlib.sha256(repr(part).encode()).hexdigest() for part in (rows, (code, datasets.__version__))]
    return f"{hashes[0][:32]}-{hashes[1][:16]}"


def _say_why_again(folder: Path, source: Source) -> None:
    """Print a line if the same rows are there already, prepared by other code."""
    rows = folder.name.partition("-")[0]
    there = [path for path in folder.parent.glob(f"{rows}-*") if path.is_dir()]
    if not all(path.name.startswith(folder.name) for path in there):
        print(f"preparing {source.split} data again: its code, or the version of `datasets`, has changed", flush=True)


def encode_files(task: RowTask) -> list[Path]:
    """Return the files of the code behind prepared rows: engine/rows, those of the task's classes, and `encode_helpers`.

    Of a task that is a folder, all its files."""
    files = [Path(module.__file__ or "") for module in task.encode_helpers]
    files += [Path(inspect.getfile(c)) for c in type(task).__mro__ if c.__module__ not in NOT_ENCODING]
    every = [file.parent.glob("*.py") if file.stem == "__init__" else [file] for file in files]
    return sorted({path for files in (Path(__file__).parent.glob("*.py"), *every) for path in files})


# ---- all rows of a split ---------------------------------------------------------------------------------------------


def _write_split(cfg: RunConfig, task: RowTask, source: Source, folder: Path) -> None:
    """Write the prepared rows of a source and their statistics to `folder`."""
    before = source.key()
    processes = cfg.preprocessing_num_workers * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the other ranks wait
    with kept_warnings() as warnings:
        examples = load_examples(source, cfg)
    # None: no such split
    stats = {"examples": 0} if examples is None else _write_rows(task, examples, processes, folder, warnings)
    if source.key() != before:
        raise UsageError(f"{source.field}: {source} changed while it was read: start again when it is complete")
    (folder / STATS).write_text(json.dumps(stats))


def _write_rows(
    task: RowTask, examples: Examples, processes: int, folder: Path, of_files: dict[str, str]
) -> dict[str, Any]:
    """Encode all rows, write them and their arrays of numbers to `folder`, and return the statistics.

    `of_files`: the warnings about the files that hold the rows."""
    source = examples.source
    with kept_warnings() as warnings:
        _warn_of_dropped_characters(task, source)
        columns, features = inspect_columns(task, examples)
    schema = features.arrow_schema
    stats: dict[str, Any] = dict.fromkeys((*SUMS, "longest"), 0) | {"splits": examples.splits, "blocks": []}
    stats |= {"row_description": with_columns(task.row_description, task.cfg.columns), "chats": task.reads_chats}
    stats |= {"warnings": {}, "counted": {}}
    _say(of_files | warnings, stats)
    digest = xxhash.xxh3_128(str(schema).encode())
    count = 0
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in ARRAYS}
        writer = stack.enter_context(pa.ipc.new_file(str(folder / ROWS), schema))
        progress = console.Progress(f"preparing {source.split}", examples.size(), "bytes")
        encode = partial(encode_block, task, examples, columns, schema)
        blocks = stack.enter_context(closing(in_processes(processes, encode, examples.blocks(columns))))
        for batch, arrays, sums, warnings, size in blocks:
            _say(warnings, stats)
            writer.write_batch(batch)
            digest.update(batch.serialize())
            for name, file in files.items():
                file.write(arrays[name].tobytes())
            for name, value in zip(SUMS, sums, strict=True):
                stats[name] += int(value)
            count += len(arrays["kept"])
            stats["longest"] = max(stats["longest"], int(arrays["lengths"].max(initial=0)))
            stats["blocks"].append(batch.num_rows)
            progress.update(size)
    if not stats["source_rows"]:
        raise UsageError(source.explain_no_rows(count))
    if not stats["targets"]:
        rows = f"none of the {stats['source_rows']} rows of {source} has anything to train on"
        raise UsageError(f"{source.split} data: {rows}: {_reason_for_no_targets(task, stats)}")
    return stats | {"rows": digest.hexdigest()}


def _say(warnings: dict[str, Any], stats: dict[str, Any]) -> None:
    """Print what is new of these warnings, and add it to the statistics, so that each start says it again.

    What is counted is a note of the plan."""
    for kind, text in warnings.items():
        if isinstance(text, Counted):
            first, number = stats["counted"].get(kind, (text.first, 0))
            stats["counted"][kind] = Counted(first, number + text.number)
            continue
        stats["warnings"].setdefault(kind, text)
        warn_once(text, kind)


def _reason_for_no_targets(task: RowTask, stats: dict[str, Any]) -> str:
    """Return the reason, and the fix if there is one, from the counts of a split without a target."""
    if long := stats["rows_cut"] + stats["rows_dropped"]:
        done = "long_rows: drop leaves them out" if stats["rows_dropped"] else "truncation has removed their targets"
        return f"{long:,} of them are longer than max_length, and {done}: raise --max_length"
    if stats["longest"] < 2:
        return "every row is too short: no row has two tokens"
    return task.without_targets


def inspect_columns(task: RowTask, examples: Examples) -> tuple[list[str], Any]:
    """Return what the task's `inspect_columns` returns for rows whose columns have the names of its parts."""
    columns = task.cfg.columns
    examples.name_columns(columns, bool(task.cfg.mixture))
    with named_in_errors(columns):
        return task.inspect_columns(examples, examples.source.split)


def encode_block(
    task: RowTask, examples: Examples, columns: list[str], schema: pa.Schema, block: Block
) -> tuple[pa.RecordBatch, dict, tuple, dict, int]:
    """Return the prepared rows of a block of raw rows, `ARRAYS` and `SUMS`, the warnings about its rows, its bytes."""
    size = sum(part.size for part in block)
    rows = [row for part in block for row in examples.read(part, columns)]
    kept = examples.source.choose_rows([row.values for row in rows], examples.features)
    kept |= np.array([bool(row.error) for row in rows], bool)
    chosen = [rows[i] for i in np.flatnonzero(kept)]
    if not chosen:
        empty = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()} | {"kept": kept}
        return pa.RecordBatch.from_pylist([], schema), empty, (0,) * len(SUMS), {}, size
    with kept_warnings() as warnings:
        decoded = examples.decode(chosen, columns, task.decode_media)
        encoded, batch, dropped = encode_rows(task, decoded, columns, schema)
    lengths, targets, cut = (np.asarray(encoded[name], np.int64) for name in COUNTS)
    hashes = np.array([xxhash.xxh3_64_intdigest(content) for content in _contents(batch)], np.uint64)
    sums = (kept.sum(), lengths.sum(), targets.sum(), (cut > 0).sum(), cut.sum() + dropped.sum(), (targets == 0).sum())
    sums += (_unknown_tokens(task, batch), len(lengths), (dropped > 0).sum())
    if len(dropped) == len(chosen):  # else `encode` makes several rows of one
        kept[kept] = dropped == 0
    return batch, {"lengths": lengths.astype(np.int32), "hashes": hashes, "kept": kept}, sums, warnings, size


def encode_rows(
    task: RowTask, rows: list[Row], columns: list[str], schema: pa.Schema
) -> tuple[dict[str, list], pa.RecordBatch, np.ndarray]:
    """Return what the task makes of raw rows, the same as Arrow columns, and what `long_rows` drops of it: for each row
    that the task's `encode` returns its tokens, 0 for a row that stays.

    If that fails, raise UsageError for the first row that is bad or fails alone, with the number of others."""

    def encode(some: list[Row]) -> tuple[dict[str, list], pa.RecordBatch, np.ndarray]:
        batch = {name: [row.values[name] for row in some] for name in columns}
        with named_in_errors(task.cfg.columns):
            encoded = task.encode(batch, [row.place for row in some])
        cut = np.asarray(encoded["cut"], np.int64)
        is_dropped = (cut > 0) & (task.cfg.long_rows == "drop")
        dropped = (np.asarray(encoded["length"], np.int64) + cut) * is_dropped
        if is_dropped.any():
            encoded = {name: [*compress(values, ~is_dropped)] for name, values in encoded.items()}
        encoded = task.pack(encoded)
        arrays = [pa.array(encoded[field.name], field.type) for field in schema]
        return encoded, pa.record_batch(arrays, schema=schema), dropped

    def error_of(row: Row) -> Exception | None:
        if row.error:
            return UsageError(f"{row.place}: {row.error}")
        try:
            encode([row])
        except (Failure, MemoryError):
            raise
        except Exception as error:
            return error
        return None

    error: Exception | None = None
    try:
        if not any(row.error for row in rows):
            return encode(rows)
    except (Failure, MemoryError):
        raise
    except Exception as failed:
        error = failed
    errors = [(row, each) for row in rows if (each := error_of(row))]
    if not errors:  # each row alone is good
        assert error is not None
        raise error
    row, first = errors[0]
    text = str(first)
    if not isinstance(first, UsageError):  # the code of the task may be in error as well as the row
        traceback.print_exception(first, chain=False)
        text = f"{row.place}: `encode` of task {task.cfg.task} fails: {type(first).__name__}: {one_line(first, 200)}"
    raise bad_rows_error(text, len(errors), len(rows)) from first


def _unknown_tokens(task: RowTask, batch: pa.RecordBatch) -> int:
    """Return how many token ids of prepared rows are the unknown token of the tokenizer.

    Where that is also the end of the text, as in GPT-2, the tokenizer knows all bytes."""
    tokenizer: Any = getattr(task, "tokenizer", None)
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return 0
    columns = [batch[name] for name in task.id_columns if name in batch.schema.names]
    lists = [pc.list_flatten(ids) for ids in columns if pa.types.is_nested(ids.type)]
    return sum(pc.sum(pc.equal(ids, unknown)).as_py() or 0 for ids in lists)


def _warn_of_dropped_characters(task: RowTask, source: Source) -> None:
    """Warn of a tokenizer that has no token for a character that it does not know, and so leaves it out."""
    tokenizer: Any = getattr(task, "tokenizer", None)
    if not hasattr(tokenizer, "is_fast"):
        return
    try:
        ids = tokenizer("\u4e00\u2a5d", add_special_tokens=False)["input_ids"]
    except Exception:  # it refuses what it does not know
        return
    if not ids:
        warn_once(
            f"{source.split} data: the tokenizer has no unknown token, nor one for each byte: it leaves out the characters "
            "that it does not know, such as \u4e00"
        )


def _contents(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield the bytes of each prepared row, or of each document of a packed row, to find duplicates by hash."""
    readers: dict[str, Any] = dict(sorted(column_readers(batch)))
    for i in range(batch.num_rows):
        if "documents" in readers:
            yield from (
                ids.tobytes() for ids in np.split(readers["input_ids"](i), readers["documents"](i).cumsum()[:-1])
            )
        else:
            values = [read(i) for read in readers.values()]  # numpy pickles slowly
            yield pickle.dumps([value.tobytes() if hasattr(value, "tobytes") else value for value in values])
