"""Spike watch: skip a step with a gradient norm far above the median, or roll back to the checkpoint before it.

Skipping: Takase et al., "Spike No More", 2023, and OLMo's skip-step optimizer. Rolling back and going on with the next
data: Chowdhery et al., "PaLM", 2022, section 5.1. Tests: tests/training/techniques/test_spike_watch.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from src.config.errors import Failure, UsageError
from src.config.fields import option
from src.training.techniques.base import Technique, warn_if_unused
from src.training.train_state import DeviceFlag


@dataclass(eq=False)
class SpikeWatch(Technique):
    """Compare the norm of the gradient of the global batch, before clipping, with the median of the last norms.

    Spikes enter the median, too: one of them hardly moves it, and a lasting change becomes normal after half a window.
    The norm is the same on every rank and the median stays on the device, so nothing is sent and nothing waits."""

    action: str = option(
        "skip: skip the update; roll_back: also return to the last checkpoint (of save_steps) before it; the data continues",
        "skip",
        choices=("skip", "roll_back"),
    )
    factor: float = option("a norm above this multiple of the median is a spike", 4.0, above=1)
    window: int = option("number of norms in the median", 100, min=2, max=100_000)
    warmup: int = option("norms to collect before the first decision", 20, min=1)
    max_rollbacks: int = option("fail if the gradient spikes again after this many rollbacks", 10, min=1)

    def errors(self) -> list[str]:
        if self.warmup > self.window:
            return [f"warmup is {self.warmup}, more than window, which is {self.window}: it would never end"]
        return []

    def check(self) -> None:
        run = self.run
        if self.action == "roll_back" and run.strategy.tp_size > 1:
            raise UsageError(
                f"techniques: spike_watch: action is roll_back, which {run.strategy.name} does not support: use action "
                "skip, DDP or FSDP2"
            )

    def begin(self) -> None:
        run = self.run
        warn_if_unused(run, "spike_watch", self.warmup + 1)
        self.norms = torch.full((self.window,), float("nan"), device=run.strategy.accelerator.device)
        self.seen = 0  # norms so far
        # (whether it was a spike, its step) of the last update and of the one before it
        self.last = self.before_last = (DeviceFlag(torch.tensor(False)), 0)
        run.strategy.skip_rules.append(self.is_spike)

    def is_spike(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether `norm`, of the step's gradient, is a spike; a bool on its device."""
        ordered = self.norms.sort().values  # NaN last: a norm that was not finite, or not yet seen
        count = self.norms.isfinite().sum()
        median = ordered[((count - 1).clamp(min=0) // 2).unsqueeze(0)].squeeze(0)
        norm = norm.detach().to(self.norms)
        is_spike = (count >= self.warmup) & (norm > self.factor * median)
        self.found = norm, is_spike
        return is_spike

    def after_update(self, skipped: torch.Tensor) -> None:
        norm, is_spike = self.found
        self.norms[self.seen % self.window] = torch.where(norm.isfinite(), norm, torch.nan)
        self.seen += 1
        self.before_last, self.last = self.last, (DeviceFlag(is_spike), self.run.state.step)

    def roll_back_before(self) -> int | None:
        """Return the step of the last spike, one step later: by then the host knows it without waiting."""
        is_spike, step = self.before_last
        if self.action == "skip" or not is_spike:
            return None
        if len(self.run.state.rollbacks) >= self.max_rollbacks:
            raise Failure(
                f"techniques: spike_watch: the gradient spiked again at step {step}, after {self.max_rollbacks} "
                "rollbacks (max_rollbacks): lower learning_rate, or raise factor"
            )
        return step

    def state_dict(self) -> dict[str, Any]:
        is_spike, step = self.last
        return {"norms": self.norms, "seen": self.seen, "spike": step if is_spike else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms.copy_(state["norms"])
        self.seen = state["seen"]
        self.last = (DeviceFlag(torch.tensor(state["spike"] > 0)), state["spike"])
