"""Prepare (tokenize) the rows of a split once per disk, in pieces shared by all processes.

Tests: tests/data/test_preprocessing.py. How the rows are cut into pieces depends on the rows alone, so the bytes are the
same for any number of processes; the pieces of a start that was killed are used by the next one.
"""

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from src.config.errors import Failure, UsageError
from src.config.schema import RunConfig
from src.data.arrow_cache import load_raw_rows
from src.data.arrow_columns import check_kinds
from src.data.encode_fingerprint import encode_fingerprint
from src.data.row_location import RowLocations, check_decodable
from src.data.sources import Source
from src.download.cache_folder import cache_root
from src.runtime import console
from src.storage import atomic_folder
from src.storage.shared_work import SharedWork, write_atomic
from src.tasks import Task

PIECE = 4 << 20  # bytes of raw rows in a piece, the unit that a process takes
PIECES = 4096  # at most: above that they grow
BLOCK = 4 << 20  # bytes of raw rows that are in memory at a time, and packed together
BLOCK_ROWS = 10_000  # at most
WEEK = 7 * 24 * 3600
STATS = "facts.json"


def prepare_split(cfg: RunConfig, task: Task, split: str, source: Source, work: SharedWork) -> Path:
    """Return the folder of the prepared rows of a split, whose facts.json is written last; made if it is not there."""
    folder = cache_root(cfg) / "prepared" / _key(cfg, task, split, source)
    if not (folder / STATS).exists():
        _make(cfg, task, split, source, work, folder)
    for name, size in json.loads((folder / STATS).read_text()).get("bytes", {}).items():
        found = (folder / name).stat().st_size if (folder / name).exists() else "no"
        if found != size:
            raise UsageError(
                f"{folder / name} has {found} bytes, {size} were written: remove the folder, it is made again"
            )
    return folder


def _key(cfg: RunConfig, task: Task, split: str, source: Source) -> str:
    """Return a hash of all that prepared rows depend on: the data, the task's view of it, the code, the library."""
    import datasets

    # This file and the readers in full: what decides the bytes besides `encode` is all over them.
    here = Path(__file__).parent
    code = [(here / name).read_text() for name in ("preprocessing.py", "file_readers.py")] + [encode_fingerprint(task)]
    parts = (source.key(), split, task.fingerprint(), code, datasets.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _make(cfg: RunConfig, task: Task, split: str, source: Source, work: SharedWork, folder: Path) -> None:
    raw = load_raw_rows(source, cfg, split, work)
    if raw is None:  # a named data set without such a split
        work.run_once(folder / STATS, lambda: write_atomic(folder / STATS, '{"examples": 0}'), f"{split} data")
        return
    if len(raw) == 0:
        raise UsageError(f"{split} data: {source} holds no rows")
    columns, features = task.inspect_columns(raw, split)
    check_kinds(raw.data.schema, columns, source.files, f"{source.field}: {source}")
    bounds = cut(len(raw), raw.data.nbytes)
    targets = [folder / f"piece_{i:05}.json" for i in range(len(bounds) - 1)]
    block = max(1, min(BLOCK_ROWS, BLOCK * len(raw) // max(1, raw.data.nbytes)))
    raw = raw.with_format(None).select_columns(columns)
    bar = _Bar(f"preparing {split}", len(targets), work)

    def make(i: int) -> None:
        _piece(task, raw, split, source, features, range(bounds[i], bounds[i + 1], block), targets[i], work)
        bar.move(targets)

    try:
        _with_helpers(cfg, work, targets, make, f"preparing {split} data")
        work.run_once(folder / STATS, lambda: _assemble(split, source, task, len(raw), targets, work), f"{split} data")
    except UsageError:
        if work.peers.alone:  # pieces of data that must be fixed are of no use; those of a killed start are
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        bar.close()


def cut(rows: int, size: int) -> list[int]:
    """Return the bounds of the pieces of so many rows of so many bytes: a function of these two, and of nothing else."""
    pieces = max(1, min(rows, PIECES, -(-size // PIECE)))
    return [rows * i // pieces for i in range(pieces + 1)]


def _piece(task, raw, split, source, features, starts: range, target: Path, work: SharedWork) -> None:
    """Write the rows from one piece of the raw ones as Arrow, and then what is known of them, both by a rename."""
    schema, digest = features.arrow_schema, xxhash.xxh3_128()
    sums = dict.fromkeys(("tokens", "targets", "rows_cut", "tokens_cut", "without_target"), 0)
    blocks, lengths, hashes = [], [], []
    ending = f".{work.peers.host}.{os.getpid()}.tmp"
    arrow, numbers = target.with_suffix(".arrow"), target.with_suffix(".npz")
    temporary, other = Path(f"{arrow}{ending}"), Path(f"{numbers}{ending}")
    try:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for start in starts:
                work.peers.raise_if_failed()
                stop = min(start + starts.step, starts.stop)
                places = RowLocations(source, split, start, stop)
                try:
                    batch = raw[start:stop]
                except UnicodeDecodeError:
                    check_decodable(raw, places, lambda rows, i, first=start: rows[first + i])
                    raise
                rows = task.encode(batch, places)
                columns = [pa.array(rows[field.name], field.type) for field in schema]
                batch = pa.record_batch(columns, schema=schema)
                writer.write_batch(batch)
                length, targets, skipped = (np.asarray(rows[name], np.int64) for name in ("length", "targets", "cut"))
                digest.update(batch.serialize())
                blocks.append(len(length))
                lengths.append(length)
                hashes.append(np.array([xxhash.xxh3_64_intdigest(c) for c in _contents(rows)], np.uint64))
                sums["tokens"] += int(length.sum())
                sums["targets"] += int(targets.sum())
                sums["rows_cut"] += int((skipped > 0).sum())
                sums["tokens_cut"] += int(skipped.sum())
                sums["without_target"] += int((targets == 0).sum())
        with open(other, "wb") as file:
            np.savez(file, lengths=np.concatenate(lengths).astype(np.int32), hashes=np.concatenate(hashes))
        for path, final in ((temporary, arrow), (other, numbers)):
            atomic_folder.fsync(path)
            path.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
    write_atomic(
        target,
        json.dumps(
            sums
            | {"blocks": blocks, "hashes": sum(map(len, hashes)), "rows": digest.hexdigest(), "schema": str(schema)}
        ),
    )


def _contents(rows: dict) -> list[bytes]:
    """Return what each prepared row, or each document of a packed one, holds: equal examples are to be found again."""
    ids = rows.get("input_ids", [])
    if "documents" in rows:
        ends = [np.cumsum([0, *sizes]) for sizes in rows["documents"]]
        return [bytes(np.asarray(r[a:b], np.int32)) for r, e in zip(ids, ends, strict=True) for a, b in pairwise(e)]
    names = sorted(set(rows) - {"length", "targets", "cut", "bytes"})
    return [repr(row).encode() for row in zip(*(rows[name] for name in names), strict=True)]


def _assemble(split: str, source: Source, task: Task, raw_rows: int, targets: list[Path], work: SharedWork) -> None:
    """Write what is known of all rows: their lengths, their hashes, and the facts last."""
    pieces, folder = [json.loads(target.read_text()) for target in targets], targets[0].parent
    examples = sum(sum(piece["blocks"]) for piece in pieces)
    stats = {name: sum(piece[name] for piece in pieces) for name in ("tokens", "targets", "rows_cut", "tokens_cut")}
    if not stats["targets"]:
        raise UsageError(
            f"{split} data: none of the {raw_rows} rows of {source} has anything to train on: every row is too short, or all of its "
            "labels are masked (-100)"
        )
    stats["longest"], ending = 0, f"{work.peers.host}.{os.getpid()}.tmp"
    for name, kind, count in (("lengths", np.int32, examples), ("hashes", np.uint64, sum(p["hashes"] for p in pieces))):
        whole = np.lib.format.open_memmap(folder / f"{name}.{ending}", "w+", kind, (count,))
        start = 0
        for target in targets:
            with np.load(target.with_suffix(".npz")) as numbers:
                part = numbers[name]
            whole[start : start + len(part)] = part
            start += len(part)
            stats["longest"] = (
                max(stats["longest"], int(part.max(initial=0))) if name == "lengths" else stats["longest"]
            )
        whole.flush()
        del whole
        (folder / f"{name}.{ending}").replace(folder / f"{name}.npy")
    digest = xxhash.xxh3_128(repr([(piece["schema"], piece["rows"]) for piece in pieces]).encode()).hexdigest()
    stats |= {"examples": examples, "source_rows": raw_rows, "rows": digest}
    stats |= {"without_target": sum(piece["without_target"] for piece in pieces), "files": source.sizes()}
    stats |= {"unread": source.unread[:4]}
    stats |= {"tokenizer": xxhash.xxh3_128_hexdigest(task.fingerprint().encode())}
    stats |= {
        "pieces": [[target.with_suffix(".arrow").name, p["blocks"]] for target, p in zip(targets, pieces, strict=True)]
    }
    written = [folder / "lengths.npy", folder / "hashes.npy", *(target.with_suffix(".arrow") for target in targets)]
    stats["bytes"] = {path.name: path.stat().st_size for path in written}
    write_atomic(folder / STATS, json.dumps(stats))
    if work.peers.locks_work:  # else somebody may still be reading them
        for left in (*folder.glob("*.npz"), *folder.glob("*.lock"), *folder.glob("*.tmp")):
            left.unlink(missing_ok=True)
    _sweep(folder.parent)


def _sweep(root: Path) -> None:
    """Remove what starts that were killed have left more than a week ago, and nobody has gone on with."""
    for folder in root.iterdir():
        with suppress(OSError):
            if folder.is_dir() and not (folder / STATS).exists() and time.time() - folder.stat().st_mtime > WEEK:
                shutil.rmtree(folder, ignore_errors=True)


# ---- processes besides this one ----------------------------------------------------------------------------------------


def _with_helpers(cfg: RunConfig, work: SharedWork, targets: list[Path], make, what: str) -> None:
    """Share the pieces with all processes of the disk, and with `preprocessing_num_workers` − 1 children of this one."""
    missing = sum(not target.exists() for target in targets)
    count = min(cfg.preprocessing_num_workers, missing) - 1
    parent = os.getpid()

    def help_out() -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of a tokenizer do not survive a fork
        try:
            work.run_all(targets, lambda i: make(i) if os.getppid() == parent else os._exit(1), what)
        except BaseException as error:
            work.peers.report_failure(error)
            os._exit(1)
        os._exit(0)

    children = [get_context("fork").Process(target=help_out, daemon=True) for _ in range(count)]
    for child in children:
        child.start()
    try:
        work.run_all(targets, make, what)
        for child in children:
            child.join()
        work.peers.raise_if_failed()
        if died := [child.exitcode for child in children if child.exitcode]:
            raise Failure(f"a helper process of {what} ended with {died[0]} (killed?)")
    finally:
        for child in children:
            child.kill()


class _Bar:
    """Shows on one process of a machine how many pieces are done."""

    def __init__(self, what: str, pieces: int, work: SharedWork):
        self.shown = os.environ.get("LOCAL_RANK", "0") == "0" and pieces > 1
        self.bar = console.bar(what, pieces, "piece", shown=self.shown)
        self.owner = os.getpid()

    def move(self, targets: list[Path]) -> None:
        if self.shown and os.getpid() == self.owner:
            self.bar.update(sum(target.exists() for target in targets) - self.bar.n)

    def close(self) -> None:
        self.bar.close()
