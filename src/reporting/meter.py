"""Meter: sums of loss, weight, tokens and seconds since the last train line.

Tests: tests/reporting/test_meter.py.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from src.distributed.host_group import HostGroup
from src.training.step import StepTotals


class Meter:
    """Sums over steps without waiting for the device: losses stay there until a train line or a checkpoint.

    The losses of all steps are kept and added in step order, so the sum does not depend on when it is read."""

    SUMS = ("weight", "tokens", "padded_tokens", "data_seconds")

    def __init__(self):
        self.losses: list[float] = []  # loss sums over the global batch, one per step
        self.pending: list[torch.Tensor] = []  # this rank's loss sums of the steps after those, on the device
        self.weight = self.tokens = self.padded_tokens = self.data_seconds = 0.0
        self.began = time.perf_counter()

    def add(self, losses: torch.Tensor | None, totals: StepTotals, data_seconds: float) -> None:
        """Add a step: this rank's losses (None if the global batch has no weight) and the totals of all ranks."""
        if losses is not None:
            self.pending.append(losses.sum())
        self.weight += totals.weight
        self.tokens += totals.tokens
        self.padded_tokens += totals.padded_tokens
        self.data_seconds += data_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock: evaluation and saving do not count as training time."""
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began

    def _reduce(self, hosts: HostGroup) -> None:
        """Sum the pending losses over all ranks; costs one wait for the device and one small all-reduce."""
        if self.pending:
            self.losses += hosts.sum(torch.stack(self.pending).cpu()).tolist()
            self.pending = []

    def state(self, hosts: HostGroup) -> dict:
        """Return all sums as plain numbers (a collective). Only the times differ between ranks."""
        self._reduce(hosts)
        sums = {name: getattr(self, name) for name in self.SUMS}
        return sums | {"losses": self.losses.copy(), "seconds": time.perf_counter() - self.began}

    def resume(self, state: dict) -> None:
        """Restore the sums from a return value of `state`."""
        self.losses = [float("nan") if loss is None else loss for loss in state["losses"]]
        self.began = time.perf_counter() - state["seconds"]
        for name in self.SUMS:
            setattr(self, name, state[name])

    def line(self, hosts: HostGroup) -> dict:
        """Return the values of a train line and reset all sums (a collective). Only the times differ between ranks."""
        self._reduce(hosts)
        seconds = time.perf_counter() - self.began
        values = {
            "loss": sum(self.losses) / self.weight if self.weight else None,
            "weight": self.weight,
            "tokens_per_second": self.tokens / seconds,
            "padding": 1 - self.tokens / self.padded_tokens if self.padded_tokens else None,
            "data_seconds": self.data_seconds,
            "seconds": seconds,
        }
        self.__init__()
        return values
