"""The meter: the sums that steps add up to until a train line, over all ranks.

Tests: tests/src/training/test_run_logger.py, tests/engine/checkpointing/test_resume_on_other_world_size.py.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config.errors import UsageError
from engine.distributed.host_group import HostGroup
from engine.loop.step_totals import StepLosses, StepTotals

SUMS = ("weight", "tokens", "padded_tokens", "data_seconds")
LINE = ("kind", "step", "epoch", "loss", "weight", "tokens_per_second", "padding", "data_seconds", "seconds")
LINE += ("learning_rate", "grad_norm", "skipped", "graphs", "tflops", "mfu", "gpu_memory_gib")


# ---- many steps --------------------------------------------------------------------------------------------------------


class Meter:
    """Sums over steps without waiting for the device: losses stay there until a train line or a checkpoint.

    The values of all steps are kept and added in step order, so a sum does not depend on when it is read."""

    def __init__(self):
        self.pending: list[dict[str, torch.Tensor]] = []  # this rank's values by name and step, on the device
        self.values: dict[str, list[float]] = {"loss": []}  # sums over all ranks, one per step, of the steps before
        self.sums, self.began = dict.fromkeys(SUMS, 0.0), time.perf_counter()

    def add(self, losses: StepLosses | None, totals: StepTotals, data_seconds: float) -> None:
        """Add a step: this rank's losses (None if the global batch has no weight) and the totals of all ranks."""
        if losses is not None:
            self.pending.append({"loss": losses.losses} | losses.sums)  # added in `_table`: fewer operations per step
        for name, value in zip(SUMS, (totals.weight, totals.tokens, totals.padded_tokens, data_seconds), strict=True):
            self.sums[name] += value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock: evaluation and saving do not count as training time."""
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began

    def _reduce(self, hosts: HostGroup) -> None:
        """Sum the pending values over all ranks; costs one wait for the device and one small collective.

        A name costs two more collectives when it first appears on any rank, because all ranks must learn it."""
        if not self.pending:
            return
        names = list(self.values)
        new = {name for entry in self.pending for name in entry} - set(names)
        count, *sums = hosts.sum_in_order([len(new), *self._table(names)]).tolist()
        for i, name in enumerate(names):
            self.values[name] += sums[i :: len(names)]
        if count:
            names = hosts.union(new)
            if reserved := [name for name in names if name in LINE]:
                raise UsageError(f"the task returns a sum named {reserved[0]!r}, a field of the train line: rename it")
            sums = hosts.sum_in_order(self._table(names)).tolist()
            self.values |= {name: sums[i :: len(names)] for i, name in enumerate(names)}
        self.pending = []

    def _table(self, names: list[str]) -> list[float]:
        """Return the pending values of these names, step by step, on the host; 0 where there is none."""
        zero = torch.zeros_like(self.pending[0]["loss"])
        return torch.stack([entry.get(name, zero).double().sum() for entry in self.pending for name in names]).tolist()

    def state(self, hosts: HostGroup) -> dict:
        """Return all sums as plain numbers (a collective). Only the times differ between ranks."""
        self._reduce(hosts)
        named = {name: values.copy() for name, values in self.values.items()}
        return self.sums | {"losses": named.pop("loss"), "sums": named, "seconds": time.perf_counter() - self.began}

    def resume(self, state: dict) -> None:
        """Restore the sums from a return value of `state`."""
        values = {"loss": state["losses"]} | state["sums"]
        self.values = {n: [float("nan") if v is None else v for v in column] for n, column in values.items()}
        self.sums, self.began = {name: state[name] for name in SUMS}, time.perf_counter() - state["seconds"]

    def line(self, hosts: HostGroup) -> dict:
        """Return the values of a train line and reset all sums (a collective). Only the times differ between ranks."""
        self._reduce(hosts)
        seconds, sums = time.perf_counter() - self.began, self.sums
        means = {n: sum(column) / sums["weight"] if sums["weight"] else None for n, column in self.values.items()}
        self.values = {name: [] for name in self.values}
        self.sums, self.began = dict.fromkeys(SUMS, 0.0), time.perf_counter()
        return {
            "loss": means.pop("loss"),
            "weight": sums["weight"],
            "tokens_per_second": sums["tokens"] / seconds,
            "padding": 1 - sums["tokens"] / sums["padded_tokens"] if sums["padded_tokens"] else None,
            "data_seconds": sums["data_seconds"],
            "seconds": seconds,
        } | means
