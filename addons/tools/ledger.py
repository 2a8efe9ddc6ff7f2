"""Comparison of ledger.jsonl, the hashes of each step's example ids, with the batch plan or with another run.

    make ledger RUN=folder                 compare every step with the batch plan
    make ledger RUN=folder OTHER=folder    compare every step of two runs

Tests: tests/addons/tools/test_ledger.py.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.config import parsing
from engine.config.addresses import path_of_flag
from engine.config.errors import UsageError
from engine.find_tasks import OPTIONS, make_task
from engine.plan.batch_plan import PlanConfig, hash_ids, plan
from engine.plan.data_loader import plan_config
from engine.plan.dataset import prepare_datasets
from engine.process.exit_codes import run_main
from engine.run.ledger import LEDGER, OF_CORE, hash_text
from engine.storage import jsonl


def read(folder: Path) -> tuple[dict, dict[int, tuple[int, str]]]:
    """Return (first line, {step: (examples, hash)}) of a run; skip a truncated last line."""
    lines = jsonl.read_lines(folder / LEDGER)
    if not lines or "plan" not in lines[0]:
        raise UsageError(f"{folder} has no {LEDGER} that begins with a plan: give a run folder")
    return lines[0], {line["step"]: (line["examples"], line["ids"]) for line in lines[1:]}


def planned_config(folder: Path, settings: dict) -> PlanConfig:
    """Return the batch plan of a run. If add-ons have changed it, prepare the data of its config.yaml."""
    if settings["examples"] is None:
        raise UsageError("a stream has no batch plan: to compare it, give another run of the same stream as OTHER")
    batch = settings["global_batch_size"]
    if settings.keys() - OF_CORE:
        cfg, options = parsing.parse(["--config", str(folder / "config.yaml")], OPTIONS)
        cfg = replace(cfg, per_device_batch_size=batch)
        task = make_task(cfg, options)
        return plan_config(cfg, task, prepare_datasets(cfg, task, wanted=("train",))["train"])
    return PlanConfig(settings["examples"], batch, batch, settings["seed"], quotas=settings.get("quotas"))


def planned_step(config: PlanConfig, step: int) -> tuple[int, str]:
    """Return (examples, hash) of a step according to the batch plan."""
    ids = np.concatenate([micro_batch.ids for micro_batch in plan(config, *config.sizes.locate(step - 1))])
    return len(ids), hash_text(*hash_ids(ids))


def compare(folder: Path, other: Path | None = None) -> str | None:
    """Return a sentence about the first step that differs from `other` or the batch plan, or None if none does."""
    first, steps = read(folder)
    for expected, step in enumerate(sorted(steps), start=first["after"] + 1):
        if step != expected:
            return f"{folder}: step {expected} is missing"
    if other:
        name, (begin, theirs) = str(other), read(other)
        if first.get("data") != begin.get("data"):
            return f"the prepared rows differ: hash {first.get('data')} in {folder}; {begin.get('data')} in {name}"
    else:
        config = planned_config(folder, first["plan"])
        name, theirs = "the plan", {step: planned_step(config, step) for step in steps}
    for step in sorted(steps.keys() | theirs.keys()):
        if step not in steps:
            return f"step {step} is only in {name}"
        if step not in theirs:
            return f"step {step} is only in {folder}"
        if steps[step] != theirs[step]:
            one, two = (f"{examples} examples, hash {ids}" for examples, ids in (steps[step], theirs[step]))
            return f"step {step} differs: {one} in {folder}; {two} in {name}"
    return None


def main(argv: list[str]) -> int:
    """Print the first difference between a run and its plan, or another run; return 1 if there is one, else 0."""
    if not 1 <= len(argv) <= 2 or argv[0].startswith("-"):
        raise UsageError("give one run folder, or two: make ledger RUN=folder [OTHER=folder]")
    folders = [Path(path_of_flag(word, flag)) for word, flag in zip(argv, ("RUN", "OTHER"), strict=False)]
    if difference := compare(*folders):
        print(difference)
        return 1
    name = folders[1] if len(folders) == 2 else "the plan"
    print(f"{folders[0]}: the same examples as {name} in all {len(read(folders[0])[1])} steps")
    return 0


if __name__ == "__main__":
    run_main(lambda argv: sys.exit(main(argv)))
