"""stdlib_preferences: halves of functions (`prompt`, `chosen`), and the second one reversed (`rejected`)."""

from pathlib import Path

from samples import _stdlib


def make(folder: Path) -> None:
    """Write train.jsonl, validation.jsonl and tokenizer/."""
    _stdlib.write_sample(folder, _stdlib.rows_of_functions(preference), ["prompt", "chosen"])


def preference(source: str) -> dict | None:
    """Return the first half of a function, its second half (chosen), and that in reversed order (rejected)."""
    lines = source.splitlines(keepends=True)
    first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    chosen, rejected = "".join(second), "".join(reversed(second))
    return {"prompt": "".join(first), "chosen": chosen, "rejected": rejected} if chosen != rejected else None
