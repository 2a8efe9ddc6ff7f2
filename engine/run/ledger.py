"""ledger.jsonl: a hash of each step's example ids, which addons/tools/ledger.py compares with the plan or another run.

Tests: tests/engine/run/test_ledger.py.
"""

from pathlib import Path

from engine.config.addon import Addon
from engine.config.find_addons import fields_of_addons_with
from engine.config.run_config import RunConfig
from engine.plan.batch_plan import LOW
from engine.storage import jsonl

LEDGER = "ledger.jsonl"
OF_CORE = {"examples", "global_batch_size", "seed", "quotas"}  # the core's inputs of the plan
FLUSH_EVERY = 64  # lines; a write after every step would cost a few percent of a 10 ms step


def hash_text(low: float, high: float) -> str:
    """Format the two sums of `hash_ids` over a global batch as 16 hexadecimal digits."""
    return f"{int(high) & int(LOW):08x}{int(low) & int(LOW):08x}"


class Ledger(jsonl.JsonlWriter):
    """Appends a line per step to ledger.jsonl. The first line holds the batch plan's inputs."""

    def __init__(self, cfg: RunConfig, train_set, step: int):
        """Delete the lines after `step`; write the first line if the file is missing or empty."""
        super().__init__(Path(cfg.output_dir, LEDGER))
        jsonl.truncate_after(self.path, lambda line: line["step"] <= step)
        if not self.path.exists() or not self.path.stat().st_size:
            plan = {
                "examples": train_set.stats["examples"],
                "global_batch_size": cfg.global_batch_size,
                "seed": cfg.seed,
            }
            plan |= fields_of_addons_with(cfg, Addon.change_plan)
            if train_set.quotas:
                plan["quotas"] = train_set.quotas
            self.add({"step": 0, "after": step, "data": train_set.stats.get("rows"), "plan": plan})

    def add_step(self, step: int, examples: float, low: float, high: float) -> None:
        """Queue the line of one step. Lines are written every FLUSH_EVERY steps and before each checkpoint."""
        self.waiting.append(f'{{"step": {step}, "examples": {int(examples)}, "ids": "{hash_text(low, high)}"}}\n')
        if len(self.waiting) >= FLUSH_EVERY:
            self.try_flush()
