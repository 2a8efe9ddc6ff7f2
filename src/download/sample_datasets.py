"""Two sample datasets made from Python's standard library, so that every machine can train.

A fork deletes this file when it has data of its own. Tests: tests/download/test_sample_datasets.py.
"""

import ast
import hashlib
import json
import os
import shutil
import sysconfig
import textwrap
from pathlib import Path

from filelock import FileLock

SAMPLES = ("stdlib_code", "stdlib_functions")
VOCABULARY = 2048
VERSION = "1"  # raise it when the rows below change
LEFT_OUT = {
    "encodings",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "__pycache__",
    "pydoc_data",
}
PACKAGES = [
    "asyncio",
    "collections",
    "concurrent",
    "ctypes",
    "curses",
    "dbm",
    "distutils",
    "email",
    "encodings",
    "ensurepip",
    "html",
    "http",
    "idlelib",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "re",
    "sqlite3",
    "tkinter",
    "tomllib",
    "turtledemo",
    "unittest",
    "urllib",
    "venv",
    "wsgiref",
    "xml",
    "xmlrpc",
    "zoneinfo",
]


def sample_folder(name: str, cache: Path) -> str | None:
    """Return the folder of the sample `name` in `cache`, made on first use, or None when there is no such sample.

    One process makes it, the others wait on a file lock, never on a collective; the marker is written last. The name of
    the folder holds the version: two checkouts that share a cache do not remove each other's rows."""
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
                print(f"making the sample {name} from Python's standard library in {target}", flush=True)
                (_code if name == "stdlib_code" else _functions)(target)
                marker.touch()
    return str(target)


def sample_tokenizer(name: str, cache: Path) -> str | None:
    """Return the folder of the tokenizer of the sample `name`, or None when there is no such sample."""
    return f"{sample_folder(name, cache)}/tokenizer" if name in SAMPLES else None


def stdlib_sources() -> list[tuple[str, str]]:
    """Return (path inside the standard library, source) of every module that can be read as UTF-8, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT & set(relative.parts[:-1]):
            continue
        try:
            found.append((relative.as_posix(), path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, OSError):
            continue  # a module in an old encoding is no loss
    return found


def _held_out(key: str, one_in: int) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % one_in == 0


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _code(target: Path) -> None:
    rows = [{"path": path, "text": text} for path, text in stdlib_sources() if text.strip()]
    train = [row for row in rows if not _held_out(row["path"], 20)]
    _write(target / "train.jsonl", train)
    known = {row["text"] for row in train}  # a few modules are copies of others
    held_out = [row for row in rows if _held_out(row["path"], 20) and row["text"] not in known]
    _write(target / "validation.jsonl", held_out)
    _train_tokenizer([row["text"] for row in train], target / "tokenizer")


def _functions(target: Path) -> None:
    """Which package of the standard library is this function from? Every tenth function is held out."""
    rows = {"train": [], "validation": []}
    for path, text in stdlib_sources():
        package = path.split("/")[0]
        if "/" not in path or package not in PACKAGES:
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and 3 <= node.end_lineno - node.lineno <= 60:
                source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
                split = "validation" if _held_out(source, 10) else "train"
                rows[split].append({"text": source, "label": package, "path": path})
    seen = {row["label"] for row in rows["train"]}
    rows["validation"] = [row for row in rows["validation"] if row["label"] in seen]
    for split, examples in rows.items():
        _write(target / f"{split}.jsonl", examples)
    _train_tokenizer([row["text"] for row in rows["train"]], target / "tokenizer")


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
