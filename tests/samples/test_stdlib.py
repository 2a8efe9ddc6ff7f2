"""The samples from the standard library: made once, complete, and split without overlap."""

import ast
import json
from pathlib import Path

import pytest

from samples import _stdlib, stdlib_code
from src.storage import cache_folder as samples


@pytest.fixture(scope="module")
def few():
    """A few packages of the standard library; some files have characters of several bytes."""
    packages = ("json", "http", "email", "html")
    return [(path, text) for path, text in _stdlib.module_sources() if path.split("/")[0] in packages]


@pytest.fixture
def root(few, tmp_path, monkeypatch):
    monkeypatch.setattr(_stdlib, "module_sources", lambda: few)
    return tmp_path


def folder(root, name) -> Path:
    paths = [path for path in (root / "samples").glob(f"{name}-*") if path.is_dir() and path.suffix != ".tmp"]
    return paths[0] if paths else root / "none"


def rows(root, name, split):
    return [json.loads(line) for line in (folder(root, name) / f"{split}.jsonl").read_text().splitlines()]


def made(root, name) -> list[dict]:
    """Return all rows of a sample, about one in ten of them for validation."""
    samples.sample_folder(name, root)
    train, validation = rows(root, name, "train"), rows(root, name, "validation")
    assert len(train) > 5 * len(validation) > 0
    key = "code" if "code" in train[0] else "path"
    assert not {row[key] for row in train} & {row[key] for row in validation}
    return train + validation


def test_code_is_split_without_overlap(root, few):
    code = made(root, "stdlib_code")
    assert sorted((row["path"], row["text"]) for row in code) == sorted(row for row in few if row[1].strip())


def test_docstrings_are_not_in_the_code_and_split_without_overlap(root):
    for row in made(root, "stdlib_docstrings"):
        (function,) = ast.parse(row["code"]).body
        assert ast.get_docstring(function) is None
        assert len(row["docstring"].splitlines()) == 1


def test_interrupted_sample_is_made_again_and_changed_code_makes_its_own(root, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(_stdlib, "train_tokenizer", lambda *_: 1 / 0)
        samples.sample_folder("stdlib_code", root)
    assert not folder(root, "stdlib_code").exists()
    (unfinished,) = (root / "samples").glob("*.tmp")
    (unfinished / "leftover").touch()
    first = samples.sample_folder("stdlib_code", root)
    assert {path.name for path in Path(first).iterdir()} == {"train.jsonl", "validation.jsonl", "tokenizer"}
    (root / "changed.py").write_text(Path(stdlib_code.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(stdlib_code, "__file__", str(root / "changed.py"))
    assert samples.sample_folder("stdlib_code", root) != first
