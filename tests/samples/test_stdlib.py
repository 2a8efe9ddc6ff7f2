"""The samples from the standard library: made once, complete, and split without overlap."""

import json
from pathlib import Path

import pytest

from engine.storage import cache_folder as samples
from samples import _stdlib, stdlib_code


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


def rows(root, split):
    return [json.loads(line) for line in (folder(root, "stdlib_code") / f"{split}.jsonl").read_text().splitlines()]


def test_code_is_split_without_overlap(root, few):
    samples.sample_folder("stdlib_code", root)
    train, validation = rows(root, "train"), rows(root, "validation")
    assert len(train) > 5 * len(validation) > 0
    code = sorted((row["path"], row["text"]) for row in train + validation)
    assert code == sorted(row for row in few if row[1].strip())


def test_interrupted_sample_is_made_again_and_changed_code_makes_its_own(root, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(_stdlib, "train_tokenizer", lambda *_: 1 / 0)
        samples.sample_folder("stdlib_code", root)
    assert not folder(root, "stdlib_code").exists()
    (unfinished,) = (root / "samples").glob("*.tmp")
    (unfinished / "leftover").touch()
    first = samples.sample_folder("stdlib_code", root)
    assert {path.name for path in Path(first).iterdir()} == {"train.jsonl", "validation.jsonl", "tokenizer"}
    code, changed = Path(stdlib_code.__file__).read_text(), root / "changed.py"
    monkeypatch.setattr(stdlib_code, "__file__", str(changed))
    changed.write_text(code + "# a comment\n")
    assert samples.sample_folder("stdlib_code", root) == first
    changed.write_text(code + "changed = 1\n")
    assert samples.sample_folder("stdlib_code", root) != first
