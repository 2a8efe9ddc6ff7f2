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
from src.data.data_stats import facts_in_words, facts_of_task, notes_on_data
from src.data.preprocessing import FACTS, prepared
from src.distributed import launch
from src.download import cache_folder
from src.runtime import console
from src.storage.shared_work import Crew
from src.tasks import OPTIONS, Task, make_task


@dataclass
class Split:
    """Prepared rows of one split, on disk; only what is asked for is read."""

    folder: Path
    facts: (
        dict  # examples, tokens, targets, rows and tokens cut off, hashes of rows and tokenizer, files and their blocks
    )

    def __post_init__(self):
        self._views: dict[int, dict] = {}

    quotas = None  # one source, and every row once an epoch

    def __len__(self) -> int:
        return self.facts["examples"]

    def epoch_at(self, step: int, batch: int) -> float:
        """Return how many times the rows have been gone through after so many steps."""
        return step / steps_per_epoch(len(self), batch)

    def segments(self) -> list[tuple[str, int, "Split"]]:
        """Return (name, first id, rows) of each source."""
        return [("", 0, self)]

    def longest(self, count: int) -> np.ndarray:
        """Return the ids of the longest rows, of the first million."""
        return np.argsort(-self.lengths[:1_000_000].astype(np.int64), kind="stable")[:count]

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "facts": self.facts, "_views": {}}  # a loader's process opens files of its own

    @cached_property
    def lengths(self) -> np.ndarray:
        """Memory-mapped, indexed by id."""
        return np.load(self.folder / "lengths.npy", mmap_mode="r")

    @cached_property
    def _starts(self) -> np.ndarray:
        """The first row of each block of each piece, and the number of rows."""
        return np.cumsum([0, *(rows for _, blocks in self.facts["pieces"] for rows in blocks)])

    @cached_property
    def _tables(self) -> list:
        """Return (piece, number in it) of each block."""
        return [(file, i) for file, blocks in self.facts["pieces"] for i in range(len(blocks))]

    def features(self):
        """Return the features of the rows."""
        from datasets import Features

        return Features.from_arrow_schema(_open(self.folder / self.facts["pieces"][0][0]).schema)

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


def load(run: RunConfig, task: Task, wanted=("train", "validation")) -> dict:
    """Let the task read tokenizer and configuration, and return the prepared splits that the run file names.

    Without validation data the key is missing. Everything is looked up before anything is fetched or prepared."""
    crew = Crew(cache_folder.cache_root(run))
    with _room(crew), crew.working(), _room(crew):  # without, for what `working` writes; within, for what others hear
        task.load()
        return load_splits(run, task, crew, wanted)


@contextmanager
def _room(crew: Crew):
    """Within, a cache that cannot be written is a UsageError."""
    try:
        yield
    except OSError as error:
        ours = isinstance(error, PermissionError) and str(error.filename).startswith(str(crew.root))
        if error.errno not in sources.NO_ROOM and not ours:
            raise
        raise UsageError(
            f"cache_dir: {crew.root} cannot be written ({error.strerror}): make room, or give another --cache_dir"
        ) from error


def load_splits(run: RunConfig, task: Task, crew: Crew, wanted=("train", "validation")) -> dict:
    """Return the prepared splits that the run file names, for a task that has read its tokenizer."""
    import datasets

    console.reroute()
    datasets.disable_progress_bars()  # one process of many prepares, so a terminal would show bars in between
    found = {split: _found(run, split) for split in wanted}
    _overlap(found)
    for split, by_name in found.items():
        for source in by_name.values():
            source.fetch(run, crew, files=not (run.streaming and split == "train"))
            if source.told or source.origins:  # what is behind a URL has a size only now
                dataset_spec.drop_empty(source)
    splits = {}
    if run.streaming and "train" in wanted:
        from src.data.streaming import Stream  # which needs what is above

        if source := found.pop("train").get(""):
            splits["train"] = Stream(run, task, source)
    for split, by_name in found.items():
        parts = {name: _opened(run, task, split, source, crew) for name, source in by_name.items()}
        if parts := {name: part for name, part in parts.items() if part}:
            splits[split] = _together(run, split, parts)
    if wanted[0] not in splits:
        raise UsageError(f"no {wanted[0]} data: give --{wanted[0]}_file, or a dataset with a {wanted[0]} split")
    _check_budget(run, splits)
    if "train" in wanted:
        _check_evaluation(run, splits)
        splits["train"].facts |= facts_of_task(task)
    return splits


def _found(run: RunConfig, split: str) -> dict[str, sources.Source]:
    """Return the sources of a split by name."""
    names = mixture.named(run)
    if split == "validation" and run.mixture and run.validation_file:
        names = {"": dataset_spec.Named(None, None, None, [], run.validation_file)}
    found = {name: dataset_spec.find(one, split, cache_folder.cache_root(run)) for name, one in names.items()}
    return {name: source for name, source in found.items() if source}


def _opened(run: RunConfig, task: Task, split: str, source: sources.Source, crew: Crew) -> Split | None:
    folder = prepared(run, task, split, source, crew)
    facts = json.loads((folder / FACTS).read_text())
    if not facts["examples"]:
        return None
    sources.warn_of_unread(source.field, facts.get("unread", []))
    opened = Split(folder, facts)
    task.opened(opened.features())
    return opened


def _together(run: RunConfig, split: str, parts: dict[str, Split]):
    """Return the one split there is, or the mixture of several."""
    if list(parts) == [""]:
        return parts[""]
    if split != "train":
        return mixture.Mixture(parts, training=False)
    if missing := run.mixture.keys() - parts.keys():
        raise UsageError(
            f"mixture: {sorted(missing)[0]}: no train data: give train_file, or a dataset with a train split"
        )
    weights = [told.get("weight") for told in run.mixture.values()]
    return mixture.Mixture(parts, weights if None not in weights else None)


def _check_budget(run: RunConfig, splits: dict) -> None:
    longest = splits["train"].facts.get("longest", 0) if "train" in splits else 0
    if run.per_device_batch_tokens and run.per_device_batch_tokens < longest:
        raise UsageError(
            f"per_device_batch_tokens is {run.per_device_batch_tokens:,}, but the longest row has {longest:,} tokens: give at "
            "least that, or a smaller --max_length"
        )


def _check_evaluation(run: RunConfig, splits: dict) -> None:
    """Raise UsageError for what can only be decided by evaluations, if there is nothing to evaluate on."""
    for name in ("metric_for_best_model", "early_stopping_patience"):
        if (value := getattr(run, name)) and "validation" not in splits:
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


def same_everywhere(accelerator, splits: dict) -> None:
    """Raise UsageError on all ranks alike if one has other rows than the main process: a node with other files."""
    if accelerator.num_processes == 1:
        return
    from accelerate.utils import gather_object

    everyone = gather_object([{name: (split.facts["examples"], split.facts["rows"]) for name, split in splits.items()}])
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
    run, options = parsing.parse(parsing.or_sample(argv), OPTIONS)
    validation.check(run, options)
    splits = load(run, make_task(run, options))
    for name, split in splits.items():
        for source, _, part in split.segments():
            print(f"{name}{' ' * bool(source)}{source}: {facts_in_words(part.facts)}: {part.folder}")
    print(*notes_on_data(splits), sep="\n")


if __name__ == "__main__":
    launch.main(main)
