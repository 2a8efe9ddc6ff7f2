"""ledger.jsonl: a hash of the example ids of every step, to compare runs with each other or the plan.

    python -m src.reporting.ledger RUN          is every step what the plan says?
    python -m src.reporting.ledger RUN OTHER    do two runs hold the same examples in every step?

Tests: tests/reporting/test_ledger.py.
"""

import json
import sys
from itertools import count
from pathlib import Path

import numpy as np

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data.batch_plan import LOW, hash_ids, plan, steps_per_epoch
from src.storage import jsonl

FILE = "ledger.jsonl"


def hash_text(low: float, high: float) -> str:
    """Return the sums of `digest` over a whole global batch as 16 hexadecimal digits."""
    return f"{int(high) & int(LOW):08x}{int(low) & int(LOW):08x}"


class Ledger:
    """Appends a line per step to ledger.jsonl on the main process; its first line says what the steps are cut from."""

    def __init__(self, cfg: RunConfig, examples, main: bool):
        self.main, self.lines = main, jsonl.JsonlWriter(Path(cfg.output_dir, FILE))
        self.plan = {
            "examples": examples.stats["examples"],
            "global_batch_size": cfg.global_batch_size,
            "seed": cfg.seed,
        }
        self.plan |= {"quotas": examples.quotas} if examples.quotas else {}

    def begin(self, step: int) -> None:
        """Leave in the file the lines up to `step`."""
        if not self.main:
            return
        jsonl.truncate_after(self.lines.path, lambda line: line["step"] <= step)
        if not self.lines.path.exists() or not self.lines.path.stat().st_size:
            self.lines.add({"step": 0, "after": step, "plan": self.plan})

    def add(self, step: int, examples: float, low: float, high: float) -> None:
        """Note a step; it reaches the file with 63 others, or when the run is saved."""
        if self.main:
            self.lines.add({"step": step, "examples": int(examples), "ids": hash_text(low, high)})
            if len(self.lines.waiting) >= 64:
                self.lines.try_flush()


def _lines(path: Path) -> list[dict]:
    """Return the lines that can be read: a kill leaves half of one."""
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
            found += [line] if isinstance(line.get("step"), int) else []
        except (ValueError, AttributeError):
            continue
    return found


def read(folder: Path) -> tuple[dict, dict[int, tuple]]:
    """Return (the first line: what the steps are cut from, step -> (examples, hash)) of a run."""
    lines = _lines(folder / FILE)
    if not lines or "plan" not in lines[0]:
        raise UsageError(f"{folder} holds no {FILE} with a step in it: give the folder of a run")
    return lines[0], {line["step"]: (line["examples"], line["ids"]) for line in lines[1:]}


def planned_step(settings: dict, step: int) -> tuple:
    """Return (examples, hash) of a step as the plan has it."""
    examples, batch = settings["examples"], settings["global_batch_size"]
    if examples is None:
        raise UsageError("a stream has no plan to compare its steps with: give another run of it, too (OTHER)")
    epoch, within = divmod(step - 1, steps_per_epoch(examples, batch))
    whole = plan(examples, batch, batch, settings["seed"], epoch, within, quotas=settings.get("quotas"))
    ids = np.concatenate([micro.ids for micro in whole])
    return len(ids), hash_text(*hash_ids(ids))


def compare(folder: Path, other: Path | None = None) -> str | None:
    """Return what the first step that differs is, from another run's or from the plan's; None if there is none."""
    first, steps = read(folder)
    for found, step in zip(sorted(steps), count(first["after"] + 1), strict=False):
        if found != step:
            return f"{folder}: step {step} is missing"
    theirs = read(other)[1] if other else {step: planned_step(first["plan"], step) for step in steps}
    name = other or "the plan"
    for step in sorted(steps.keys() | theirs.keys()):
        one, two = steps.get(step), theirs.get(step)
        if one is None or two is None:
            return f"step {step} is only in {name if one is None else folder}"
        if one != two:
            return f"step {step} differs: {one[0]} examples, hash {one[1]} in {folder}; {two[0]}, {two[1]} in {name}"
    return None


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2 or argv[0].startswith("-"):
        raise UsageError("give one run folder, or two: python -m src.reporting.ledger RUN [OTHER]")
    folders = [Path(word) for word in argv]
    difference = compare(*folders)
    _, steps = read(folders[0])
    print(difference or f"the same examples in all {len(steps)} steps as {argv[1] if argv[1:] else 'the plan'}")
    return 1 if difference else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
