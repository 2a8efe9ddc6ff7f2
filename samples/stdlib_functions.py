"""stdlib_functions: functions of Python's standard library (`text`), labeled with their package (`label`)."""

from pathlib import Path

from samples import _stdlib


def make(folder: Path) -> None:
    """Write train.jsonl, validation.jsonl and tokenizer/."""
    _stdlib.write_sample(folder, _stdlib.function_rows(), ["text"])
