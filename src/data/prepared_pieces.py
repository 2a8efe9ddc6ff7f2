"""Pieces of prepared (tokenized) rows: encode, write, merge statistics.

A piece is three files: .arrow (rows), .npz (lengths and hashes) and .json (statistics, written last).
Tests: tests/data/test_preprocessing.py.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from src.config.errors import UsageError
from src.data.arrow_cache import RawRows
from src.data.arrow_columns import column_readers
from src.data.encode_rows import encode_rows
from src.data.row_errors import RowLocations, read_rows
from src.storage import atomic_folder
from src.storage.shared_work import SharedWork, write_atomic
from src.tasks import Task

STATS = "facts.json"
SUMS = ("source_rows", "tokens", "targets", "rows_cut", "tokens_cut", "without_target")
KEPT = "kept.npy"  # for each raw row whether it belongs to the split, if not all rows do


def write_piece(task: Task, raw: RawRows, features, starts: range, target: Path, work: SharedWork) -> None:
    """Encode the raw rows of the range `starts` (its step is the block size) and publish them as piece `target`."""
    schema, digest = features.arrow_schema, xxhash.xxh3_128()
    sums = dict.fromkeys(SUMS, 0)
    blocks, kept = [], []
    lengths, hashes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    with (
        published(target.with_suffix(".arrow"), work) as path,
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, schema) as writer,
    ):
        for start in starts:
            ids = range(start, min(start + starts.step, starts.stop))
            if (chosen := raw.source.choose_rows(raw, ids)) is not None:
                kept.append(chosen)
                ids = (start + np.flatnonzero(chosen)).tolist()
            sums["source_rows"] += len(ids)
            if not ids:
                continue
            locations = RowLocations(raw.source.split, ids, raw.describe_row)
            rows, batch = encode_rows(task, read_rows(raw.rows, ids, locations), locations, schema)
            writer.write_batch(batch)
            digest.update(batch.serialize())
            length, targets, cut = (np.asarray(rows[name], np.int64) for name in ("length", "targets", "cut"))
            blocks.append(len(length))
            lengths.append(length)
            hashes.append(np.array([xxhash.xxh3_64_intdigest(c) for c in _contents(batch)], np.uint64))
            sums["tokens"] += int(length.sum())
            sums["targets"] += int(targets.sum())
            sums["rows_cut"] += int((cut > 0).sum())
            sums["tokens_cut"] += int(cut.sum())
            sums["without_target"] += int((targets == 0).sum())
    with published(target.with_suffix(".npz"), work) as path, open(path, "wb") as file:
        arrays: dict[str, Any] = {"lengths": np.concatenate(lengths).astype(np.int32), "hashes": np.concatenate(hashes)}
        if kept:
            arrays["kept"] = np.concatenate(kept)
        np.savez(file, **arrays)
    known = {"blocks": blocks, "hashes": sum(map(len, hashes)), "rows": digest.hexdigest(), "schema": str(schema)}
    write_atomic(target, json.dumps(sums | known))


@contextmanager
def published(final: Path, work: SharedWork) -> Iterator[Path]:
    """Yield a temporary path. Afterwards fsync the file and rename it to `final`, or remove it after an error."""
    path = temporary_path(final, work)
    try:
        yield path
        atomic_folder.fsync(path)
        path.replace(final)
    finally:
        path.unlink(missing_ok=True)


def temporary_path(final: Path, work: SharedWork) -> Path:
    return final.with_name(f"{final.name}.{work.host}.{os.getpid()}.tmp")


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


def write_stats(raw: RawRows, targets: list[Path], work: SharedWork) -> None:
    """Merge the lengths and the hashes of all pieces into one file each. Write the statistics of all rows last."""
    source, folder = raw.source, targets[0].parent
    pieces = [json.loads(target.read_text()) for target in targets]
    stats = {name: sum(piece[name] for piece in pieces) for name in SUMS}
    if not stats["source_rows"]:
        raise UsageError(source.explain_no_rows(len(raw.rows)))
    if not stats["targets"]:
        raise UsageError(
            f"{source.split} data: none of the {stats['source_rows']} rows of {source} has anything to train on: every row is too "
            "short, or all of its labels are masked (-100)"
        )
    examples = sum(sum(piece["blocks"]) for piece in pieces)
    lengths = _join("lengths", np.int32, examples, targets, work)
    _join("hashes", np.uint64, sum(piece["hashes"] for piece in pieces), targets, work)
    if stats["source_rows"] < len(raw.rows):
        _join("kept", bool, len(raw.rows), targets, work)
    arrows = [target.with_suffix(".arrow") for target in targets]
    written = [folder / "lengths.npy", folder / "hashes.npy", *arrows]
    digest = xxhash.xxh3_128_hexdigest(repr([(piece["schema"], piece["rows"]) for piece in pieces]).encode())
    stats |= {
        "longest": int(lengths.max(initial=0)),
        "examples": examples,
        "rows": digest,
        "unread": raw.unread[:4],
        "splits": raw.splits,
        "pieces": [[arrow.name, piece["blocks"]] for arrow, piece in zip(arrows, pieces, strict=True)],
        "bytes": {path.name: path.stat().st_size for path in written},
    }
    write_atomic(folder / STATS, json.dumps(stats))


def _join(name: str, kind: type, count: int, targets: list[Path], work: SharedWork) -> np.ndarray:
    """Concatenate the array `name` of all pieces into the file NAME.npy, and return it memory-mapped."""
    final = targets[0].parent / f"{name}.npy"
    path = temporary_path(final, work)
    whole = np.lib.format.open_memmap(path, "w+", kind, (count,))
    start = 0
    for target in targets:
        with np.load(target.with_suffix(".npz")) as numbers:
            part = numbers[name]
        whole[start : start + len(part)] = part
        start += len(part)
    whole.flush()
    path.replace(final)
    return whole
