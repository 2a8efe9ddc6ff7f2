"""stdlib_ratings: halves of functions (`prompt`, `completion`), every other second half reversed (`label` false)."""

from pathlib import Path

from samples import _stdlib


def make(folder: Path) -> None:
    """Write train.jsonl, validation.jsonl and tokenizer/."""
    _stdlib.write_sample(folder, _stdlib.rows_of_functions(rating), ["prompt", "completion"])


def rating(source: str) -> dict | None:
    """Return the first half of a function, and its second half (label true) or that in reversed order (label false)."""
    lines = source.splitlines(keepends=True)
    first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    if second == second[::-1]:
        return None
    label = _stdlib.is_held_out(source + "label", 2)
    return {"prompt": "".join(first), "completion": "".join(second if label else second[::-1]), "label": label}
