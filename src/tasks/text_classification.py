"""Text classification with any encoder, with accuracy and F1.

A row holds text (or a pair of texts) and a label, a name or a number. Tests: tests/tasks/test_text_classification.py.
"""

from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from src.config.errors import UsageError
from src.config.paths import REPOSITORY
from src.config.schema import RunConfig, option
from src.models.loading import build_model, check_fit, load_config, load_tokenizer, tokenizer_fingerprint
from src.models.losses import scores
from src.tasks import Batch, width
from src.text.tokenization import masks_known, require_text

METRICS = REPOSITORY / "src" / "metrics"  # a fork adds files here


def all_shipped(names) -> bool:
    return isinstance(names, list) and set(names) <= {"none", *shipped()}


def shipped() -> dict[str, Path]:
    """Return the files of src/metrics/ by name; a name is looked up, never made a path."""
    return {path.stem: path for path in METRICS.glob("*.py")}


@dataclass
class Options:
    _argument_group_name = "task text_classification"

    max_length: int | None = option(
        "tokens per row; longer texts are cut (default: what the model can, at most 1024)", from_checkpoint=True
    )
    text_column: str = option("column of the text", "text", from_checkpoint=True)
    text_pair_column: str | None = option("column of a second text", from_checkpoint=True)
    label_column: str = option("column of the label", "label", from_checkpoint=True)
    metrics: list[str] = option(
        "metrics of `evaluate` besides accuracy: those of src/metrics/, such as f1; others, of the Hub or by the path of a script, "
        "are code and need trust_remote_code; or none",
        ["f1"],
        may_change_on_resume=True,
        from_checkpoint=all_shipped,
    )

    def check(self) -> list[str]:
        short = self.max_length is not None and self.max_length < 2
        return [f"max_length is {self.max_length}: a text needs two tokens at least"] if short else []


class Task:
    def __init__(self, cfg: RunConfig, options: Options):
        self.cfg, self.options = cfg, options
        self.labels: list[str] | None = None

    def load(self) -> None:
        from transformers import AutoModelForSequenceClassification

        self.tokenizer = load_tokenizer(self.cfg)
        if self.tokenizer is None:
            raise UsageError("text_classification needs --tokenizer_name, or a model folder with a tokenizer")
        self.tokenizer_text = tokenizer_fingerprint(self.tokenizer)
        self.config = load_config(self.cfg, self.tokenizer)
        self.max_length = check_fit(
            self.cfg, self.config, self.tokenizer, self.options.max_length, AutoModelForSequenceClassification
        )
        if self.tokenizer.pad_token_id is None:
            raise UsageError(
                "the tokenizer has no padding token: save one with `tokenizer.pad_token = tokenizer.eos_token`"
            )
        if self.config.pad_token_id is None:
            self.config.pad_token_id = self.tokenizer.pad_token_id  # a decoder reads its answer at the last other token
        for name in self.options.metrics:
            if name != "none":
                load_metric(name, self.cfg.trust_remote_code)  # refused now rather than at the first evaluation
        # Which text of a pair a token belongs to, for a model that was made to know.
        typed = "token_type_ids" in self.tokenizer.model_input_names and getattr(self.config, "type_vocab_size", 0) > 1
        self.columns = ["input_ids", *(["token_type_ids"] if typed and self.options.text_pair_column else [])]
        known = self.config.id2label or {}
        headed = any("SequenceClassification" in name for name in self.config.architectures or [])
        named = not all(str(name).startswith("LABEL_") for name in known.values())
        if self.cfg.model_name_or_path and (named or headed):
            self.labels = [known[i] for i in sorted(known)]  # a model that already knows its labels keeps them

    def fingerprint(self) -> str:
        o = self.options
        return repr(
            (self.tokenizer_text, self.max_length, self.columns, self._text_columns(), o.label_column, self.labels)
        )

    def inspect_columns(self, examples, split: str, whole: bool = True):
        from datasets import ClassLabel, Features, List, Value

        columns = (*self._text_columns(), self.options.label_column)
        for column in columns:
            if column not in examples.column_names:
                raise UsageError(
                    f"{split} data: there is no column `{column}` among {', '.join(examples.column_names)}: see --text_column "
                    "and --label_column"
                )
        feature = examples.features[self.options.label_column]
        kind = str(getattr(feature, "dtype", "lists or objects"))
        if not any(known in kind for known in ("int", "string", "bool")):
            raise UsageError(
                f"{split} data: `{self.options.label_column}` holds {kind}: a label is a name or an integer"
            )
        self.names = feature.names if isinstance(feature, ClassLabel) else None
        if self.labels is None and self.names is None and not whole:
            raise UsageError(
                f"{split} data: the labels of a stream are not known before its end: give data whose "
                f"`{self.options.label_column}` is a ClassLabel, or a model that knows them"
            )
        if self.labels is None:
            found = set() if not whole else set(examples.unique(self.options.label_column)) - {None}
            values = self.names or sorted(found, key=lambda v: (str(type(v)), v))
            self.labels = [str(value) for value in values]
            if len(self.labels) < 2:
                raise UsageError(
                    f"{split} data: `{self.options.label_column}` is {', '.join(self.labels) or 'empty'} in every row: give "
                    "data with two labels or more"
                )
        types = dict.fromkeys(self.columns, List(Value("int32"))) | {"label": ClassLabel(names=self.labels)}
        names = (*self.columns, "label", "length", "targets", "cut")
        return list(dict.fromkeys(columns)), Features({name: types.get(name, Value("int64")) for name in names})

    def _text_columns(self) -> list[str]:
        return [name for name in (self.options.text_column, self.options.text_pair_column) if name]

    def encode(self, batch: dict[str, list], places) -> dict[str, list]:
        names, texts = self.names, [batch[column] for column in self._text_columns()]
        for column, values in zip(self._text_columns(), texts, strict=True):
            require_text(values, column, places)
        number = {label: i for i, label in enumerate(self.labels)}
        labels = [
            names[v] if names and isinstance(v, int) and v >= 0 else str(v) for v in batch[self.options.label_column]
        ]
        for value, label, place in zip(batch[self.options.label_column], labels, places, strict=True):
            if value is None:
                raise UsageError(f"{place}: `{self.options.label_column}` holds nothing: every row needs a label")
            if label not in number:
                known = ", ".join(number)[:200]
                raise UsageError(f"{place}: the label {label!r} is none of the {len(number)} known: {known}")
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.max_length, verbose=False)
        ids = encoded["input_ids"]
        full = [i for i, row in enumerate(ids) if len(row) == self.max_length]
        cut = [0] * len(ids)
        if full:  # tokenised once more without the limit, only to say how much was cut
            whole = self.tokenizer(*([column[i] for i in full] for column in texts), verbose=False)["input_ids"]
            for i, row in zip(full, whole, strict=True):
                cut[i] = len(row) - self.max_length
        return {name: encoded[name] for name in self.columns} | {
            "label": [number[label] for label in labels],
            "length": [len(row) for row in ids],
            "targets": [1] * len(ids),
            "cut": cut,
        }

    def on_prepared(self, features) -> None:
        """Take the names of the labels from prepared data."""
        self.labels = self.labels or features["label"].names

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        self.config.num_labels = len(self.labels)
        self.config.id2label = dict(enumerate(self.labels))
        self.config.label2id = {label: i for i, label in enumerate(self.labels)}
        head = ("classifier", "score", "pooler", "pre_classifier", "classification_head")
        return build_model(self.cfg, self.config, AutoModelForSequenceClassification, weights, head, empty)

    def collate(self, rows: list[dict[str, np.ndarray]]) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        shape = (len(rows), width(lengths, self.cfg.pad_to_multiple_of, self.max_length))
        inputs = {name: np.zeros(shape, np.int64) for name in (*self.columns, "attention_mask")}
        inputs["input_ids"] += self.tokenizer.pad_token_id
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            inputs["attention_mask"][i, :n] = 1
            for name in self.columns:
                inputs[name][i, :n] = row[name]
        if min(lengths) == shape[1]:  # without padding there is no mask, and attention takes its fast path
            del inputs["attention_mask"]
        inputs["labels"] = np.array([row["label"] for row in rows], np.int64)
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        return Batch(tensors, len(rows), sum(lengths), shape[0] * shape[1])

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with masks_known(packed=False):
            logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
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
        results = {}
        for name in self.options.metrics:
            values = {"predictions": rows["prediction"].tolist(), "references": rows["label"].tolist()}
            averaged = {"average": "macro"} if name in ("f1", "precision", "recall") else {}
            results |= load_metric(name, self.cfg.trust_remote_code).compute(**values, **averaged)
        return {name: float(value) for name, value in results.items()}

    def sample(self, model: torch.nn.Module) -> str | None:
        return None


def load_metric(name: str, trusted: bool):
    """Return a metric of `evaluate`: one that is shipped, or, where the user allows it, a script of the Hub or of this machine."""
    if name in shipped():
        return _own_metric(name)
    if not trusted:
        raise UsageError(
            f"metrics: {name} is not in src/metrics/ ({', '.join(sorted(shipped()))}), so it is a script that would be run: "
            "give --trust_remote_code true if you trust it"
        )
    local = Path(name, f"{name}.py")
    if Path(name).name == name and local.exists():
        raise UsageError(f"metrics: {name} could mean the Hub's or {local} in this folder: give ./{local} for that one")
    import evaluate  # takes seconds, so only here

    try:
        return evaluate.load(name)
    except Exception as error:
        raise UsageError(f"metrics: {name} could not be loaded: {error}") from error


def _own_metric(name: str):
    """Return a shipped metric. Not by evaluate.load, which runs a copy of the file in a cache that others may write to."""
    import evaluate

    spec = spec_from_file_location(f"src.metrics.{name}", shipped()[name])
    spec.loader.exec_module(module := module_from_spec(spec))
    found = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, evaluate.Metric)]
    return next(kind for kind in found if kind.__module__ == module.__name__)()
