"""Pretokenized rows: check their token ids and remove padding.

Tests: tests/tasks/test_causal_lm.py and tests/config/test_bad_input.py.
"""

from src.config.errors import UsageError
from src.text.tokenization import IGNORED

OPTIONAL_COLUMNS = ("labels", "attention_mask")  # beside `input_ids`


def check_ids(ids, labels, mask, vocab_size: int, location) -> tuple[list[int], list[int] | None]:
    """Return ids and labels of a row without padding. Raise UsageError for invalid types, lengths, ids or masks."""
    _check_integers("input_ids", ids, location)
    if labels is not None:
        _check_integers("labels", labels, location)
        if len(labels) != len(ids):
            raise UsageError(
                f"{location}: {len(labels)} labels for {len(ids)} input_ids: give one label per token (-100: ignored)"
            )
    if mask is not None:
        kept = _unmasked(mask, len(ids), location)
        ids = ids[kept]
        labels = None if labels is None else labels[kept]
    _check_range("input_ids", ids, vocab_size, location)
    if labels is not None:
        _check_range("labels", [label for label in labels if label != IGNORED], vocab_size, location)
    return ids, labels


def _check_integers(name: str, values, location) -> None:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise UsageError(f"{location}: `{name}` must be a list of integers")


def _check_range(name: str, values: list[int], vocab_size: int, location) -> None:
    for value in (min(values, default=0), max(values, default=0)):
        if not 0 <= value < vocab_size:
            raise UsageError(
                f"{location}: `{name}` holds {value}, outside the vocabulary: ids must be 0 to {vocab_size - 1}"
            )


def _unmasked(mask, length: int, location) -> slice:
    """Return the slice of a row that its attention_mask keeps. Raise UsageError for zeros between ones."""
    if not isinstance(mask, list) or not all(value in (0, 1) for value in mask):
        raise UsageError(f"{location}: `attention_mask` must be a list of 0 and 1")
    if len(mask) != length:
        raise UsageError(f"{location}: `attention_mask` has {len(mask)} values for {length} input_ids")
    if 1 not in mask:
        return slice(0, 0)
    first = mask.index(1)
    end = len(mask) - mask[::-1].index(1)
    if 0 in mask[first:end]:
        raise UsageError(
            f"{location}: `attention_mask` has zeros between ones: mask only padding, at the start or the end"
        )
    return slice(first, end)
