"""Task interface: the methods of a task, and the batch that it gives to the model.

A task defines its rows and the sums that its loss returns. It knows nothing of processes, devices or steps.
Tests: tests/conformance/; run them on your own task.
"""

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from engine.config.errors import UsageError
from engine.config.find_addons import first_answer

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Features


# Methods of `Task` that have to be defined.
REQUIRED = ("load", "fingerprint", "inspect_columns", "encode", "build", "collate", "loss")


class Batch(NamedTuple):
    """One micro-batch on the host: the model's inputs, and counts that need no model."""

    inputs: dict[str, torch.Tensor]
    weight: float  # denominator of the loss: tokens, rows, pixels, …; summed over the global batch
    tokens: int  # real tokens (or rows, pixels, …), for the throughput
    padded_tokens: int  # the same including padding
    sums: dict[str, float] = {}  # additional sums for `metrics`, such as bytes


class Task:
    """Base class of a task. Its file also defines a dataclass `Options` with fields made by `option(...)`.

    Every process calls every method, in the order of this class. Those of REQUIRED have to be defined. A task with the
    option `sample_prompt` also has `sample(model)`, which returns a text to print after training. Add-ons ask a task
    for more: see addons/README.md."""

    unit: str = "tokens"  # what the `length` of a row and Batch.tokens count, for the console
    # Whether padding a micro-batch to its longest row costs about `length` of that row for each: cut at the least padding.
    # False, such as for two lengths a row, which are padded apart: micro-batches have equal counts of rows.
    cut_by_cost: bool = True
    # Names by which `encode` gets columns, whatever the data calls them: the field `columns` may name each of them.
    parts: tuple[str, ...] = ()
    decode_media: bool = True  # False: `encode` gets images and audio as stored, {"bytes": …, "path": …}
    # Set by `inspect_columns`:
    row_description: str = ""  # a sentence for the plan on how rows are read
    reads_chats: bool = False  # whether rows are chats
    # Why none of the rows may have a target, for an error.
    without_targets: str = "all labels are masked (-100), or no turn is the assistant's"
    id_columns: tuple[str, ...] = ("input_ids",)  # of the prepared rows: token ids, in which unknown ones are counted
    attributes_from_weights: tuple[str, ...] = ()  # set by `build`; ranks that build without weights get them of rank 0
    pipeline_tag: str = ""  # of the Hub, for the model card, where the name of the model's class does not tell it
    generation: Any = None  # how the model answers prompts (engine/models/generation.py), if it can
    # Set by the loop before each step, on every process: the share of the run's steps that are done, 0 in the first step.
    # For a loss with a schedule: read it in `loss` while `model.training`. It depends on max_steps; an evaluation, and
    # eval.py, must not read it, nor `collate`, whose processes have the value of their start.
    progress: float = 0.0
    encode_helpers: tuple[ModuleType, ...] = ()  # modules that `encode` uses besides the task's file and engine/rows

    def __init__(self, cfg: Any, options: Any):
        self.cfg = cfg  # RunConfig of src/fields.py
        self.options = options  # Options of the task

    def load(self) -> None:
        """Read what rows and model need (tokenizer, configuration). Raise UsageError if it does not fit together."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return the task's part of the cache key: everything that `encode` depends on besides rows and code."""
        raise NotImplementedError

    def inspect_columns(self, examples: Any, split: str) -> tuple[list[str], "Features"]:
        """Return (raw columns that `encode` reads, features of the rows that `encode` returns).

        The columns have the names of their `parts`. Raise UsageError for columns of the wrong name. `examples` are the raw rows: `column_names` of the first ones,
        `first(column)`, their first value that is not null, and of columns that have types (Parquet, Arrow) `features`;
        `examples[column]` yields all values, `unique(column)` returns each once (of a stream: of the first rows). A column
        may be missing in some rows, or in all. Called before `encode`, unless the prepared rows are in the cache."""
        raise NotImplementedError

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the columns of the prepared rows made from a batch of raw rows. What a row lacks is None.

        Three integer columns are required: `length`, `targets` (what a row adds to the weight of its batch) and `cut`
        (tokens truncated by max_length). Any process may call this for any part of the data, so the result must depend
        only on `batch`. `locations[i]` names the file and line of raw row i, for error messages."""
        raise NotImplementedError

    def pack(self, rows: dict[str, list]) -> dict[str, list]:
        """Return encoded rows of one block put together into fuller ones, after `long_rows` has dropped some."""
        return rows

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        """Return the model, any nn.Module, on the CPU in `cfg.dtype`, the same on every rank.

        `weights` is the folder of a run's model to load; None: `cfg.model_name_or_path`, or random values.
        With `empty` the values do not matter, because rank 0 sends them (FSDP2): initializing them is not needed."""
        raise NotImplementedError

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        """Return the padded micro-batch. Augmentation, masking and mixup belong here, only if `training` is true.

        torch, numpy and `random` are seeded for each micro-batch before this call, so they are reproducible."""
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return sums over the micro-batch: `loss` in float32 or better, and in evaluation the sums for `metrics`.

        Runs inside the wrapped module (DDP, FSDP2). In evaluation, a tensor of shape (rows, …) holds one value or
        vector per row. Evaluation collects these values by example id for `row_metrics`, and needs the same names, and
        vectors of one length, for any rows. In training, further sums appear in the train line, divided by the weight."""
        raise NotImplementedError

    # ---- what only some tasks define ---------------------------------------------------------------------------------

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        """Return quotients of sums for the eval line, NaN if undefined: the same names for any rows."""
        return {}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return metrics that need the values of all rows (F1, BLEU). `rows` is in the order of example ids."""
        return {}

    def on_prepared(self, features: "Features") -> None:
        """Store what `build` needs from the features of the prepared rows, such as the label names."""

    def on_train_data(self, train_set: Any) -> None:
        """Store what the loss needs to know of all training rows, such as the number of each class."""

    def on_validation_data(self, split: Any) -> None:
        """Store what an evaluation needs to know of all validation rows, such as the prompts to answer; None: there are
        none. Raise UsageError if an option needs some."""

    def answer(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], max_new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        """Return the tokens generated after each prompt of `inputs`, (rows, max_new_tokens), filled up with -100.

        Only a task with an attribute `generation` needs it; see engine/models/generation.py. `settings` are those of
        transformers' `generate`."""
        raise UsageError(f"task {self.cfg.task} does not answer prompts: give it a method `answer` (engine/task.py)")

    def answer_metrics(self, answers: list[str], references: list[str]) -> dict[str, float]:
        """Return the metrics of generated answers, given the expected ones."""
        return {}

    def plan_rows(self, has_chats: bool) -> dict[str, str]:
        """Return lines of the plan about the rows, by name; `has_chats`: whether training data has chats."""
        return {}

    def saved(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the part of `model` that checkpoints and final/ hold: all but a frozen teacher."""
        return model

    def wrap_gradient(self, compute: Callable) -> Callable:
        """Return `compute_gradient` of train.py, or what takes its place: for a loss over the whole batch."""
        return compute

    def write_files(self, folder: "Path", tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Write further files of a checkpoint or final/, such as other programs read; return the tensors of the model.

        Every rank calls it with the tensors that it writes; other files are written by rank 0."""
        return tensors

    def model_config(self) -> dict[str, Any]:
        """Return config.json for a model without `save_pretrained`; `load` reads it by `saved_config(cfg)`."""
        return {}

    # ---- not to be defined -------------------------------------------------------------------------------------------

    def build_model(
        self, weights: str | None = None, empty: bool = False, on_built: Callable[[torch.nn.Module], None] | None = None
    ) -> torch.nn.Module:
        """Return what `build` returns, changed by the add-ons that the run file names. Everything else calls this.

        `on_built` is called with the model before that."""
        addons = self.cfg.addons
        model = first_answer(each.build(self, weights, empty) for each in addons)
        if model is None:
            model = self.build(weights, empty)
        if on_built is not None:
            on_built(model)
        for each in addons:
            each.change_built_model(self, model, weights, empty)
        return model

    def left_out(self, model: torch.nn.Module, tensors: dict[str, Any], final: bool = False) -> set[str]:
        """Return the names in `tensors` of the saved part `model` that a checkpoint leaves out, or final/ if `final`."""
        return set().union(*(each.left_out(model, tensors, final) for each in self.cfg.addons))
