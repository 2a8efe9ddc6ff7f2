"""Meter: sums of loss, weight, tokens, seconds and named values since the last train line.

Tests: tests/reporting/test_run_logger.py, tests/training/test_resume_on_other_world_size.py.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from src.config.errors import UsageError
from src.distributed.host_group import HostGroup
from src.training.step import StepLosses, StepTotals

LINE = ("kind", "step", "epoch", "loss", "weight", "tokens_per_second", "padding", "data_seconds", "seconds")
LINE += ("learning_rate", "grad_norm", "skipped", "graphs", "tflops", "mfu", "gpu_memory_gib")


class Meter:
    """Sums over steps without waiting for the device: losses stay there until a train line or a checkpoint.

    The values of all steps are kept and added in step order, so a sum does not depend on when it is read."""

    SUMS = ("weight", "tokens", "padded_tokens", "data_seconds")

    def __init__(self):
        self.pending: list[dict[str, torch.Tensor]] = []  # this rank's sums by name, on the device
        self.values: dict[str, list[float]] = {"loss": []}  # sums over all ranks, one per step, of the steps before
        self._reset()

    def _reset(self) -> None:
        self.values = {name: [] for name in self.values}
        self.weight = self.tokens = self.padded_tokens = self.data_seconds = 0.0
        self.began = time.perf_counter()

    def add(self, losses: StepLosses | None, totals: StepTotals, data_seconds: float) -> None:
        """Add a step: this rank's losses (None if the global batch has no weight) and the totals of all ranks."""
        if losses is not None:
            self.pending.append({"loss": losses.losses.sum()} | losses.sums)
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
        """Sum the pending values over all ranks; costs one wait for the device and one small all-reduce.

        A name costs two more collectives when it first appears on any rank, because all ranks must learn it."""
        if not self.pending:
            return
        names = list(self.values)
        new = {name for entry in self.pending for name in entry} - set(names)
        sums = hosts.sum([len(new), *self._table(names).flatten().tolist()])
        table = sums[1:].view(-1, len(names))
        if sums[0]:
            new = hosts.union(new)
            if reserved := [name for name in new if name in LINE]:
                raise UsageError(f"the task returns a sum named {reserved[0]!r}, a field of the train line: rename it")
            names, table = names + new, torch.cat([table, hosts.sum(self._table(new))], dim=1)
        for name, column in zip(names, table.T.tolist(), strict=True):
            self.values.setdefault(name, []).extend(column)
        self.pending = []

    def _table(self, names: list[str]) -> torch.Tensor:
        """Return the pending values of these names, (entries, names), on the host; 0 where there is none."""
        table = torch.zeros(len(self.pending), len(names), dtype=torch.float64)
        cells = [(i, j) for i, entry in enumerate(self.pending) for j, name in enumerate(names) if name in entry]
        if cells:
            rows, columns = zip(*cells, strict=True)
            values = [self.pending[i][names[j]] for i, j in cells]
            table[list(rows), list(columns)] = torch.stack(values).cpu().double()
        return table

    def state(self, hosts: HostGroup) -> dict:
        """Return all sums as plain numbers (a collective). Only the times differ between ranks."""
        self._reduce(hosts)
        sums = {name: getattr(self, name) for name in self.SUMS}
        named = {name: values.copy() for name, values in self.values.items()}
        return sums | {"losses": named.pop("loss"), "sums": named, "seconds": time.perf_counter() - self.began}

    def resume(self, state: dict) -> None:
        """Restore the sums from a return value of `state`."""
        values = {"loss": state["losses"]} | state.get("sums", {})
        self.values = {n: [float("nan") if v is None else v for v in column] for n, column in values.items()}
        self.began = time.perf_counter() - state["seconds"]
        for name in self.SUMS:
            setattr(self, name, state[name])

    def line(self, hosts: HostGroup) -> dict:
        """Return the values of a train line and reset all sums (a collective). Only the times differ between ranks."""
        self._reduce(hosts)
        seconds = time.perf_counter() - self.began
        means = {n: sum(column) / self.weight if self.weight else None for n, column in self.values.items()}
        values = {
            "loss": means.pop("loss"),
            "weight": self.weight,
            "tokens_per_second": self.tokens / seconds,
            "padding": 1 - self.tokens / self.padded_tokens if self.padded_tokens else None,
            "data_seconds": self.data_seconds,
            "seconds": seconds,
        }
        self._reset()
        return values | means
