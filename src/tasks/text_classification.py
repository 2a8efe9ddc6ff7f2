"""Text classification or regression with any encoder, and metrics such as F1 or the Pearson correlation.

A row is {"text": "…", "label": "spam"}. The label is a name, an integer or a bool; with --regression true a number.
If `columns` names a `text_pair`, a row has a second text. Tests: tests/src/tasks/test_text_classification.py.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine import task as base
from engine.config.option import AS_GIVEN, option
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import load_text_encoder
from engine.models.packed_attention import call_on_tokens
from engine.rows.labels import Labels, require_columns
from engine.rows.tokenize_and_pack import pad_columns, padded_length, tokenize_columns
from engine.task import Batch
from src.losses import cross_entropy
from src.losses.chunked_cross_entropy import Scored, row_losses, sums_from_logits
from src.losses.metrics import check_metrics, compute_metrics


@dataclass
class Options(cross_entropy.ClassCrossEntropy):
    needs_model = True  # model_name_or_path or model_config

    max_length: int | None = option(
        "tokens per row; longer texts are truncated (default: the model's limit, at most 1024)",
        min=2,
        from_checkpoint=True,
    )
    regression: bool = option("predict a number: squared error, mse, mae", False)
    metrics: list[str] = option(
        "further metrics: f1 (mean over classes), pearson, spearman; files of addons/metrics/evaluate/; Hub names or "
        "script paths (code: needs trust_remote_code); or none (default: f1, or pearson and spearman with regression)",
        [],
        is_path=AS_GIVEN,
        may_change_on_resume=True,
        from_checkpoint=True,
    )
    r_drop_alpha: float = cross_entropy.r_drop_option()

    def check(self) -> list[str]:
        if self.regression and (self.r_drop_alpha or not self.is_plain_loss):
            names = "label_smoothing_factor, z_loss, focal_gamma, class_weights and r_drop_alpha"
            return [f"regression is true: it has a squared error, so remove {names}"]
        if self.regression and "f1" in self.metrics:
            return ["metrics: f1 compares classes, but regression is true: remove it, or give pearson or spearman"]
        return []


class Task(base.Task):
    parts = ("text", "text_pair", "label")
    # Modules that a pretrained encoder lacks.
    new_head = ("classifier", "score", "pooler", "pre_classifier", "classification_head")

    @property
    def labels(self) -> Any:
        """The names of the classes in the order of their ids; None until the data or the model gives them."""
        return self.classes.names

    def load(self) -> None:
        options = self.options
        encoder = load_text_encoder(self.cfg, options.max_length)
        self.tokenizer, self.tokenizer_text, self.config, self.max_length = encoder
        default_metrics = ["pearson", "spearman"] if options.regression else ["f1"]
        self.metric_names = check_metrics(options.metrics or default_metrics, self.cfg.trust_remote_code)
        self.text_columns = ["text"]
        self.token_columns = ["input_ids"]
        if "text_pair" in self.cfg.columns:
            self.text_columns.append("text_pair")
            has_types = "token_type_ids" in self.tokenizer.model_input_names
            if has_types and getattr(self.config, "type_vocab_size", 0) > 1:
                self.token_columns.append("token_type_ids")  # 0 or 1: the text that a token belongs to
        self.classes = Labels("label")
        if options.regression:
            self.classes = Labels("label", ["value"])  # the name of the only output
        elif self.cfg.model_name_or_path:
            self.classes = self.classes.of_model(self.config)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        settings = (
            self.tokenizer_text,
            self.max_length,
            self.token_columns,
            self.text_columns,
            self.labels,
            self.options.regression,
        )
        return repr(settings)

    def inspect_columns(self, examples, split: str):
        from datasets import ClassLabel, Features, List, Value

        needed = require_columns(examples, [*self.text_columns, "label"], split)
        self.classes = self.classes.find(self.cfg, examples, split)
        label = Value("float64") if self.options.regression else ClassLabel(names=self.labels)
        features: dict[str, Any] = {name: List(Value("int32")) for name in self.token_columns}
        features |= {name: Value("int64") for name in ("length", "targets", "cut")}
        return needed, Features(features | {"label": label})

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        if self.options.regression:
            labels = self.classes.numbers(batch["label"], locations)
        else:
            labels = self.classes.ids(batch["label"], locations)
        encoded, counts = tokenize_columns(self.tokenizer, batch, self.text_columns, self.max_length, locations)
        columns = {name: encoded[name] for name in self.token_columns}
        return columns | counts | {"label": labels, "targets": [1] * len(labels)}

    def on_prepared(self, features) -> None:
        self.classes = replace(self.classes, names=self.labels or features["label"].names)

    def on_train_data(self, train_set) -> None:
        self.options.set_classes(self.labels, train_set, "label")

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        self.classes.write_to(self.config)
        if self.options.regression:
            self.config.problem_type = "regression"
        return build_model(self.cfg, self.config, AutoModelForSequenceClassification, weights, self.new_head, empty)

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        width = padded_length(lengths, self.cfg.pad_to_multiple_of, self.max_length)
        padding = dict.fromkeys(self.token_columns, 0) | {"input_ids": self.tokenizer.pad_token_id}
        inputs = pad_columns(rows, padding, width)
        dtype = np.int64
        if self.options.regression:  # in float64 only if the model is: some devices lack it
            dtype = np.dtype(self.cfg.dtype.replace("bfloat16", "float32"))
        inputs["labels"] = np.array([row["label"] for row in rows], dtype)
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        weight = self.options.weigh(training, inputs["labels"])
        return Batch(tensors, weight, tokens=sum(lengths), padded_tokens=len(rows) * width)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.options.regression:
            return self._squared_error(model, inputs)
        r_drop_alpha = self.options.r_drop_alpha if model.training else 0.0
        if r_drop_alpha:
            inputs = cross_entropy.twice(inputs)
        labels = inputs["labels"]
        logits = self._logits(model, inputs)
        sums = sums_from_logits(logits, labels, model.training, self.options)
        if r_drop_alpha:
            sums = cross_entropy.r_drop_sums(sums, logits, r_drop_alpha)
        if model.training:
            return sums
        return sums | {"prediction": logits.argmax(-1), "label": labels}

    def _squared_error(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = inputs["labels"]
        output = self._logits(model, inputs)[:, 0]
        if model.training:
            error = cross_entropy.at_least_float32(output) - labels
            return {"loss": error.square().sum()}
        prediction = output.double()
        error = prediction - labels
        sums = {"loss": error.square().sum(), "absolute_error": error.abs().sum()}
        return sums | {"prediction": prediction, "label": labels}

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = inputs["labels"]
        logits = self._logits(model, inputs)
        if self.options.regression:
            error = cross_entropy.at_least_float32(logits[:, 0]) - labels
            return {"loss": error.square(), "weight": torch.ones_like(labels)}
        return row_losses(Scored(logits), labels, self.options)

    def _logits(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        arguments = {name: value for name, value in inputs.items() if name != "labels"}
        return call_on_tokens(model, arguments).logits

    # ---- results -----------------------------------------------------------------------------------------------------

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        if self.options.regression:
            return {"mse": sums["loss"] / weight, "mae": sums["absolute_error"] / weight}
        return {"accuracy": sums["correct"] / weight}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        predictions = rows["prediction"].tolist()
        labels = rows["label"].tolist()
        return compute_metrics(self.metric_names, predictions, labels, self.cfg.trust_remote_code)
