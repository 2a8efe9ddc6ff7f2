"""stdlib_code: the modules of Python's standard library, column `text`."""

from pathlib import Path

from samples import _stdlib


def make(folder: Path) -> None:
    """Write train.jsonl, validation.jsonl and tokenizer/."""
    _stdlib.write_sample(folder, code_rows(), ["text"])


def code_rows() -> dict[str, list[dict]]:
    """Return one row per module: about 1 in 20 for validation, without copies of training modules."""
    rows = [{"path": path, "text": text} for path, text in _stdlib.module_sources() if text.strip()]
    train = [row for row in rows if not _stdlib.is_held_out(row["path"], 20)]
    known = {row["text"] for row in train}
    held_out = [row for row in rows if _stdlib.is_held_out(row["path"], 20) and row["text"] not in known]
    return {"train": train, "validation": held_out}
