"""Prepared splits, memory-mapped and read by id; `python -m src.data.dataset` only prepares.

Tests: tests/data/test_dataset.py, tests/config/test_bad_input.py and tests/conformance/. All of it works before a
process group exists, so no collective ever waits for a download or a tokenizer. `python -m src.data.dataset --config X`, or
make data, does only this, on a machine without an accelerator if you like.
"""

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from src.config import parsing, validation
from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.data import dataset_spec, mixture, sources
from src.data.arrow_columns import views
from src.data.batch_plan import steps_per_epoch
from src.data.data_stats import data_notes, facts_of_task, format_stats
from src.data.preprocessing import STATS, prepare_split
from src.download import cache_folder
from src.runtime import console
from src.runtime.exit_codes import run_main
from src.storage.shared_work import SharedWork
from src.tasks import OPTIONS, Task, make_task


@dataclass
class Split:
    """Prepared rows of one split, on disk; only what is asked for is read."""

    folder: Path
    stats: (
        dict  # examples, tokens, targets, rows and tokens cut off, hashes of rows and tokenizer, files and their blocks
    )

    def __post_init__(self):
        self._views: dict[int, dict] = {}

    quotas = None  # one source, and every row once an epoch

    def __len__(self) -> int:
        return self.stats["examples"]

    def epoch_at(self, step: int, batch: int) -> float:
        """Return how many times the rows have been gone through after so many steps."""
        return step / steps_per_epoch(len(self), batch)

    def position(self, step: int, host_group) -> None:
        """Return nothing to save: where to continue follows from the step."""

    def segments(self) -> list[tuple[str, int, "Split"]]:
        """Return (name, first id, rows) of each source."""
        return [("", 0, self)]

    def longest(self, count: int) -> np.ndarray:
        """Return the ids of the longest rows, of the first million."""
        return np.argsort(-self.lengths[:1_000_000].astype(np.int64), kind="stable")[:count]

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "stats": self.stats, "_views": {}}  # a loader's process opens files of its own

    @cached_property
    def lengths(self) -> np.ndarray:
        """Memory-mapped, indexed by id."""
        return np.load(self.folder / "lengths.npy", mmap_mode="r")

    @cached_property
    def _starts(self) -> np.ndarray:
        """The first row of each block of each piece, and the number of rows."""
        return np.cumsum([0, *(rows for _, blocks in self.stats["pieces"] for rows in blocks)])

    @cached_property
    def _tables(self) -> list:
        """Return (piece, number in it) of each block."""
        return [(file, i) for file, blocks in self.stats["pieces"] for i in range(len(blocks))]

    def features(self):
        """Return the features of the rows."""
        from datasets import Features

        return Features.from_arrow_schema(_open(self.folder / self.stats["pieces"][0][0]).schema)

    def rows(self, ids: np.ndarray) -> list[dict]:
        """Return the rows of `ids` in that order: lists and numbers as numpy, without a copy, anything else as Python has it."""
        blocks = np.searchsorted(self._starts, ids, side="right") - 1
        inside = (ids - self._starts[blocks]).tolist()
        found = []
        for block, i in zip(blocks.tolist(), inside, strict=True):
            columns = self._views.get(block) or self._view(block)
            found.append({name: take(i) for name, take in columns})
        return found

    def _view(self, block: int) -> list:
        """Return (name, function from row to value) of each column of a block."""
        file, i = self._tables[block]
        if file not in self._views:
            self._views[file] = _open(self.folder / file).to_batches()
        self._views[block] = columns = views(self._views[file][i])
        return columns


def _open(file: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()


def prepare_datasets(cfg: RunConfig, task: Task, wanted=("train", "validation")) -> dict:
    """Let the task read tokenizer and configuration, and return the prepared splits that the run file names.

    Without validation data the key is missing. Everything is looked up before anything is fetched or prepared."""
    work = SharedWork(cache_folder.cache_root(cfg))
    # The outer one covers what `joined` writes; the inner one is first, so that other ranks get its message.
    with _room(work), work.peers.joined(), _room(work):
        task.load()
        return load_splits(cfg, task, work, wanted)


@contextmanager
def _room(work: SharedWork):
    """Within, a cache that cannot be written is a UsageError."""
    try:
        yield
    except OSError as error:
        ours = isinstance(error, PermissionError) and str(error.filename).startswith(str(work.root))
        if error.errno not in sources.NO_ROOM and not ours:
            raise
        raise UsageError(
            f"cache_dir: {work.root} cannot be written ({error.strerror}): make room, or give another --cache_dir"
        ) from error


def load_splits(cfg: RunConfig, task: Task, work: SharedWork, wanted=("train", "validation")) -> dict:
    """Return the prepared splits that the run file names, for a task that has read its tokenizer."""
    import datasets

    console.reroute()
    datasets.disable_progress_bars()  # one process of many prepares, so a terminal would show bars in between
    found = {split: _found(cfg, split) for split in wanted}
    _overlap(found)
    for split, by_name in found.items():
        for source in by_name.values():
            source.fetch(cfg, work, files=not (cfg.streaming and split == "train"))
            if source.told or source.origins:  # what is behind a URL has a size only now
                dataset_spec.drop_empty_files(source)
    splits = {}
    if cfg.streaming and "train" in wanted:
        from src.data.streaming import Stream  # which needs what is above

        if source := found.pop("train").get(""):
            splits["train"] = Stream(cfg, task, source)
    for split, by_name in found.items():
        parts = {name: _opened(cfg, task, split, source, work) for name, source in by_name.items()}
        if parts := {name: part for name, part in parts.items() if part}:
            splits[split] = _together(cfg, split, parts)
    if wanted[0] not in splits:
        raise UsageError(f"no {wanted[0]} data: give --{wanted[0]}_file, or a dataset with a {wanted[0]} split")
    _check_budget(cfg, splits)
    if "train" in wanted:
        _check_evaluation(cfg, splits)
        splits["train"].stats |= facts_of_task(task)
    return splits


def _found(cfg: RunConfig, split: str) -> dict[str, sources.Source]:
    """Return the sources of a split by name."""
    names = mixture.dataset_specs(cfg)
    if split == "validation" and cfg.mixture and cfg.validation_file:
        names = {"": dataset_spec.DatasetSpec(None, None, None, [], cfg.validation_file)}
    found = {name: dataset_spec.resolve_source(one, split, cache_folder.cache_root(cfg)) for name, one in names.items()}
    return {name: source for name, source in found.items() if source}


def _opened(cfg: RunConfig, task: Task, split: str, source: sources.Source, work: SharedWork) -> Split | None:
    folder = prepare_split(cfg, task, split, source, work)
    stats = json.loads((folder / STATS).read_text())
    if not stats["examples"]:
        return None
    sources.warn_of_unread(source.field, stats.get("unread", []))
    opened = Split(folder, stats)
    task.on_prepared(opened.features())
    return opened


def _together(cfg: RunConfig, split: str, parts: dict[str, Split]):
    """Return the one split there is, or the mixture of several."""
    if list(parts) == [""]:
        return parts[""]
    if split != "train":
        return mixture.Mixture(parts, training=False)
    if missing := cfg.mixture.keys() - parts.keys():
        raise UsageError(
            f"mixture: {sorted(missing)[0]}: no train data: give train_file, or a dataset with a train split"
        )
    weights = [told.get("weight") for told in cfg.mixture.values()]
    return mixture.Mixture(parts, weights if None not in weights else None)


def _check_budget(cfg: RunConfig, splits: dict) -> None:
    longest = splits["train"].stats.get("longest", 0) if "train" in splits else 0
    if cfg.per_device_batch_tokens and cfg.per_device_batch_tokens < longest:
        raise UsageError(
            f"per_device_batch_tokens is {cfg.per_device_batch_tokens:,}, but the longest row has {longest:,} tokens: give at "
            "least that, or a smaller --max_length"
        )


def _check_evaluation(cfg: RunConfig, splits: dict) -> None:
    """Raise UsageError for what can only be decided by evaluations, if there is nothing to evaluate on."""
    for name in ("metric_for_best_model", "early_stopping_patience"):
        if (value := getattr(cfg, name)) and "validation" not in splits:
            raise UsageError(
                f"{name} is {value}, but there is no evaluation data: give --validation_file (or a dataset with a validation "
                "split), or leave it out"
            )


def _overlap(found: dict[str, dict[str, sources.Source]]) -> None:
    """Warn of files that are both trained and evaluated on."""
    files = [
        {os.path.realpath(file) for source in by_name.values() if source.builder for file in source.files}
        for by_name in found.values()
    ]
    if len(files) == 2 and (both := sorted(files[0] & files[1])):
        warn(f"validation_file: {', '.join(both[:3])} is training data too: the evaluation says nothing of other data")


def check_same_data(accelerator, splits: dict) -> None:
    """Raise UsageError on all ranks alike if one has other rows than the main process: a node with other files."""
    if accelerator.num_processes == 1:
        return
    from accelerate.utils import gather_object

    everyone = gather_object([{name: (split.stats["examples"], split.stats["rows"]) for name, split in splits.items()}])
    for rank, held in enumerate(everyone):
        for name in sorted(held.keys() | everyone[0].keys()):
            (one, _), (other, _) = pair = [rows.get(name, (0, "")) for rows in (everyone[0], held)]
            if pair[0] != pair[1]:
                raise UsageError(
                    f"{name} data: rank {rank} has other rows than rank 0 ({other} of them, and {one}): give all nodes the same "
                    "files and the same code"
                )


def main(argv: list[str]) -> None:
    """Fetch and prepare the data of a run, and say what there is."""
    cfg, options = parsing.parse(parsing.with_default_config(argv), OPTIONS)
    validation.check(cfg, options)
    splits = prepare_datasets(cfg, make_task(cfg, options))
    for name, split in splits.items():
        for source, _, part in split.segments():
            print(f"{name}{' ' * bool(source)}{source}: {format_stats(part.stats)}: {part.folder}")
    print(*data_notes(splits), sep="\n")


if __name__ == "__main__":
    run_main(main)
