"""Sums of a step, over all ranks and of this rank's losses; the meter of what steps add up to until a train line.

Tests: tests/reporting/test_run_logger.py, tests/training/test_resume_on_other_world_size.py.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from src.config.errors import UsageError
from src.data.data_loader import StepBatch
from src.distributed.backends import Backend
from src.distributed.host_group import HostGroup

SUMS = ("weight", "tokens", "padded_tokens", "data_seconds")
COUNTS = ("weight", "tokens", "padded_tokens", "examples", "hash_low", "hash_high")  # of the micro-batches of a step
LINE = ("kind", "step", "epoch", "loss", "weight", "tokens_per_second", "padding", "data_seconds", "seconds")
LINE += ("learning_rate", "grad_norm", "skipped", "graphs", "tflops", "mfu", "gpu_memory_gib")


# ---- one step ----------------------------------------------------------------------------------------------------------


class StepTotals(dict[str, float]):
    """Sums over all ranks by name, from one small all-reduce before the forward passes of a step.

    `totals.weight` is `totals["weight"]`: the targets (tokens, rows, …) in the global batch, by which the loss is
    divided. `tokens`; `padded_tokens`, tokens and padding; `examples`; `hash_low` and `hash_high`, a hash of the
    example ids for ledger.jsonl. Then the votes that the loop has added, such as `stop`: the number of ranks for it."""

    forwards: list[float]  # micro-batches of each rank; empty if ranks may run different numbers of them

    def __getattr__(self, name: str) -> float:
        if name in self:
            return self[name]
        raise AttributeError(f"a step has no sum named {name!r}; it has {', '.join(self)}")

    @classmethod
    def sum_over_ranks(cls, backend: Backend, batch: StepBatch, votes: dict[str, float]) -> "StepTotals":
        """Sum the counts of the micro-batches, and `votes` by name, over all ranks; a collective.

        Every input of a decision is summed here, so ranks never disagree: all of them give the same names in the same
        order. Sums of whole numbers are exact."""
        sums = dict.fromkeys(COUNTS, 0.0)
        for micro, rows in batch:
            if not micro.dummy:
                counts = (rows.weight, rows.tokens, rows.padded_tokens, len(micro.ids), *micro.hash)
                for name, value in zip(COUNTS, counts, strict=True):
                    sums[name] += value
        if both := sums.keys() & votes.keys():
            raise ValueError(f"a vote is named {min(both)!r}, as another sum of a step: rename it")
        sums |= votes
        vector = backend.hosts.sum([*sums.values(), *backend.forwards_per_rank(batch)]).tolist()
        totals = cls(zip(sums, vector))  # noqa: B905  the rest of the vector follows
        totals.forwards = vector[len(sums) :]
        return totals


class StepLosses(NamedTuple):
    """What the task returned for this rank's micro-batches of a step, on the device."""

    losses: torch.Tensor  # one per micro-batch
    sums: dict[str, torch.Tensor]  # its further sums (0-d), added over the micro-batches

    @classmethod
    def of(cls, batch: StepBatch, outputs: list[dict[str, torch.Tensor]]) -> "StepLosses":
        """Return the losses and further sums (0-d) of each micro-batch in one; dummy batches count as 0."""
        losses: list[torch.Tensor] = []
        sums: dict[str, Any] = {}
        for (micro, _), out in zip(batch, outputs, strict=True):
            losses.append(torch.zeros_like(out["loss"]) if micro.dummy else out["loss"])
            for name, value in out.items():
                if name != "loss" and not micro.dummy:
                    value = value.detach().double()
                    sums[name] = sums[name] + value if name in sums else value
        return cls(torch.stack(losses) if len(losses) > 1 else losses[0][None], sums)  # a view takes no kernel


# compute_gradient of train.py, or what replaces or wraps it
ComputeGradient = Callable[[Any, torch.nn.Module, StepBatch, StepTotals], StepLosses]


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
