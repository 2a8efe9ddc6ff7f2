"""The contract of a task: its methods, and the batch that it gives to the model.

A task says what a row is and what its loss adds up; it knows nothing of processes, devices or steps.
Tests: tests/conformance/, which a fork runs on its own task.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from src.config.schema import RunConfig

if TYPE_CHECKING:
    from datasets import Dataset, Features


class Batch(NamedTuple):
    """One micro-batch on the host: the model's inputs, and what is counted without a model."""

    inputs: dict[str, torch.Tensor]
    weight: float  # denominator of the loss: tokens, rows, pixels, …; summed over the global batch
    tokens: int  # real tokens (or rows, pixels, …), for the throughput
    padded_tokens: int  # the same with padding
    sums: dict[str, float] = {}  # more sums for `metrics`, such as bytes


def padded_length(lengths: list[int], multiple_of: int | None, max_length: int) -> int:
    """Return the width of a padded micro-batch: its longest row, or the next multiple (torch.compile sees fewer shapes)."""
    longest = max(1, *lengths)
    if not multiple_of:
        return longest
    rounded_up = -(-longest // multiple_of) * multiple_of
    return max(longest, min(rounded_up, max_length))


class Task:
    """What a task implements. Its file also holds a dataclass `Options`, whose fields are made by `option(...)`.

    Every process calls every method, in the order of this class.
    """

    # Attributes that `build` takes from the weights; processes that build without weights receive them.
    attributes_from_weights: tuple[str, ...] = ()

    def __init__(self, cfg: RunConfig, options: Any):
        self.cfg, self.options = cfg, options

    def load(self) -> None:
        """Read the tokenizer and the model's configuration; raise UsageError for what does not fit together."""
        raise NotImplementedError

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Return what `encode` depends on besides the rows and the code; another value prepares the data again."""
        raise NotImplementedError

    def inspect_columns(self, examples: "Dataset", split: str, whole: bool = True) -> tuple[list[str], "Features"]:
        """Return the raw columns that `encode` reads and the features of the rows that it returns.

        Raise UsageError for columns of the wrong name or type. `examples` are all raw rows of the split; of a stream
        (`whole` is false) only the first ones. Called before `encode`."""
        raise NotImplementedError

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the columns of the prepared rows made of a batch of raw rows.

        Three columns of integers are required: `length`, `targets` (what a row adds to the weight) and `cut` (tokens
        truncated by max_length). Any process may call this for any part of the data, so the result must depend on the
        batch alone. `locations[i]` names file and line of raw row i, for error messages."""
        raise NotImplementedError

    def on_prepared(self, features: "Features") -> None:
        """Take from the features of the prepared rows what `build` needs, such as the names of the labels."""

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        """Return the transformers model on the CPU in `cfg.dtype`, the same on every rank.

        `weights` is a checkpoint folder to load. With `empty`, parameters are allocated and not initialized: rank 0
        sends them (FSDP2)."""
        raise NotImplementedError

    def collate(self, rows: list[dict[str, np.ndarray]]) -> Batch:
        """Return the padded micro-batch.

        torch, numpy and `random` are seeded by the micro-batch before the call, so augmentation needs no seed."""
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return sums over the micro-batch: `loss`, in float32 or better; in evaluation also what `metrics` divides.

        Runs inside the wrapped module. A tensor of one dimension holds one value per row: evaluation collects it by
        example id, for `row_metrics`."""
        raise NotImplementedError

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        """Return the numbers of an eval line besides loss, weight and examples: quotients of sums."""
        return {}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return metrics that are no quotient of sums (F1, BLEU), from the values of all rows in the order of ids."""
        return {}

    def sample(self, model: torch.nn.Module) -> str | None:
        """Return text to print after training, such as a continued prompt, or None."""
        return None
