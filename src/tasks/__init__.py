"""The tasks, and the contract between a task and the loop. A fork adds a file here and a line to OPTIONS.

A task says what one row is and what its loss sums to; it knows nothing of processes, devices or steps.
Guarded by tests/conformance/, which a fork runs on its own task.
"""

from importlib import import_module
from typing import NamedTuple, Protocol

import numpy as np
import torch


def _options(name: str):
    return lambda: import_module(f"src.tasks.{name}").Options


OPTIONS = {  # task name -> its dataclass of options
    "causal_lm": _options("causal_lm"),
    "text_classification": _options("text_classification"),
}


def make_task(cfg, options) -> "Task":
    """Return the task that `run.task` names."""
    return import_module(f"src.tasks.{cfg.task}").Task(cfg, options)


def width(lengths: list[int], multiple: int | None, most: int) -> int:
    """Return how wide a micro-batch is: as its longest row, or the next multiple, which gives torch.compile fewer shapes."""
    longest = max(1, *lengths)
    return max(longest, min(-(-longest // (multiple or 1)) * (multiple or 1), most))


class Batch(NamedTuple):
    """One micro-batch on the host: what the model reads, and what is known without a model."""

    inputs: dict[str, torch.Tensor]
    weight: float  # what the micro-batch's loss sum will be divided by, added over the global batch
    tokens: int  # real tokens (or rows, pixels, …), for the throughput
    positions: int  # tokens and padding, for the share of padding
    sums: dict[str, float] = {}  # further sums for `metrics`, such as bytes


class Task(Protocol):
    """What a task file provides, beside a dataclass `Options` whose `check()` lists faults of its values. All of it runs
    on every rank."""

    def load(self) -> None:
        """Read tokenizer and configuration; refuse what does not fit together."""

    def inspect_columns(self, examples, split: str, whole: bool = True):
        """Return (the raw columns that `encode` needs, the `datasets.Features` of what it returns); refuse columns that will
        not do. Called before any row is encoded, with all raw rows of a split, a `datasets.Dataset`; of a stream, where `whole`
        is false, with its first ones."""

    def encode(self, batch: dict[str, list], places) -> dict[str, list]:
        """Return the columns of the rows that a batch of raw rows becomes, ready for `collate`, among them the integers
        `length`, `targets` (what a row adds to the weight) and `cut` (tokens that were left out).

        Called in any process, for any part of the data: what comes out depends on the batch alone. `places[i]` says in an
        error where raw row i can be found."""

    def on_prepared(self, features) -> None:
        """Take from the features of prepared data what `build` needs to know, such as the names of the labels."""

    def fingerprint(self) -> str:
        """Return what `encode` depends on besides the examples and this file."""

    attributes_from_weights: tuple[
        str, ...
    ] = ()  # attributes that `build` finds out from the weights, for ranks that have none

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        """Return the transformers model in `run.dtype` on the CPU, the same on every rank, with the weights of the
        checkpoint folder `weights` if there is one; or, if `empty`, its shapes without weights, which another rank sends."""

    def collate(self, rows: list[dict[str, np.ndarray]]) -> Batch:
        """Return the padded micro-batch. Randomness (augmentation, masking) from torch, numpy or random is keyed
        by the micro-batch before this is called, so it needs no seed of its own."""

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return sums over the micro-batch: `loss`, in float32 or better, and in evaluation whatever `metrics` divides.

        Called inside the wrapped module. A value of one dimension is a value per row, collected by id in evaluation."""

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        """Return the numbers of an eval line besides loss, weight and examples."""

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return metrics that do not decompose, from the per-row values of every example in the order of ids."""

    def sample(self, model: torch.nn.Module) -> str | None:
        """Return something to look at after training, or None."""
