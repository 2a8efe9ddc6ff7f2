"""Statistics of prepared data: tokens, cut rows, examples in both splits.

A fork adds what it wants to know. Tests: tests/config/test_command_line.py and tests/data/test_bad_rows.py.
"""

import numpy as np
import xxhash

MANY = 5_000_000  # rows of training data among which those of the validation data are looked for


def format_stats(stats: dict) -> str:
    """Return how many rows, tokens and targets a split holds."""
    if stats["examples"] is None:
        return "a stream"
    packed = f" packed from {stats['source_rows']:,}" if stats["examples"] != stats["source_rows"] else ""
    return f"{stats['examples']:,} rows{packed}, {stats['tokens']:,} tokens, {stats['targets']:,} targets"


def facts_of_task(task) -> dict:
    """Return what a run is to keep besides its rows: the names of the labels, and a hash of the tokenizer's files."""
    found, tokenizer = {}, getattr(task, "tokenizer", None)
    if labels := getattr(task, "labels", None):
        found["labels"] = list(labels)
    if tokenizer is not None:
        special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
        text = repr((getattr(task, "tokenizer_text", None), special, getattr(tokenizer, "chat_template", None)))
        found["tokenizer_files"] = xxhash.xxh3_128_hexdigest(text.encode())
    return found


def data_notes(splits: dict) -> list[str]:
    """Return what somebody may not expect of the data."""
    found = []
    for name, split in splits.items():
        stats = split.stats
        if stats["examples"] is None:
            continue
        if stats["rows_cut"]:
            share = stats["tokens_cut"] / (stats["tokens"] + stats["tokens_cut"])
            text = f"{stats['rows_cut']:,} rows were longer than max_length and cut: {share:.1%} of the tokens"
            found.append(f"{name} data: {text}")
        if stats["without_target"]:
            text = f"{stats['without_target']:,} of {stats['examples']:,} rows have no target and count for nothing"
            found.append(f"{name} data: {text}")
    if (both := repeated(splits)) and both[0]:
        found.append(
            f"validation data: {both[0]:,} of {both[1]:,} examples that were looked for are in the training data, too"
        )
    return found


def repeated(splits: dict) -> tuple[int, int] | None:
    """Return (how many of the evaluated examples are trained on, too, of how many that were looked for), or None."""
    if not {"train", "validation"} <= splits.keys() or not splits["train"].segments():
        return None
    one, other = (
        np.concatenate(
            [np.load(part.folder / "hashes.npy", mmap_mode="r")[:MANY] for _, _, part in splits[name].segments()]
        )
        for name in ("validation", "train")
    )
    one = one[: MANY // 50]
    return int(np.isin(one, other).sum()), len(one)
