"""Python's standard library as data: its modules and functions, their split, and the files of a sample of texts.

Tests: tests/samples/test_stdlib.py.
"""

import ast
import hashlib
import json
import os
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

VOCABULARY = 2048
# fmt: off
SKIPPED_FOLDERS = {
    "encodings", "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__",
    "pydoc_data",
}
PACKAGES = [
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "distutils", "email", "encodings",
    "ensurepip", "html", "http", "idlelib", "importlib", "json", "logging", "multiprocessing", "re", "sqlite3",
    "tkinter", "tomllib", "turtledemo", "unittest", "urllib", "venv", "wsgiref", "xml", "xmlrpc", "zoneinfo",
]
# fmt: on


def write_sample(folder: Path, rows: dict[str, list[dict]], columns: list[str]) -> None:
    """Write the rows {split: rows}, and a tokenizer trained on these columns of the training rows."""
    for split, examples in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples), encoding="utf-8")
    texts = [row[column] for row in rows["train"] for column in columns]
    train_tokenizer([text if isinstance(text, str) else " ".join(text) for text in texts], folder / "tokenizer")


def module_sources() -> list[tuple[str, str]]:
    """Return (path in the standard library, source) of every module that is valid UTF-8, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts[:-1]):
            continue
        try:
            sources.append((relative.as_posix(), path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, OSError):
            continue
    return sources


def function_rows() -> dict[str, list[dict]]:
    """Return one row per function, labeled with its package: about 1 in 10 for validation."""
    rows = {"train": [], "validation": []}
    for path, text in module_sources():
        package = path.split("/")[0]
        if "/" in path and package in PACKAGES:
            for source in functions(text):
                split = "validation" if is_held_out(source, 10) else "train"
                rows[split].append({"text": source, "label": package, "path": path})
    seen = {row["label"] for row in rows["train"]}
    rows["validation"] = [row for row in rows["validation"] if row["label"] in seen]
    return rows


def rows_of_functions(make: Callable[[str], dict | None]) -> dict[str, list[dict]]:
    """Return the row that `make(source)` returns for each function, if it returns one; split like the functions."""
    return {
        split: [made | {"path": row["path"]} for row in rows if (made := make(row["text"]))]
        for split, rows in function_rows().items()
    }


def functions(text: str) -> Iterator[str]:
    """Yield the source of each function of 4 to 61 lines."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and 3 <= (node.end_lineno or 0) - node.lineno <= 60:
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def is_held_out(key: str, one_in: int) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % one_in == 0


def train_tokenizer(texts: list[str], target: Path) -> None:
    """Train a byte-level BPE tokenizer and save it as transformers expects it."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    model = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|pad|>"]
    model.train_from_iterator(
        texts, vocab_size=VOCABULARY, min_frequency=2, special_tokens=special, show_progress=False
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(model.to_str()), eos_token=special[0], pad_token=special[1]
    )
    fast.save_pretrained(target)
