"""Sums of one step: counts and votes over all ranks, in one small all-reduce; losses of this rank.

Tests: tests/src/test_step.py, tests/src/training/test_run_logger.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from engine.distributed.backends import Backend
from engine.distributed.exact_sums import join_values, split_values
from engine.plan.data_loader import StepBatch

COUNTS = ("weight", "tokens", "padded_tokens", "examples", "hash_low", "hash_high")  # of the micro-batches of a step


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
        weights = [0.0]
        for micro, rows in batch:
            if not micro.dummy:
                counts = (rows.weight, rows.tokens, rows.padded_tokens, len(micro.ids), *micro.hash)
                for name, value in zip(COUNTS, counts, strict=True):
                    sums[name] += value
                weights.append(rows.weight)
        reserved = sums.keys() & votes.keys()
        if reserved:
            raise ValueError(f"a vote is named {min(reserved)!r}, as another sum of a step: rename it")
        sums |= votes
        parts = []
        if backend.hosts.is_exact:  # weights may be fractions
            parts = split_values(torch.tensor(weights, dtype=torch.float64)).sum(1).tolist()
        vector = backend.hosts.sum([*parts, *sums.values(), *backend.forwards_per_rank(batch)]).tolist()
        parts, vector = vector[: len(parts)], vector[len(parts) :]
        totals = cls(zip(sums, vector))  # noqa: B905  the rest of the vector follows
        if parts:
            totals["weight"] = join_values(torch.tensor(parts, dtype=torch.float64)).item()
        totals.forwards = vector[len(sums) :]
        return totals


class StepLosses(NamedTuple):
    """Losses and further sums of this rank's micro-batches of a step, on the device."""

    losses: torch.Tensor  # one per micro-batch
    sums: dict[str, torch.Tensor]  # further sums by name, one per micro-batch that has it, in float64

    @classmethod
    def of(cls, batch: StepBatch, outputs: list[dict[str, torch.Tensor]]) -> "StepLosses":
        """Return the losses and further sums (0-d) of each micro-batch in one; dummy batches count as 0."""
        losses: list[torch.Tensor] = []
        by_name: dict[str, list[torch.Tensor]] = {}
        for (micro, _), out in zip(batch, outputs, strict=True):
            losses.append(torch.zeros_like(out["loss"]) if micro.dummy else out["loss"])
            for name, value in out.items():
                if name != "loss" and not micro.dummy:
                    by_name.setdefault(name, []).append(value.detach().double())
        sums = {name: torch.stack(values) for name, values in by_name.items()}
        if len(losses) == 1:
            return cls(losses[0][None], sums)  # a view takes no kernel
        return cls(torch.stack(losses), sums)


# compute_gradient of train.py, or what replaces or wraps it
ComputeGradient = Callable[[Any, torch.nn.Module, StepBatch, StepTotals], StepLosses]
