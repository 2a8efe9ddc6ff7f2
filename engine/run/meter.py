"""The meter: the sums that steps add up to until a train line, over all ranks.

Tests: tests/src/training/test_run_logger.py, tests/engine/checkpointing/test_resume_on_other_world_size.py.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config.errors import UsageError
from engine.distributed.exact_sums import VALUE_PARTS, join_values, split_values
from engine.distributed.host_group import HostGroup
from engine.run.totals_and_votes import StepLosses, StepTotals

SUMS = ("weight", "tokens", "padded_tokens", "data_seconds")
# Fields of a train line, whose names the further sums of a task may not have.
LINE = (
    "kind",
    "step",
    "epoch",
    "loss",
    "weight",
    "tokens_per_second",
    "padding",
    "data_seconds",
    "seconds",
    "learning_rate",
    "grad_norm",
    "skipped",
    "graphs",
    "tflops",
    "mfu",
    "gpu_memory_gib",
)


# ---- many steps --------------------------------------------------------------------------------------------------------


class Meter:
    """Sums over steps without waiting for the device: losses stay there until a train line or a checkpoint.

    The values of all steps are kept and added in step order, so a sum does not depend on when it is read."""

    def __init__(self):
        self.pending: list[dict[str, torch.Tensor]] = []  # this rank's values by name and step, on the device
        self.values: dict[str, list[float]] = {"loss": []}  # sums over all ranks, one per step, of the steps before
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.began = time.perf_counter()

    def add(self, losses: StepLosses | None, totals: StepTotals, data_seconds: float) -> None:
        """Add a step: this rank's losses (None if the global batch has no weight) and the totals of all ranks."""
        if losses is not None:
            self.pending.append({"loss": losses.losses} | losses.sums)  # added in `_table`: fewer operations per step
        self.sums["weight"] += totals.weight
        self.sums["tokens"] += totals.tokens
        self.sums["padded_tokens"] += totals.padded_tokens
        self.sums["data_seconds"] += data_seconds

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
        new_names = set().union(*self.pending) - set(names)
        num_new, *sums = hosts.sum_in_order([len(new_names), *self._table(names, hosts.is_exact)]).tolist()
        sums = _joined(sums, hosts.is_exact)
        for i, name in enumerate(names):
            self.values[name] += sums[i :: len(names)]
        if num_new:
            self._reduce_new(hosts, hosts.union(new_names))
        self.pending = []

    def _reduce_new(self, hosts: HostGroup, names: list[str]) -> None:
        """Sum the pending values of names that no step had before, over all ranks."""
        for name in names:
            if name in LINE:
                raise UsageError(f"the task returns a sum named {name!r}, a field of the train line: rename it")
        sums = _joined(hosts.sum_in_order(self._table(names, hosts.is_exact)).tolist(), hosts.is_exact)
        for i, name in enumerate(names):
            self.values[name] = sums[i :: len(names)]

    def _table(self, names: list[str], is_exact: bool) -> list[float]:
        """Return the pending values of these names, step by step, on the host; 0 where there is none. Exact sums have
        several parts each."""
        zero = torch.zeros_like(self.pending[0]["loss"])
        sums = []
        for step_values in self.pending:
            for name in names:
                values = step_values.get(name, zero).double().reshape(-1)
                if is_exact:
                    sums.append(split_values(values).sum(1))
                else:  # in the order of micro-batches, as they were added before there were exact sums
                    sums.append(values.sum() if name == "loss" else sum(values[1:], values[0]))
        return torch.stack(sums).flatten().tolist()

    def state(self, hosts: HostGroup) -> dict:
        """Return all sums as plain numbers (a collective). Only the times differ between ranks."""
        self._reduce(hosts)
        sums_by_name = {name: values.copy() for name, values in self.values.items()}
        losses = sums_by_name.pop("loss")
        seconds = time.perf_counter() - self.began
        return self.sums | {"losses": losses, "sums": sums_by_name, "seconds": seconds}

    def resume(self, state: dict) -> None:
        """Restore the sums from a return value of `state`."""
        self.values = {"loss": _with_nan(state["losses"])}
        for name, values in state["sums"].items():
            self.values[name] = _with_nan(values)
        self.sums = {name: state[name] for name in SUMS}
        self.began = time.perf_counter() - state["seconds"]

    def line(self, hosts: HostGroup) -> dict:
        """Return the values of a train line and reset all sums (a collective). Only the times differ between ranks."""
        self._reduce(hosts)
        sums = self.sums
        seconds = time.perf_counter() - self.began
        means = dict.fromkeys(self.values)
        if sums["weight"]:
            means = {name: sum(values) / sums["weight"] for name, values in self.values.items()}
        self.values = {name: [] for name in self.values}
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.began = time.perf_counter()
        return {
            "loss": means.pop("loss"),
            "weight": sums["weight"],
            "tokens_per_second": sums["tokens"] / seconds,
            "padding": 1 - sums["tokens"] / sums["padded_tokens"] if sums["padded_tokens"] else None,
            "data_seconds": sums["data_seconds"],
            "seconds": seconds,
        } | means


def _joined(sums: list[float], is_exact: bool) -> list[float]:
    """Return sums over the ranks; exact ones come in parts."""
    return join_values(torch.tensor(sums, dtype=torch.float64).view(-1, VALUE_PARTS).T).tolist() if is_exact else sums


def _with_nan(values: list[float | None]) -> list[float]:
    """Return the values of a checkpoint, whose JSON has null for a value that is not finite."""
    return [float("nan") if value is None else value for value in values]
