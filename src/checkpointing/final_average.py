"""The average of weights that final/ holds, if a technique has the option `final`: of the last or the best step.

Tests: tests/checkpointing/test_final_average.py.
"""

from pathlib import Path
from typing import Any

import torch

from src.checkpointing import checkpoint_format
from src.distributed.strategies import Strategy
from src.training.technique_chain import put_weights


class FinalAverage:
    """The technique among `parts` with the average that final/ holds; `name` is empty if there is none."""

    def __init__(self, parts: dict[str, Any]):
        chosen = {name: part for name, part in parts.items() if getattr(part, "final", False)}
        self.name, self.technique = next(iter(chosen.items()), ("", None))

    def put(self, strategy: Strategy, model: torch.nn.Module, checkpoint: Path | None) -> bool:
        """After training, replace the weights of `model` by the average that `checkpoint` or memory holds.

        Return False if there is no average: none is asked for, or no weights had been averaged by then."""
        if self.technique is None:
            return False
        if checkpoint is not None:
            checkpoint_format.load_part(checkpoint, self.name, self.technique)
        weights = self.technique.average()
        if weights:
            put_weights(strategy, model, weights)
        return bool(weights)
