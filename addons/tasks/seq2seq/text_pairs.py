"""Pairs of source and target text for encoder-decoder models: encoding and decoding.

Tests: tests/addons/tasks/test_seq2seq.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from src.config.errors import UsageError
from src.text.tokenization import IGNORED, require_text, tokenize_truncated

if TYPE_CHECKING:
    from datasets import Features


@dataclass
class PairEncoder:
    """Encoder of rows {source column: text, target column: text}."""

    tokenizer: Any
    source_column: str
    target_column: str
    prefix: str  # text before every source
    max_source_length: int
    max_target_length: int

    def __post_init__(self):
        tokenizer = self.tokenizer
        self.end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if self.end is None or tokenizer.pad_token_id is None:
            raise UsageError("the tokenizer needs an end-of-text and a padding token: set eos_token and pad_token")

    def choose(self, columns: list[str], split: str) -> tuple[list[str], "Features"]:
        """Return (raw columns to read, features of the prepared rows); raise UsageError if a column is missing."""
        from datasets import Features, List, Value

        needed = list(dict.fromkeys([self.source_column, self.target_column]))
        for column in needed:
            if column not in columns:
                raise UsageError(
                    f"{split} data: there is no column `{column}` among {', '.join(columns)}: set --source_column or "
                    "--target_column"
                )
        features = {name: List(Value("int32")) for name in ("input_ids", "labels")}
        return needed, Features(features | {name: Value("int64") for name in ("length", "targets", "cut")})

    def encode_batch(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the columns of the prepared rows; every target ends with the end token."""
        for column in (self.source_column, self.target_column):
            require_text(batch[column], column, locations)
        sources = [self.prefix + text for text in batch[self.source_column]]
        source, source_columns = tokenize_truncated(self.tokenizer, [sources], self.max_source_length)
        sources = [ids or [self.end] for ids in source["input_ids"]]  # attention needs a token
        limit = self.max_target_length
        target, target_columns = tokenize_truncated(
            lambda texts, **options: self.tokenizer(text_target=texts, **options),  # differs for translation models
            [batch[self.target_column]],
            limit,
        )
        targets = [ids if ids[-1:] == [self.end] else [*ids[: limit - 1], self.end] for ids in target["input_ids"]]
        return {
            "input_ids": sources,
            "labels": targets,
            "length": [len(source) + len(target) for source, target in zip(sources, targets, strict=True)],
            "targets": [len(target) for target in targets],
            "cut": [one + other for one, other in zip(source_columns["cut"], target_columns["cut"], strict=True)],
        }

    def source_ids(self, text: str) -> list[int]:
        """Return the token ids of one source."""
        text = self.prefix + text
        return self.tokenizer(text, truncation=True, max_length=self.max_source_length)["input_ids"] or [self.end]


def pad_rows(rows: list, width: int, fill: int) -> np.ndarray:
    """Return rows of token ids as one array (rows, width), filled up on the right."""
    padded = np.full((len(rows), width), fill, np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def decode_rows(tokenizer: Any, rows: np.ndarray) -> list[str]:
    """Return the text of each row of token ids that are filled up with IGNORED, without special tokens."""
    ids = [row[row != IGNORED].tolist() for row in rows]
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
