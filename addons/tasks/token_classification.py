"""Token classification with any encoder: one tag per word, such as named entities or parts of speech.

A row is {"tokens": ["EU", "rejects", …], "tags": ["B-ORG", "O", …]}; tags are names or ids (ClassLabel). The first
token of a word carries its tag, and the weight is the number of tagged words. Shows: a weight that is not the number of
rows, and an F1 made of sums. Tests: tests/addons/tasks/test_token_classification.py.
"""

import bisect
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine import task as base
from engine.config.errors import UsageError, warn_once
from engine.config.option import option
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import load_text_encoder
from engine.models.packed_attention import call_on_tokens
from engine.rows.labels import Labels, require_columns
from engine.rows.tokenize_and_pack import (
    IGNORED,
    pad_columns,
    padded_length,
    require_text,
    tokenize_truncated,
    warn_of_special_tokens,
)
from engine.task import Batch
from src.losses.chunked_cross_entropy import Scored, row_losses, sums_from_logits
from src.losses.cross_entropy import ClassCrossEntropy

OUTSIDE = "O"  # the tag of words outside all entities; F1 leaves it out


@dataclass
class Options(ClassCrossEntropy):
    max_length: int | None = option(
        "tokens per row; longer rows are truncated (default: the model's limit, at most 1024)",
        min=2,
        from_checkpoint=True,
    )


class Task(base.Task):
    parts = ("tokens", "tags")
    can_shorten = True
    new_head = ("classifier", "score")  # modules that may be new in a pretrained model

    @property
    def labels(self) -> Any:
        """The tags in the order of their ids; None until the data or the model gives them."""
        return self.tags.names

    def load(self) -> None:
        encoder = load_text_encoder(self.cfg, self.options.max_length)
        self.tokenizer, self.tokenizer_text, self.config, self.max_length = encoder
        if not self.tokenizer.is_fast:
            raise UsageError("token_classification needs a fast tokenizer, which reports the characters of each token")
        self.tags = Labels("tags")
        if self.cfg.model_name_or_path:
            self.tags = self.tags.of_model(self.config, "TokenClassification")

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        return repr((self.tokenizer_text, self.max_length, self.labels))

    def inspect_columns(self, examples, split: str):
        from datasets import ClassLabel, Features, List, Value

        needed = require_columns(examples, [*self.parts], split)
        feature = getattr(examples.features.get("tags"), "feature", None)
        self.tags = replace(self.tags, names_of_column=getattr(feature, "names", None))
        if self.labels is None:
            values = examples.unique("tags", in_lists=True)
            self.tags = replace(self.tags, names=self.tags.of_data(self.cfg, values, split))
        tag = ClassLabel(names=self.labels)  # IGNORED stands beside the ids
        counts = {name: Value("int64") for name in ("length", "targets", "cut")}
        return needed, Features({"input_ids": List(Value("int32")), "labels": List(tag)} | counts)

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        words, tags = batch["tokens"], batch["tags"]
        for location, row, names in zip(locations, words, tags, strict=True):
            for name, values in (("tokens", row), ("tags", names)):
                if not isinstance(values, list):
                    holds = "nothing" if values is None else type(values).__name__
                    raise UsageError(f"{location}: `{name}` holds {holds}: give a list for each row")
            if len(row) != len(names):
                raise UsageError(f"{location}: {len(row)} tokens with {len(names)} tags: give one tag per token")
            require_text(row, "tokens", [location] * len(row))
        # Joined by spaces, the words look like the text that a pretrained model has seen: "EU rejects" and not "EUrejects".
        texts = [" ".join(row) for row in words]
        encoded, columns = tokenize_truncated(self.tokenizer, [texts], self.max_length, return_offsets_mapping=True)
        labels = []
        rows = zip(locations, words, tags, encoded["offset_mapping"], columns["cut"], strict=True)
        for location, row, names, spans, cut in rows:
            warn_of_special_tokens(self.tokenizer, row, "tokens", [location] * len(row))
            ids = self.tags.ids(names, [location] * len(names))
            begins = word_of_each_token(spans, row)
            self._warn_of_lost_word(location, row, names, begins, cut)
            labels.append([IGNORED if word is None else ids[word] for word in begins])
        targets = [sum(label != IGNORED for label in row) for row in labels]
        return columns | {"input_ids": encoded["input_ids"], "labels": labels, "targets": targets}

    def _warn_of_lost_word(self, location, words: list[str], tags: list, begins: list[int | None], cut: int) -> None:
        """Warn of the first word that no token begins, such as one without a visible character: its tag is lost."""
        begun = {word for word in begins if word is not None}
        end = max(begun, default=0) if cut else len(words)
        lost = next((word for word in range(end) if word not in begun), None)
        if lost is not None:
            warn_once(
                f"{location}: no token begins with the word {words[lost]!r}, so its tag {tags[lost]!r} is not trained on "
                "(more such words are not named)",
                kind="no token begins with a word",
            )

    def on_prepared(self, features) -> None:
        """Store the tags of the prepared data, unless they are known already."""
        self.tags = replace(self.tags, names=self.labels or features["labels"].feature.names)

    def on_train_data(self, train_set) -> None:
        self.options.set_classes(self.labels, train_set, "labels")

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForTokenClassification

        self.tags.write_to(self.config)
        return build_model(self.cfg, self.config, AutoModelForTokenClassification, weights, self.new_head, empty)

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        width = padded_length(lengths, self.cfg.pad_to_multiple_of, self.max_length)
        inputs = pad_columns(rows, {"input_ids": self.tokenizer.pad_token_id, "labels": IGNORED}, width)
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        weight = self.options.weigh(training, inputs["labels"])
        return Batch(tensors, weight, tokens=sum(lengths), padded_tokens=len(rows) * width)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels, logits = inputs["labels"].flatten(), self._logits(model, inputs)
        sums = sums_from_logits(logits, labels, model.training, self.options)
        if model.training:
            return sums
        classes = torch.arange(logits.shape[1], device=logits.device)
        true = labels[:, None] == classes
        predicted = (logits.argmax(-1)[:, None] == classes) & (labels != IGNORED)[:, None]
        counts = {"true": true, "predicted": predicted, "both": true & predicted}
        return sums | {f"{name}_{i}": n for name, hits in counts.items() for i, n in enumerate(hits.sum(0).unbind())}

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return row_losses(Scored(self._logits(model, inputs)), inputs["labels"], self.options)

    def _logits(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        arguments = {name: value for name, value in inputs.items() if name != "labels"}
        return call_on_tokens(model, arguments).logits.flatten(0, 1)

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        tags = [i for i, label in enumerate(self.labels) if label != OUTSIDE]
        counts = np.array([[sums[f"{name}_{i}"] for i in tags] for name in ("both", "true", "predicted")])
        both, given = counts[0], counts[1] + counts[2]
        present = given > 0  # macro F1 is over the tags that occur in the data or in the predictions
        numbers = {"accuracy": sums["correct"] / weight}
        if present.any():
            numbers["f1"] = float((2 * both[present] / given[present]).mean())
            numbers["micro_f1"] = float(2 * both.sum() / given.sum())
        return numbers


def word_of_each_token(spans: list[tuple[int, int]], words: list[str]) -> list[int | None]:
    """Return the index of the word that each token begins, None for further tokens of a word and special tokens.

    `spans` are the (begin, end) characters of the tokens in the words joined by single spaces."""
    starts = [0, *itertools.accumulate(len(word) + 1 for word in words)]
    seen, begins = -1, []
    for begin, end in spans:
        # A token may begin with the space before its word, so its last character decides.
        word = bisect.bisect_right(starts, end - 1) - 1 if end > begin else -1
        begins.append(word if word > seen else None)
        seen = max(seen, word)
    return begins
