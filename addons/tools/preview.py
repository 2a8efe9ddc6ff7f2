"""Show what a run trains on: the first rows of training as text, the tokens with a loss in color, and what is cut.

    make preview [CONFIG=configs/stdlib_lm.yaml] [ARGS='--rows 10 --page preview.html']

Tests: tests/addons/tools/test_preview.py.
"""

import argparse
import html
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import parsing, validation
from engine.config.addresses import path_of_flag
from engine.config.errors import UsageError
from engine.find_tasks import OPTIONS, Task, make_task
from engine.plan import data_loader, dataset
from engine.plan.batch_plan import training_order
from engine.process.exit_codes import run_main
from engine.rows.prepared_split import data_notes, format_stats
from engine.storage.atomic_folder import rewrite
from src.losses.cross_entropy import IGNORED
from src.tasks import causal_lm

PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>preview</title><style>:root { color-scheme: light dark } body { max-width: 60em; margin: 2em auto; padding: 0 1em }
pre { white-space: pre-wrap; overflow-wrap: anywhere } mark { background: #4a84; color: inherit }</style><pre>"""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog="and all flags of train.py")
    parser.add_argument("--rows", type=int, default=10, help="rows to show (default: 10)")
    parser.add_argument("--page", help="write them to this HTML file (default: none)")
    own, rest = parser.parse_known_args(argv)
    cfg, options = parsing.parse(parsing.with_default_config(rest), OPTIONS)
    validation.check(cfg, options)
    task = make_task(cfg, options)
    parts = list(preview(cfg, task, dataset.prepare_datasets(cfg, task), own.rows))
    print("".join(f"\033[32m{text}\033[0m" if trained else text for text, trained in parts))
    if own.page:
        marked = [(html.escape(text), trained) for text, trained in parts]
        page = Path(path_of_flag(own.page, "--page"))
        page.parent.mkdir(parents=True, exist_ok=True)
        rewrite(
            page,
            PAGE + "".join(f"<mark>{text}</mark>" if trained else text for text, trained in marked),
        )


def preview(cfg: Any, task: Any, splits: dict, count: int) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it has a loss): what the splits hold, then the first rows of the first epoch in its order."""
    train_set = splits["train"]
    if not hasattr(train_set, "rows"):
        raise UsageError("streaming: the rows of a stream are not prepared: remove it to see them")
    packed = getattr(task.options, "packing", False)
    for name, split in splits.items():
        full = f", rows {split.stats['tokens'] / (len(split) * task.max_length):.1%} full" if packed else ""
        yield f"{name}: {format_stats(split.stats, task.unit)}{full}\n", False
    yield "".join(f"{note}\n" for note in data_notes(splits)), False
    plan = data_loader.plan_config(replace(cfg, per_device_batch_size=1, per_device_batch_tokens=None), task, train_set)
    for micro in islice(training_order(plan, 0, 1, 0, plan.sizes.per_epoch), count):
        row = train_set.rows(micro.ids)[0]
        texts = [name for name in row if is_text(name)]
        yield f"\n── row {micro.ids[0]}, step {micro.step + 1}" + "\n" * (len(texts) != 1), False
        for name in texts:
            side = "" if len(texts) == 1 else name.replace("_ids", "")
            yield from sequence(task, side, row[name], row.get(labels_of(name)), row.get("documents", []))
        shown = {"documents", "bytes", *texts, *map(labels_of, texts)}
        for name in sorted(row.keys() - shown):
            value = row[name] if np.size(row[name]) < 20 else f"{np.size(row[name]):,} values"
            of_class = f" ({task.labels[int(value)]})" if name == "label" and getattr(task, "labels", None) else ""
            yield f"{name}: {value}{of_class}\n", False


def is_text(name: str) -> bool:
    """Return whether a column holds ids of tokens: input_ids, chosen_ids and rejected_ids of a pair, ids_0, ids_1, …"""
    return re.fullmatch(r"\w+_ids|ids_\d+", name) is not None


def labels_of(name: str) -> str:
    """Return the name of the column with the labels of these ids."""
    return "labels" if name == "input_ids" else name.replace("ids", "labels")


def sequence(task: Task, side: str, ids: np.ndarray, labels: Any, documents: Any) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it has a loss) of one sequence of tokens of a row; `side` names it, if there are several."""
    trained = has_loss(task, ids, labels, documents)
    per_token = isinstance(task, causal_lm.Task) or np.size(labels) == len(ids)
    size = f"{len(ids)} tokens" + f", {trained.sum()} with a loss" * per_token
    yield f"{side}: {size}\n", False
    for places in np.split(np.arange(len(ids)), np.cumsum(documents)[:-1].astype(int)):
        for flag, run in groupby(places, key=trained.__getitem__):
            part = ids[[*run]]
            yield task.tokenizer.decode(part) if getattr(task, "tokenizer", None) else f"{part} ", bool(flag)
        yield "\n", False


def has_loss(task: Task, ids: np.ndarray, labels: Any, documents: Any) -> np.ndarray:
    """Return for each token whether it is a target: by its label, and not the first one of a document."""
    is_language, labels = isinstance(task, causal_lm.Task), np.atleast_1d(() if labels is None else labels)
    trained = labels != IGNORED if len(labels) == len(ids) else np.full(len(ids), is_language)
    if is_language and len(ids):
        trained[np.cumsum([0, *documents[:-1]])] = False
    return trained


if __name__ == "__main__":
    run_main(main)
