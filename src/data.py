"""From names and files to rows read by id: fetched once, prepared once, memory-mapped by every process.

Leave alone. Guarded by tests/test_data.py, tests/test_bad_input.py and tests/conformance/. All of it works before a
process group exists, so no collective ever waits for a download or a tokenizer: processes wait on a file lock.
"""

import glob
import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock

from src import samples
from src.fields import RunConfig
from src.inputs import UsageError, absent, locate
from src.tasks import Task

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}


@dataclass
class Split:
    """Prepared rows of one split, on disk; only what is asked for is read."""

    dataset: Any  # in Arrow format, memory-mapped
    lengths: np.ndarray  # memory-mapped, indexed by id
    facts: dict  # examples, tokens, targets, rows and tokens cut off, hashes of rows and tokenizer

    def __len__(self) -> int:
        return self.facts["examples"]

    def rows(self, ids: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Return the rows of `ids` in that order, each column as numpy."""
        table = self.dataset[ids.tolist()]
        columns = {name: _columns(table[name]) for name in table.column_names}
        return [{name: values[i] for name, values in columns.items()} for i in range(len(ids))]


def _columns(column) -> list | np.ndarray:
    """Return an Arrow column as one numpy array, or, where it holds lists, as one view per row."""
    if not hasattr(column.type, "value_field"):
        return column.to_numpy()
    array = column.combine_chunks()
    offsets, values = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False)
    return [values[a:b] for a, b in pairwise(offsets)]


def load_splits(run: RunConfig, task: Task, wanted=("train", "validation")) -> dict[str, Split]:
    """Return the prepared splits that the run file names; without validation data the key is missing."""
    sources = {name: _source(run, name) for name in wanted}  # all names are looked up before anything is prepared
    splits = {name: _prepared(run, task, name, source) for name, source in sources.items() if source}
    splits = {name: split for name, split in splits.items() if split}
    for name in wanted[:1]:
        if name not in splits:
            raise UsageError(f"no {name} data: give --{name}_file, or a dataset with a {name} split")
    return splits


@dataclass
class Source:
    """Where the raw rows of a split are: files for a builder of `datasets`, or a folder or Hub name."""

    files: list[str]
    builder: str | None = None
    name: str | None = None
    hub: tuple | None = None

    def key(self) -> list:
        """Return what tells this data from other data: paths, sizes and times of local files, names and revision of others."""
        stats = [(f, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in self.files if os.path.exists(f)]
        return [self.files, stats, self.builder, self.name, self.hub]


def _source(run: RunConfig, split: str) -> Source | None:
    patterns = {"train": run.train_file, "validation": run.validation_file}[split]
    if patterns:
        files = [file for pattern in patterns for file in _expand(pattern, f"{split}_file")]
        kinds = {Path(file.split("?")[0]).suffix for file in files}
        if len(kinds) > 1 or not kinds <= set(BUILDERS):
            raise UsageError(
                f"{split}_file: {', '.join(files[:3])}: give files of one kind among {', '.join(BUILDERS)}"
            )
        return Source(files, BUILDERS[kinds.pop()])
    if not run.dataset_name or run.train_file:
        return None
    folder = samples.folder(run.dataset_name) or locate(run.dataset_name)
    if not os.path.isdir(folder):
        return Source([], None, run.dataset_name, (run.dataset_config_name, run.dataset_revision, split))
    files = sorted(str(path) for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith("."))
    return Source(files, None, folder, (run.dataset_config_name, None, split))


def _expand(pattern: str, field: str) -> list[str]:
    if "://" in pattern:
        return [pattern]
    found = locate(pattern)
    files = [found] if os.path.isfile(found) else sorted(filter(os.path.isfile, glob.glob(found, recursive=True)))
    if not files:
        what = (
            "is a folder: give it as --dataset_name, or a glob of its files" if os.path.isdir(found) else "no such file"
        )
        raise UsageError(f"{field}: {pattern}: {what}")
    for file in files:
        if os.path.getsize(file) == 0:
            raise UsageError(f"{field}: {file} is empty: give a file with at least one row")
    return [os.path.abspath(file) for file in files]


def _raw(run: RunConfig, split: str, source: Source):
    """Return the raw rows as a `datasets.Dataset`, or None where a named data set has no such split."""
    import datasets

    try:
        if source.builder:
            return datasets.load_dataset(
                source.builder, data_files={split: source.files}, split=split, cache_dir=run.cache_dir
            )
        if any(file.endswith(("dataset_info.json", "dataset_dict.json")) for file in source.files):
            loaded = datasets.load_from_disk(source.name)
            loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
        else:
            loaded = datasets.load_dataset(
                source.name, run.dataset_config_name, revision=run.dataset_revision, cache_dir=run.cache_dir
            )
    except Exception as error:
        raise UsageError(_explain(source, split, error)) from error
    return loaded.get(split, loaded.get("test") if split == "validation" else None)


def _explain(source: Source, split: str, error: Exception) -> str:
    """Return one sentence that names the file, and the line where there is one."""
    for file in filter(os.path.isfile, source.files):
        if file.endswith((".jsonl", ".json")) and (fault := _json_fault(file)):
            return fault
    while error.__cause__ is not None:
        error = error.__cause__
    names = ", ".join(source.files[:3]) or source.name
    field = f"{split}_file" if source.builder else "dataset_name"
    reason = " ".join(str(error).split())[:400] or type(error).__name__
    if "corresponds to no data" in reason:
        return f"{field}: {names} holds no rows: give data with at least one"
    return f"{field}: {names} could not be read: {'' if source.builder else absent(source.name)}{reason}"


def _json_fault(file: str) -> str | None:
    """Return what is wrong with a file of JSON objects, one a line or in one array, and in which line; or None."""
    try:
        with open(file, encoding="utf-8") as lines:
            array = file.endswith(".json") and lines.read(64).lstrip().startswith("[")
            lines.seek(0)
            for number, text in enumerate([lines.read()] if array else lines, 1):
                if text.strip() and not isinstance(json.loads(text.rstrip()), list if array else dict):
                    return f"{file}, line {number}: expected a JSON object, found {text.strip()[:60]}"
    except UnicodeDecodeError as reason:
        return f"{file} is not UTF-8 text (byte {reason.start}): a {Path(file).suffix} file was expected"
    except json.JSONDecodeError as reason:
        found = text.splitlines()[reason.lineno - 1].strip()[:60]
        return (
            f"{file}, line {number + reason.lineno - 1}: not valid JSON ({reason.msg}, column {reason.colno}): {found}"
        )
    except RecursionError:
        return f"{file}, line {number}: nested too deeply: {text.strip()[:60]}"
    return None


def _prepared(run: RunConfig, task: Task, split: str, source: Source) -> Split | None:
    """Return the split from the cache of prepared data, made by the first process that gets there."""
    import datasets

    root = Path(run.cache_dir) if run.cache_dir else Path(datasets.config.HF_DATASETS_CACHE)
    code = "".join(
        (Path(__file__).parent / name).read_text() for name in ("data.py", "rows.py", "text.py", f"tasks/{run.task}.py")
    )
    key = hashlib.sha256(
        repr((source.key(), split, task.fingerprint(), code, datasets.__version__)).encode()
    ).hexdigest()
    folder = root / "prepared" / key[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)  # config.check has seen that cache_dir can be made
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # one process prepares, so a terminal shows each bar once; a log file, none
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            examples = _raw(run, split, source)
            if examples is not None and len(examples) == 0:
                raise UsageError(f"{split} data: {', '.join(source.files[:3]) or source.name} holds no rows")
            temporary = folder.with_suffix(".tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                _write(task, examples, split, temporary, _about(source, task))
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            temporary.rename(folder)
    facts = json.loads((folder / "facts.json").read_text())
    if not facts["examples"]:
        return None
    dataset = datasets.Dataset.from_file(str(folder / facts["file"]))
    task.opened(dataset)
    dataset = dataset.remove_columns([name for name in ("length", "targets", "cut") if name in dataset.column_names])
    return Split(dataset.with_format("arrow"), np.load(folder / "lengths.npy", mmap_mode="r"), facts)


def _about(source: Source, task: Task) -> dict:
    """Return what else the facts say of where rows come from, so that a run can tell what changed since."""
    names = {Path(f).name: os.path.getsize(f) if os.path.exists(f) else None for f in source.files[:1000]}
    return {"files": names, "tokenizer": xxhash.xxh3_128_hexdigest(task.fingerprint().encode())}


def _content(rows) -> str:
    """Return a hash of every prepared row and of the columns' types: the same wherever the files lie."""
    digest = xxhash.xxh3_128(repr(rows.features).encode())
    for batch in rows.data.to_batches():
        digest.update(batch.serialize())
    return digest.hexdigest()


def _write(task: Task, examples, split: str, folder: Path, about: dict) -> None:
    """Write prepared rows, their lengths and the facts about them to `folder`."""
    if examples is None:
        (folder / "facts.json").write_text(json.dumps({"examples": 0}))
        return
    rows = task.prepare(examples, split, str(folder))
    columns = rows.with_format("numpy")
    lengths = np.asarray(columns["length"][:] if len(rows) else [], np.int32)
    if not len(rows) or not (targets := int(np.sum(columns["targets"][:]))):
        raise UsageError(
            f"{split} data: none of the {len(examples)} rows has anything to train on: every row is too short, or all of "
            "its labels are masked (-100)"
        )
    np.save(folder / "lengths.npy", lengths)
    cut = np.asarray(columns["cut"][:])
    file = Path(rows.cache_files[0]["filename"]).name
    for other in folder.glob("*.arrow"):
        if other.name != file:
            other.unlink()
    facts = {"examples": len(rows), "source_rows": len(examples), "tokens": int(lengths.sum()), "targets": targets}
    facts |= {
        "rows_cut": int((cut > 0).sum()),
        "tokens_cut": int(cut.sum()),
        "file": file,
        "rows": _content(rows),
    } | about
    facts["without_target"] = int((np.asarray(columns["targets"][:]) == 0).sum())
    (folder / "facts.json").write_text(json.dumps(facts))
