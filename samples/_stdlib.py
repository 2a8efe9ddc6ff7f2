"""Sample datasets built from Python's standard library or drawn, so that training needs no network.

Delete this file and its uses when you have your own data. Tests: tests/download/test_sample_datasets.py.
"""

import ast
import hashlib
import io
import json
import keyword
import os
import re
import shutil
import sysconfig
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from filelock import FileLock

from src.download import drawn_images

TEXTS = ("stdlib_code", "stdlib_functions", "stdlib_docstrings", "stdlib_tokens", "stdlib_preferences")
SAMPLES = (*TEXTS, *drawn_images.SAMPLES)
VOCABULARY = 2048
VERSION = "1"  # increase it if the code below makes other rows
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


def sample_folder(name: str, cache: Path) -> str | None:
    """Return the folder of the sample `name` in `cache`, built on first use; None if there is no such sample.

    One process builds it while the others wait for a file lock. The DONE marker is written last. The folder name holds
    the version, so two checkouts that share a cache do not delete each other's rows.
    """
    if name not in SAMPLES:
        return None
    target = cache.absolute() / "samples" / f"{name}-{VERSION}"
    marker = target / "DONE"
    if not marker.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not marker.exists():
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                print(f"building the sample dataset {name} in {target}", flush=True)
                _make(name, target)
                marker.touch()
    return str(target)


def sample_tokenizer(name: str, cache: Path) -> str | None:
    """Return the folder of the tokenizer of the sample `name`; None if there is no such sample of texts."""
    return f"{sample_folder(name, cache)}/tokenizer" if name in TEXTS else None


def stdlib_sources() -> list[tuple[str, str]]:
    """Return (path in the standard library, source) of every module that is valid UTF-8, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts[:-1]):
            continue
        try:
            found.append((relative.as_posix(), path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, OSError):
            continue
    return found


def _make(name: str, target: Path) -> None:
    """Write the files of train and validation; for texts, also a tokenizer trained on the training texts."""
    if name in drawn_images.SAMPLES:
        return drawn_images.draw_sample(name, target)
    make_rows, columns = {
        "stdlib_code": (_code_rows, ["text"]),
        "stdlib_functions": (_function_rows, ["text"]),
        "stdlib_docstrings": (_docstring_rows, ["code", "docstring"]),
        "stdlib_tokens": (partial(_rows_of_functions, _tagged_tokens), ["tokens"]),
        "stdlib_preferences": (partial(_rows_of_functions, _preference), ["prompt", "chosen"]),
    }[name]
    rows = make_rows()
    for split, examples in rows.items():
        (target / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples), encoding="utf-8")
    texts = [row[column] for row in rows["train"] for column in columns]
    _train_tokenizer([text if isinstance(text, str) else " ".join(text) for text in texts], target / "tokenizer")


def _code_rows() -> dict[str, list[dict]]:
    """Return one row per module: about 1 in 20 for validation, without copies of training modules."""
    rows = [{"path": path, "text": text} for path, text in stdlib_sources() if text.strip()]
    train = [row for row in rows if not _is_held_out(row["path"], 20)]
    known = {row["text"] for row in train}
    held_out = [row for row in rows if _is_held_out(row["path"], 20) and row["text"] not in known]
    return {"train": train, "validation": held_out}


def _function_rows() -> dict[str, list[dict]]:
    """Return one row per function, labeled with its package: about 1 in 10 for validation."""
    rows = {"train": [], "validation": []}
    for path, text in stdlib_sources():
        package = path.split("/")[0]
        if "/" in path and package in PACKAGES:
            for source in _functions(text):
                split = "validation" if _is_held_out(source, 10) else "train"
                rows[split].append({"text": source, "label": package, "path": path})
    seen = {row["label"] for row in rows["train"]}
    rows["validation"] = [row for row in rows["validation"] if row["label"] in seen]
    return rows


def _docstring_rows() -> dict[str, list[dict]]:
    """Return one row per function with a docstring: about 1 in 10 for validation, without copies of training rows."""
    rows = {"train": [], "validation": []}
    for path, text in stdlib_sources():
        for source in _functions(text):
            code, docstring = _split_docstring(source)
            if 10 <= len(docstring) <= 200:
                split = "validation" if _is_held_out(code, 10) else "train"
                rows[split].append({"code": code, "docstring": docstring, "path": path})
    return rows


def _split_docstring(source: str) -> tuple[str, str]:
    """Return (source of a function without its docstring, the docstring's first sentence, or "" without one)."""
    try:
        function = ast.parse(source).body[0]
    except SyntaxError:  # a string at the left margin prevented the dedent
        return source, ""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    docstring, first = ast.get_docstring(function), function.body[0]
    if not docstring or len(function.body) == 1 or function.body[1].lineno == first.end_lineno:
        return source, ""
    lines = source.splitlines(keepends=True)
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return "".join(lines[: first.lineno - 1] + lines[first.end_lineno :]), re.split(r"(?<=\w\.) ", paragraph)[0]


def _rows_of_functions(make: Callable[[str], dict | None]) -> dict[str, list[dict]]:
    """Return the row that `make(source)` returns for each function, if it returns one; split like the functions."""
    return {
        split: [made | {"path": row["path"]} for row in rows if (made := make(row["text"]))]
        for split, rows in _function_rows().items()
    }


def _tagged_tokens(source: str) -> dict | None:
    """Return the tokens of a function, of 20 characters at most, and their tags; None if it is incomplete."""
    try:
        found = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.string.strip()]
    except (tokenize.TokenError, SyntaxError):
        return None
    texts = [token.string for token in found]
    kinds = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.COMMENT: "comment"}
    tags = []
    for token, before, after in zip(found, ["", *texts], [*texts[1:], ""], strict=False):
        tag = kinds.get(token.type, "O")  # O: operators and brackets
        if token.type == tokenize.NAME:
            tag = "call" if after == "(" else "attribute" if before == "." else "name"
            tag = "keyword" if keyword.iskeyword(token.string) else tag
        tags.append(tag)
    return {"tokens": [text[:20] for text in texts], "tags": tags} if texts else None


def _preference(source: str) -> dict | None:
    """Return the first half of a function, its second half (chosen), and that in reversed order (rejected)."""
    lines = source.splitlines(keepends=True)
    first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    chosen, rejected = "".join(second), "".join(reversed(second))
    return {"prompt": "".join(first), "chosen": chosen, "rejected": rejected} if chosen != rejected else None


def _functions(text: str) -> Iterator[str]:
    """Yield the source of each function of 4 to 61 lines."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and 3 <= (node.end_lineno or 0) - node.lineno <= 60:
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def _is_held_out(key: str, one_in: int) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % one_in == 0


def _train_tokenizer(texts: list[str], target: Path) -> None:
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
