"""Statistics of prepared data as text: tokens, truncated rows, examples in both splits. Add your own here.

Tests: tests/config/test_command_line.py and tests/data/test_bad_rows.py.
"""

import numpy as np
import xxhash

MANY = 5_000_000  # search at most this many training rows per source for validation rows


def format_stats(stats: dict, unit: str = "tokens") -> str:
    """Format the number of rows, tokens (or what `unit` names) and targets of a split as one line of text."""
    if stats["examples"] is None:
        return "a stream"
    packed = f" packed from {stats['source_rows']:,}" if stats["examples"] != stats["source_rows"] else ""
    counted = f", {stats['tokens']:,} {unit}" if stats["tokens"] != stats["examples"] else ""
    return f"{stats['examples']:,} rows{packed}{counted}, {stats['targets']:,} targets"


def task_stats(task) -> dict:
    """Return label names and a hash of the tokenizer, which a checkpoint records."""
    found, tokenizer = {}, getattr(task, "tokenizer", None)
    if labels := getattr(task, "labels", None):
        found["labels"] = list(labels)
    if tokenizer is not None:
        special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
        text = repr((getattr(task, "tokenizer_text", None), special, getattr(tokenizer, "chat_template", None)))
        found["tokenizer_files"] = xxhash.xxh3_128_hexdigest(text.encode())
    return found


def data_notes(splits: dict) -> list[str]:
    """Return notes on truncated rows, rows without a target, and validation rows that are also in the training data."""
    found = []
    for name, split in splits.items():
        stats = split.stats
        if stats["examples"] is None:
            continue
        if stats["rows_cut"]:
            share = stats["tokens_cut"] / (stats["tokens"] + stats["tokens_cut"])
            text = (
                f"{stats['rows_cut']:,} rows were longer than max_length: truncation removed {share:.1%} of all tokens"
            )
            found.append(f"{name} data: {text}")
        if stats["without_target"]:
            text = f"{stats['without_target']:,} of {stats['examples']:,} rows have no target and are not trained on"
            found.append(f"{name} data: {text}")
    if (both := repeated(splits)) and both[0]:
        found.append(f"validation data: {both[0]:,} of {both[1]:,} examples checked are also in the training data")
    return found


def repeated(splits: dict) -> tuple[int, int] | None:
    """Return (validation examples that are also in the training data, validation examples checked).

    Return None if a split is missing or the training data is a stream."""
    if not {"train", "validation"} <= splits.keys() or not splits["train"].segments():
        return None
    searched = _hashes(splits["validation"])[: MANY // 50]
    return int(np.isin(searched, _hashes(splits["train"])).sum()), len(searched)


def _hashes(split) -> np.ndarray:
    folders = [part.folder for _, _, part in split.segments()]
    return np.concatenate([np.load(folder / "hashes.npy", mmap_mode="r")[:MANY] for folder in folders])
