"""Text classification with any encoder: cross-entropy, accuracy, and `evaluate` metrics such as F1.

A row is {"text": "…", "label": "spam"}. The label is a name, an integer or a bool. With --text_pair_column a row has a
second text. Tests: tests/tasks/test_text_classification.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from src.config.errors import UsageError
from src.config.fields import option
from src.config.schema import RunConfig
from src.models.build_model import build_model
from src.models.load_config import check_fit, load_config
from src.models.load_metric import compute_metrics, load_metric, shipped_metrics
from src.models.load_tokenizer import load_tokenizer, tokenizer_fingerprint
from src.models.losses import sums_from_logits
from src.runtime.private_apis import known_masks
from src.tasks import base
from src.tasks.base import Batch, padded_length
from src.text.labels import class_names, label_ids, labels_of_model, labels_of_rows
from src.text.tokenization import require_text

# Modules that a pretrained encoder lacks.
NEW_HEAD = ("classifier", "score", "pooler", "pre_classifier", "classification_head")


def all_shipped(names) -> bool:
    return isinstance(names, list) and set(names) <= {"none", *shipped_metrics()}


@dataclass
class Options:
    needs_model = True  # model_name_or_path or model_config

    max_length: int | None = option(
        "tokens per row; longer texts are truncated (default: the model's limit, at most 1024)",
        min=2,
        from_checkpoint=True,
    )
    text_column: str = option("column of the text", "text", from_checkpoint=True)
    text_pair_column: str | None = option("column of a second text", from_checkpoint=True)
    label_column: str = option("column of the label", "label", from_checkpoint=True)
    metrics: list[str] = option(
        "metrics besides accuracy: files of src/metrics/, such as f1; Hub names or script paths (code: needs "
        "trust_remote_code); or none",
        ["f1"],
        may_change_on_resume=True,
        from_checkpoint=all_shipped,
    )


class Task(base.Task):
    def __init__(self, cfg: RunConfig, options: Options):
        super().__init__(cfg, options)
        self.labels: Any = None  # names in the order of their ids; None until the data or the model gives them

    def load(self) -> None:
        from transformers import AutoModelForSequenceClassification

        self.tokenizer: Any = load_tokenizer(self.cfg)
        if self.tokenizer is None:
            raise UsageError("text_classification needs --tokenizer_name, or a model folder with a tokenizer")
        self.tokenizer_text = tokenizer_fingerprint(self.tokenizer)
        self.config = load_config(self.cfg, self.tokenizer)
        self.max_length = check_fit(
            self.cfg, self.config, self.tokenizer, self.options.max_length, AutoModelForSequenceClassification
        )
        if self.tokenizer.pad_token_id is None:
            raise UsageError(
                "the tokenizer has no padding token: set `tokenizer.pad_token = tokenizer.eos_token` and save it"
            )
        if self.config.pad_token_id is None:
            self.config.pad_token_id = self.tokenizer.pad_token_id  # a decoder classifies at the last real token
        for name in self._metric_names():
            load_metric(name, self.cfg.trust_remote_code)  # fail here, not at the first evaluation
        self.text_columns = [name for name in (self.options.text_column, self.options.text_pair_column) if name]
        self.token_columns = ["input_ids"]
        has_types = (
            "token_type_ids" in self.tokenizer.model_input_names and getattr(self.config, "type_vocab_size", 0) > 1
        )
        if has_types and self.options.text_pair_column:
            self.token_columns.append("token_type_ids")  # 0 or 1: the text that a token belongs to
        if self.cfg.model_name_or_path:
            self.labels = labels_of_model(self.config)

    def _metric_names(self) -> list[str]:
        return [name for name in self.options.metrics if name != "none"]

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        columns = (self.token_columns, self.text_columns, self.options.label_column)
        return repr((self.tokenizer_text, self.max_length, *columns, self.labels))

    def inspect_columns(self, examples, split: str, whole: bool = True):
        from datasets import ClassLabel, Features, List, Value

        label_column = self.options.label_column
        needed = list(dict.fromkeys([*self.text_columns, label_column]))
        for column in needed:
            if column not in examples.column_names:
                raise UsageError(
                    f"{split} data: there is no column `{column}` among {', '.join(examples.column_names)}: set "
                    "--text_column or --label_column"
                )
        self.class_names: Any = class_names(examples, label_column, split)
        if self.labels is None:
            if self.class_names is None and not whole:
                raise UsageError(
                    f"{split} data: the labels of a stream are not known before its end: give data whose "
                    f"`{label_column}` is a ClassLabel, or a classifier whose config has the labels"
                )
            self.labels = self.class_names or labels_of_rows(examples, label_column)
            if len(self.labels) < 2:
                raise UsageError(
                    f"{split} data: `{label_column}` is {', '.join(self.labels) or 'empty'} in every row: give data "
                    "with two labels or more"
                )
        features = {name: List(Value("int32")) for name in self.token_columns}
        features["label"] = ClassLabel(names=self.labels)
        features |= {name: Value("int64") for name in ("length", "targets", "cut")}
        return needed, Features(features)

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        texts = [batch[column] for column in self.text_columns]
        for column, values in zip(self.text_columns, texts, strict=True):
            require_text(values, column, locations)
        labels = batch[self.options.label_column]
        labels = label_ids(labels, self.labels, self.class_names, self.options.label_column, locations)
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.max_length, verbose=False)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        truncated = [0] * len(lengths)
        full = [i for i, length in enumerate(lengths) if length == self.max_length]
        if full:  # tokenized again without the limit, only to report how much was truncated
            whole = self.tokenizer(*([column[i] for i in full] for column in texts), verbose=False)["input_ids"]
            for i, ids in zip(full, whole, strict=True):
                truncated[i] = len(ids) - self.max_length
        columns = {name: encoded[name] for name in self.token_columns}
        return columns | {"label": labels, "length": lengths, "targets": [1] * len(lengths), "cut": truncated}

    def on_prepared(self, features) -> None:
        """Store the label names of the prepared data, unless the labels are known already."""
        self.labels = self.labels or features["label"].names

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        self.config.num_labels = len(self.labels)
        self.config.id2label = dict(enumerate(self.labels))
        self.config.label2id = {label: i for i, label in enumerate(self.labels)}
        return build_model(self.cfg, self.config, AutoModelForSequenceClassification, weights, NEW_HEAD, empty)

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        width = padded_length(lengths, self.cfg.pad_to_multiple_of, self.max_length)
        inputs = {name: np.zeros((len(rows), width), np.int64) for name in (*self.token_columns, "attention_mask")}
        inputs["input_ids"] += self.tokenizer.pad_token_id
        for i, row in enumerate(rows):
            inputs["attention_mask"][i, : lengths[i]] = 1
            for name in self.token_columns:
                inputs[name][i, : lengths[i]] = row[name]
        if min(lengths) == width:  # nothing is padded: without a mask attention uses its fast kernels
            del inputs["attention_mask"]
        inputs["labels"] = np.array([row["label"] for row in rows], np.int64)
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        return Batch(tensors, weight=len(rows), tokens=sum(lengths), padded_tokens=len(rows) * width)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = inputs["labels"]
        with known_masks(packed=False):
            logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        sums = sums_from_logits(logits, labels, model.training)
        if model.training:
            return sums
        return sums | {"prediction": logits.argmax(-1), "label": labels}

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {"accuracy": sums["correct"] / weight}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        predictions, labels = rows["prediction"].tolist(), rows["label"].tolist()
        return compute_metrics(self._metric_names(), predictions, labels, self.cfg.trust_remote_code)
