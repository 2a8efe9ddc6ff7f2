"""ledger.jsonl: a hash of each step's example ids, to compare a run with another run or the batch plan.

addons/tools/ledger.py compares them. Tests: tests/reporting/test_ledger.py.
"""

from pathlib import Path

from src.config.addons import fields_of_addons_with
from src.config.schema import RunConfig
from src.data.batch_plan import LOW
from src.storage import jsonl

FILE = "ledger.jsonl"
OF_CORE = {"examples", "global_batch_size", "seed", "quotas"}  # the core's inputs of the plan
FLUSH_EVERY = 64  # lines; a write after every step would cost a few percent of a 10 ms step


def hash_text(low: float, high: float) -> str:
    """Format the two sums of `hash_ids` over a global batch as 16 hexadecimal digits."""
    return f"{int(high) & int(LOW):08x}{int(low) & int(LOW):08x}"


class Ledger:
    """Appends a line per step to ledger.jsonl on the main process. The first line holds the batch plan's inputs."""

    def __init__(self, cfg: RunConfig, examples, main: bool):
        self.main = main
        self.lines = jsonl.JsonlWriter(Path(cfg.output_dir, FILE))
        self.plan = {
            "examples": examples.stats["examples"],
            "global_batch_size": cfg.global_batch_size,
            "seed": cfg.seed,
        }
        if examples.quotas:
            self.plan["quotas"] = examples.quotas
        self.plan |= fields_of_addons_with(cfg, "change_plan")

    def begin(self, step: int) -> None:
        """Delete the lines after `step`; write the first line if the file is missing or empty."""
        if not self.main:
            return
        path = self.lines.path
        jsonl.truncate_after(path, lambda line: line["step"] <= step)
        if not path.exists() or not path.stat().st_size:
            self.lines.add({"step": 0, "after": step, "plan": self.plan})

    def add(self, step: int, examples: float, low: float, high: float) -> None:
        """Queue the line of one step. Lines are written every FLUSH_EVERY steps and before each checkpoint."""
        if not self.main:
            return
        self.lines.add({"step": step, "examples": int(examples), "ids": hash_text(low, high)})
        if len(self.lines.waiting) >= FLUSH_EVERY:
            self.lines.try_flush()
