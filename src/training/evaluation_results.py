"""Results of an evaluation on one rank: sums by micro-batch, values by example.

Tests: tests/training/test_evaluation.py.
"""

import numpy as np
import torch

from src.data.batch_plan import MicroBatch
from src.tasks import Batch
from src.training.evaluation_plan import Plan

FLUSH = 64  # micro-batches; their results stay on the device before they are copied to the host
TIMES_SEEN = "times seen"


class Results:
    """This rank's sums by micro-batch and values by example, on the host; zero if another rank computes them."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.names: list[str] = []  # columns of the table: weight, then the sums of the task
        self.table: np.ndarray | None = None  # (micro-batches, names)
        self.per_example: dict[str, np.ndarray] = {}
        self.pending: list[tuple[MicroBatch, Batch, dict[str, torch.Tensor]]] = []
        self.seen: set[tuple[str, ...]] = set()  # what a micro-batch returned: names, and the shapes of rows

    def add(self, micro: MicroBatch, batch: Batch, out: dict[str, torch.Tensor]) -> None:
        self.pending.append((micro, batch, out))
        if len(self.pending) == FLUSH:
            self.flush()

    def flush(self) -> None:
        """Copy pending results to the host; this waits for the device."""
        for micro, batch, out in self.pending:
            sums = {name: value for name, value in out.items() if value.dim() == 0} | batch.sums
            shapes = {
                name: f" (rows, {str([*value.shape[1:]])[1:-1]})" for name, value in out.items() if value.dim() > 1
            }
            self.seen.add(tuple(sorted(name + shapes.get(name, "") for name in {*out, *batch.sums})))
            if len(self.seen) > 1:  # `_names_on_all_ranks` raises an error
                break
            if self.table is None:
                self.names = ["weight", *sorted(sums)]
                self.table = np.zeros((len(self.plan.micro_batches), len(self.names)))
            self.table[micro.index] = [batch.weight, *(float(sums[name]) for name in self.names[1:])]
            rows = micro.ids - self.plan.first_row[micro.index]
            for name, value in out.items():
                if value.dim():
                    dtype = float if value.is_floating_point() else np.int64
                    self._column(name, value.shape[1:], dtype)[rows] = value.double().cpu().numpy()
            self._column(TIMES_SEEN, (), np.int64)[rows] += 1
        self.pending.clear()

    def values(self) -> tuple[list[str], np.ndarray, dict[str, np.ndarray]]:
        """Return (names, table, values by example) of an evaluation that this rank computed alone."""
        assert self.table is not None
        return self.names, self.table, {n: v for n, v in self.per_example.items() if n != TIMES_SEEN}

    def _column(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Return the values of all examples, (examples, *shape); every row of an evaluation has the same shape."""
        if name not in self.per_example:
            self.per_example[name] = np.zeros((self.plan.examples, *shape), dtype)
        return self.per_example[name]
