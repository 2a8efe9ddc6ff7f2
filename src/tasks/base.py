"""Task interface: the methods of a task, and the batch that it gives to the model.

A task defines its rows and the sums that its loss returns. It knows nothing of processes, devices or steps.
Tests: tests/conformance/; run them on your own task.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from src.config.schema import RunConfig

if TYPE_CHECKING:
    from datasets import Dataset, Features


class Batch(NamedTuple):
    """One micro-batch on the host: the model's inputs, and counts that need no model."""

    inputs: dict[str, torch.Tensor]
    weight: float  # denominator of the loss: tokens, rows, pixels, …; summed over the global batch
    tokens: int  # real tokens (or rows, pixels, …), for the throughput
    padded_tokens: int  # the same including padding
    sums: dict[str, float] = {}  # additional sums for `metrics`, such as bytes


def padded_length(lengths: list[int], multiple_of: int | None, max_length: int) -> int:
    """Return the width of a padded micro-batch: its longest row, rounded up to `multiple_of`, up to max_length."""
    longest = max(1, *lengths)
    if not multiple_of:  # set it so that torch.compile sees fewer shapes
        return longest
    rounded_up = -(-longest // multiple_of) * multiple_of
    return max(longest, min(rounded_up, max_length))


class Task:
    """Base class of a task. Its file also defines a dataclass `Options` with fields made by `option(...)`.

    Every process calls every method, in the order of this class.
    """

    # Attributes that `build` sets from the weights. Rank 0 sends them to ranks that build without weights.
    attributes_from_weights: tuple[str, ...] = ()

    def __init__(self, cfg: RunConfig, options: Any):
        self.cfg, self.options = cfg, options

    def load(self) -> None:
        """Read the tokenizer and the model's configuration. Raise UsageError if they do not fit together."""
        raise NotImplementedError

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Return the task's part of the cache key: everything that `encode` depends on besides rows and code."""
        raise NotImplementedError

    def inspect_columns(self, examples: "Dataset", split: str, whole: bool = True) -> tuple[list[str], "Features"]:
        """Return (raw columns that `encode` reads, features of the rows that `encode` returns).

        Raise UsageError for columns of the wrong name or type. `examples` holds all raw rows of the split, but only the
        first rows of a stream (`whole` is false). Called before `encode`."""
        raise NotImplementedError

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the columns of the prepared rows made from a batch of raw rows.

        Three integer columns are required: `length`, `targets` (what a row adds to the weight of its batch) and `cut`
        (tokens truncated by max_length). Any process may call this for any part of the data, so the result must depend
        only on `batch`. `locations[i]` names the file and line of raw row i, for error messages."""
        raise NotImplementedError

    def on_prepared(self, features: "Features") -> None:
        """Store what `build` needs from the features of the prepared rows, such as the label names."""

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        """Return the transformers model on the CPU in `cfg.dtype`, the same on every rank.

        `weights` is a checkpoint folder to load. With `empty`, allocate the parameters without initializing them:
        rank 0 sends their values (FSDP2)."""
        raise NotImplementedError

    def collate(self, rows: list[dict[str, np.ndarray]]) -> Batch:
        """Return the padded micro-batch.

        torch, numpy and `random` are seeded for each micro-batch before this call, so augmentation is reproducible."""
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return sums over the micro-batch: `loss` in float32 or better, and in evaluation the sums for `metrics`.

        Runs inside the wrapped module (DDP, FSDP2). A 1-D tensor holds one value per row. Evaluation collects these
        values by example id for `row_metrics`."""
        raise NotImplementedError

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        """Return the metrics of an eval line besides loss, weight and examples. Each is a quotient of sums."""
        return {}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return metrics that need the values of all rows (F1, BLEU). `rows` is in the order of example ids."""
        return {}

    def sample(self, model: torch.nn.Module) -> str | None:
        """Return text to print after training, such as a continued prompt; None for no text."""
        return None
