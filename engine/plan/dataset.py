"""Data of a run: find, download and prepare the splits that the run file (YAML) names.

`make data` (`python -m engine.plan.dataset`) does only this and needs no accelerator. In training it happens before a
process group exists, so no collective waits for a download or a tokenizer.
Tests: tests/engine/plan/test_dataset.py, tests/engine/config/test_bad_input.py and tests/conformance/.
"""

import os
from typing import Any

from engine.config import parsing, validation
from engine.config.addon import Addon
from engine.config.errors import UsageError, warn, warn_once, writes_to
from engine.config.find_addons import fields_of_addons_with, first_answer, follows_evaluations
from engine.config.run_config import RunConfig
from engine.find_tasks import OPTIONS, Task, make_task
from engine.models.new_tokens import check_tokens
from engine.plan.computed_rows import ComputedSplit, open_computed_rows
from engine.plan.mixture import Mixture
from engine.process import console
from engine.process.exit_codes import run_main
from engine.rows.prepare import prepare_rows
from engine.rows.prepared_split import Split, data_notes, format_stats, holds_chats, task_stats
from engine.rows.sources import Source, fetch_source, find_sources
from engine.storage import hub
from engine.storage.cache_folder import cache_root


def prepare_datasets(cfg: RunConfig, task: Task, wanted=("train", "validation")) -> dict:
    """Load the task's tokenizer and configuration, and return the prepared splits that the run file names.

    The key "validation" is missing if there is no validation data."""
    load_task(cfg, task, wanted)
    with writes_to(cache_root(cfg), "cache_dir"):
        return _load_splits(cfg, task, wanted)


def load_task(cfg: RunConfig, task: Task, wanted=("train", "validation")) -> None:
    """Load the task's tokenizer and configuration, as they are before rows are encoded."""
    task.load()
    if cfg.long_rows == "drop" and not hasattr(task, "max_length"):
        raise UsageError(f"long_rows is drop, but rows of task {cfg.task} have no max_length: remove it")
    if "train" in wanted:
        if cfg.add_tokens:
            check_tokens(task, cfg.add_tokens)
        for each in cfg.addons:
            each.check_task(cfg, task)


def resolve_sources(cfg: RunConfig, wanted=("train", "validation")) -> dict[str, dict[str, Source]]:
    """Return the sources of each split by name, with their files downloaded; nothing is prepared yet, so that errors of
    names come within seconds."""
    by_split: dict[str, dict[str, Source]] = {split: _find(cfg, split) for split in wanted}
    for split, sources in by_split.items():
        for source in sources.values():
            if len({*map(os.path.realpath, source.files)}) < len(source.files):
                warn(f"{source.field}: {source} names a file more than once, so its rows are read as often")
            if source.computed:
                _check_computed(cfg, source)
        by_split[split] = {name: _fetch(source, cfg) for name, source in sources.items()}
    return by_split


def _load_splits(cfg: RunConfig, task: Task, wanted: tuple[str, ...]) -> dict:
    import datasets

    console.reroute()
    datasets.disable_progress_bars()  # several processes prepare data, and their bars would mix in a terminal
    splits = {}
    for split, sources in resolve_sources(cfg, wanted).items():
        parts = {name: _open(cfg, task, source) for name, source in sources.items()}
        parts = {name: part for name, part in parts.items() if part is not None}
        if parts:
            splits[split] = _split_or_mixture(cfg, split, parts)
    _check(cfg, splits, wanted)
    if "train" in splits:
        task.reads_chats = holds_chats(splits["train"], task)  # also if another process has prepared them
    if "validation" in wanted:
        task.on_validation_data(splits.get("validation"))
    if "train" in splits:
        task.on_train_data(splits["train"])
        splits["train"].stats |= task_stats(task)
    return splits


def _find(cfg: RunConfig, split: str) -> dict[str, Source]:
    """Return the sources of a split, those of an add-on if it has others."""
    found = first_answer(each.find_sources(cfg, split) for each in cfg.addons)
    return find_sources(cfg, split) if found is None else found


def _fetch(source: Source, cfg: RunConfig) -> Source:
    """Return a source with its files, fetched by an add-on if it does this."""
    fetched = first_answer(each.fetch_source(source, cfg) for each in cfg.addons)
    return fetch_source(source, cfg) if fetched is None else fetched


def _open(cfg: RunConfig, task: Task, source: Source) -> Any:
    """Return the rows of a source, or None if a dataset given by name has no such split."""
    opened = first_answer(each.open_source(cfg, task, source) for each in cfg.addons)
    return open_source(cfg, task, source) if opened is None else opened


def open_source(cfg: RunConfig, task: Task, source: Source) -> Split | None:
    """Return the prepared rows of a source, or None if a dataset given by name has no such split."""
    if source.computed:
        computed = open_computed_rows(source)
        if computed is not None:
            _give_features(task, computed)
        return computed
    split = Split.open(prepare_rows(cfg, task, source))
    for kind, text in split.stats.get("warnings", {}).items():
        warn_once(text, kind)
    if not split.stats["examples"]:
        return None
    for each in cfg.addons:
        each.after_preparation(cfg, task, source, split)
    task.on_prepared(split.features())
    return split


def _split_or_mixture(cfg: RunConfig, split: str, parts: dict[str, Split]) -> Split | Mixture:
    """Return the split itself without a mixture, else a Mixture of the sources."""
    if list(parts) == [""]:
        return parts[""]
    if split != "train":
        return Mixture(parts, training=False)
    by_source = cfg.mixture or {}
    missing = sorted(by_source.keys() - parts.keys())
    if missing:
        raise UsageError(f"mixture: {missing[0]}: no train data: give train_file, or a dataset with a train split")
    weights = [fields["weight"] for fields in by_source.values() if "weight" in fields]
    return Mixture(parts, weights if len(weights) == len(parts) else None)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(cfg: RunConfig, splits: dict, wanted: tuple[str, ...]) -> None:
    """Raise UsageError for missing splits, and for fields of the run file that contradict the data."""
    if wanted[0] not in splits:
        named = ", or the name of its split as --dataset_split" if wanted[0] == "train" else ""
        raise UsageError(f"no {wanted[0]} data: give --{wanted[0]}_file, or a dataset with a {wanted[0]} split{named}")
    if "train" not in wanted:
        return
    longest = splits["train"].stats.get("longest", 0)
    if cfg.per_device_batch_tokens and cfg.per_device_batch_tokens < longest:
        raise UsageError(
            f"per_device_batch_tokens is {cfg.per_device_batch_tokens:,}, but the longest row has {longest:,} tokens: "
            f"raise it to at least {longest:,}, or lower --max_length"
        )
    names = ["metric_for_best_model", "early_stopping_patience"]
    if follows_evaluations(cfg):
        names.append("lr_scheduler_type")
    for name in names:
        value = getattr(cfg, name)
        if value and "validation" not in splits:
            raise UsageError(
                f"{name} is {value}, but there is no evaluation data: give --validation_file, or remove {name}"
            )


def _give_features(task: Task, computed: ComputedSplit) -> None:
    """Call `on_prepared` of the task; raise UsageError if it needs features that the rows do not have."""
    features = computed.features()
    if features is not None:
        task.on_prepared(features)
    elif type(task).on_prepared is not Task.on_prepared:
        raise UsageError(
            f"{computed.folder}: task {task.cfg.task} reads the features of its rows: define features() in the class Rows"
        )


def _check_computed(cfg: RunConfig, source: Source) -> None:
    """Raise UsageError for fields that computed rows cannot obey."""
    fields = fields_of_addons_with(cfg, Addon.find_sources, Addon.open_source, Addon.after_preparation)
    fields |= {"long_rows": "drop"} if cfg.long_rows == "drop" else {}
    if fields:
        raise UsageError(
            f"{next(iter(fields))} is given, but {source.field} {source.name} computes its rows when they are read: remove one of them"
        )


def check_same_data(splits: dict) -> None:
    """Raise UsageError on all ranks if a rank has other rows than rank 0, such as a node with other files, or another
    commit of a Hub repository."""
    from accelerate.utils import gather_object

    own = {
        f"{name} data": f"{split.stats['examples']} rows of hash {split.stats['rows']}"
        for name, split in splits.items()
    }
    own |= {name: f"commit {record['commit']}" for name, record in hub.records.items() if "commit" in record}
    per_rank = gather_object([own])
    for rank, values in enumerate(per_rank):
        for name in sorted(values.keys() | per_rank[0].keys()):
            here, there = (of_rank.get(name, "none") for of_rank in (values, per_rank[0]))
            if here != there:
                raise UsageError(
                    f"{name}: rank {rank} has {here}, but rank 0 has {there}: give all nodes the same files and code, and a "
                    "commit as model_revision or dataset_revision"
                )


def main(argv: list[str]) -> None:
    """Download and prepare the data of a run, and print the statistics of each split."""
    cfg, options = parsing.parse(parsing.with_default_config(argv), OPTIONS)
    validation.check(cfg, options)
    task = make_task(cfg, options)
    splits = prepare_datasets(cfg, task)
    for name, split in splits.items():
        for source, _, part in split.segments():
            label = f"{name} {source}" if source else name
            print(f"{label}: {format_stats(part.stats, task.unit)}: {part.folder}")
    for note in data_notes(splits):
        print(note)


if __name__ == "__main__":
    run_main(main)
