"""Text classification with any encoder: accuracy as a sum, F1 through `evaluate` from predictions collected by id.

A row holds text (or a pair of texts) and a label, a name or a number. Guarded by tests/test_text_classification.py.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from src.config import REPOSITORY, RunConfig, UsageError, say
from src.losses import scores
from src.models import build_model, check_fit, load_config, load_tokenizer, tokenizer_text
from src.tasks import Batch
from src.text import require_text


@dataclass
class Options:
    _argument_group_name = "task text_classification"

    max_length: int | None = say("tokens per row; longer texts are cut (default: what the model can, at most 1024)")
    text_column: str = say("column of the text", "text")
    text_pair_column: str | None = say("column of a second text")
    label_column: str = say("column of the label", "label")
    metrics: list[str] = say(
        "metrics of `evaluate` besides accuracy: f1 is shipped, others come from the Hub; or none", ["f1"]
    )

    def check(self) -> list[str]:
        short = self.max_length is not None and self.max_length < 2
        return [f"max_length is {self.max_length}: a text needs two tokens at least"] if short else []


class Task:
    def __init__(self, run: RunConfig, options: Options):
        self.run, self.options = run, options
        self.labels: list[str] | None = None

    def load(self) -> None:
        self.tokenizer = load_tokenizer(self.run)
        if self.tokenizer is None:
            raise UsageError("text_classification needs --tokenizer_name, or a model folder with a tokenizer")
        self.tokenizer_text = tokenizer_text(self.tokenizer)
        self.config = load_config(self.run, self.tokenizer)
        self.max_length = check_fit(self.run, self.config, self.tokenizer, self.options.max_length)
        known = self.config.id2label or {}
        if self.run.model_name_or_path and not all(str(name).startswith("LABEL_") for name in known.values()):
            self.labels = [known[i] for i in sorted(known)]  # a model that already knows its labels keeps them

    def fingerprint(self) -> str:
        o = self.options
        return repr(
            (self.tokenizer_text, self.max_length, o.text_column, o.text_pair_column, o.label_column, self.labels)
        )

    def prepare(self, examples, split: str, folder: str):
        from datasets import ClassLabel, Features, List, Value

        columns = examples.column_names
        for column in (*self._text_columns(), self.options.label_column):
            if column not in columns:
                raise UsageError(
                    f"{split} data: there is no column `{column}` among {', '.join(columns)}: see --text_column and --label_column"
                )
        feature = examples.features[self.options.label_column]
        names = feature.names if isinstance(feature, ClassLabel) else None
        if self.labels is None:
            values = names or sorted(set(examples.unique(self.options.label_column)), key=lambda v: (str(type(v)), v))
            self.labels = [str(value) for value in values]
        types = {"input_ids": List(Value("int32")), "label": ClassLabel(names=self.labels)}
        columns_out = ("input_ids", "label", "length", "targets", "cut")
        return examples.map(
            partial(self._encode_batch, split, names),
            batched=True,
            with_indices=True,
            remove_columns=columns,
            features=Features({name: types.get(name, Value("int64")) for name in columns_out}),
            cache_file_name=f"{folder}/encoded.arrow",
            load_from_cache_file=False,
            desc=f"tokenising {split}",
        )

    def _text_columns(self) -> list[str]:
        return [name for name in (self.options.text_column, self.options.text_pair_column) if name]

    def _encode_batch(self, split: str, names: list[str] | None, batch: dict, indices: list[int]) -> dict:
        where = [f"{split} data, row {index}" for index in indices]
        texts = [batch[column] for column in self._text_columns()]
        for column, values in zip(self._text_columns(), texts, strict=True):
            require_text(values, column, where)
        number = {label: i for i, label in enumerate(self.labels)}
        labels = [
            names[v] if names and isinstance(v, int) and v >= 0 else str(v) for v in batch[self.options.label_column]
        ]
        for label, place in zip(labels, where, strict=True):
            if label not in number:
                known = ", ".join(number)[:200]
                raise UsageError(f"{place}: the label {label!r} is none of the {len(number)} known: {known}")
        ids = self.tokenizer(*texts, truncation=True, max_length=self.max_length, verbose=False)["input_ids"]
        full = [i for i, row in enumerate(ids) if len(row) == self.max_length]
        cut = [0] * len(ids)
        if full:  # tokenised once more without the limit, only to say how much was cut
            whole = self.tokenizer(*([column[i] for i in full] for column in texts), verbose=False)["input_ids"]
            for i, row in zip(full, whole, strict=True):
                cut[i] = len(row) - self.max_length
        return {
            "input_ids": ids,
            "label": [number[label] for label in labels],
            "length": [len(row) for row in ids],
            "targets": [1] * len(ids),
            "cut": cut,
        }

    def opened(self, dataset) -> None:
        """Take the names of the labels from prepared data."""
        self.labels = self.labels or dataset.features["label"].names

    def build(self, weights: str | None = None) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        self.config.num_labels = len(self.labels)
        self.config.id2label = dict(enumerate(self.labels))
        self.config.label2id = {label: i for i, label in enumerate(self.labels)}
        head = ("classifier", "score", "pooler", "pre_classifier", "classification_head")
        return build_model(self.run, self.config, AutoModelForSequenceClassification, weights, new_weights=head)

    def collate(self, rows: list[dict[str, np.ndarray]]) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        shape = (len(rows), max(1, *lengths))
        ids = np.full(shape, self.tokenizer.pad_token_id or 0, np.int64)
        mask = np.zeros(shape, np.int64)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            ids[i, :n], mask[i, :n] = row["input_ids"], 1
        labels = np.array([row["label"] for row in rows], np.int64)
        inputs = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels),
        }
        return Batch(inputs, len(rows), sum(lengths), ids.size)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        labels = inputs["labels"]
        if model.training:
            return {"loss": F.cross_entropy(logits, labels, reduction="sum")}
        loss, correct = scores(logits, labels)
        return {"loss": loss, "correct": correct, "prediction": logits.argmax(-1), "label": labels}

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {"accuracy": sums["correct"] / weight}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        if self.options.metrics == ["none"]:
            return {}
        import evaluate  # takes seconds, so only here

        results = {}
        for name in self.options.metrics:
            shipped = REPOSITORY / "src" / "metrics" / f"{name}.py"
            try:
                metric = evaluate.load(str(shipped) if shipped.exists() else name)
            except Exception as error:
                raise UsageError(
                    f"metrics: {name} is neither shipped in src/metrics/ nor to be had from the Hub: {error}"
                ) from error
            values = {"predictions": rows["prediction"].tolist(), "references": rows["label"].tolist()}
            averaged = {"average": "macro"} if name in ("f1", "precision", "recall") else {}
            results |= metric.compute(**values, **averaged)
        return {name: float(value) for name, value in results.items()}

    def sample(self, model: torch.nn.Module) -> str | None:
        return None
