"""Spike watch: skip a step with a gradient norm far above the median.

Reference: Takase et al., "Spike No More", 2023, and OLMo's skip-step optimizer.
Tests: tests/addons/techniques/test_spike_watch.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from addons.techniques import Technique
from engine.config.option import option


@dataclass(eq=False)
class SpikeWatch(Technique):
    """Compare the norm of the gradient of the global batch, before clipping, with the median of the last norms.

    Spikes enter the median, too: one of them hardly moves it, and a lasting change becomes normal after half a window.
    The norm is the same on every rank and the median stays on the device, so nothing is sent and nothing waits."""

    order = 60

    factor: float = option("a norm above this multiple of the median is a spike", 4.0, above=1)
    window: int = option("number of norms in the median", 100, min=2, max=100_000)
    warmup: int = option("norms to collect before the first decision", 20, min=1)

    def errors(self) -> list[str]:
        if self.warmup > self.window:
            return [f"warmup is {self.warmup}, more than window, which is {self.window}: it would never end"]
        return []

    def begin(self) -> None:
        run = self.run
        self.norms = torch.full((self.window,), float("nan"), device=run.backend.accelerator.device)
        self.seen = 0  # norms so far
        run.backend.skip_rules.append(self.is_spike)

    def is_spike(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether `norm`, of the step's gradient, is a spike; a bool on its device."""
        ordered = self.norms.sort().values  # NaN last: a norm that was not finite, or not yet seen
        count = self.norms.isfinite().sum()
        median = ordered[((count - 1).clamp(min=0) // 2).unsqueeze(0)].squeeze(0)
        norm = norm.detach().to(self.norms)
        self.norm = norm
        return (count >= self.warmup) & (norm > self.factor * median)

    def after_update(self, skipped: torch.Tensor) -> None:
        self.norms[self.seen % self.window] = torch.where(self.norm.isfinite(), self.norm, torch.nan)
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms.copy_(state["norms"])
        self.seen = state["seen"]
