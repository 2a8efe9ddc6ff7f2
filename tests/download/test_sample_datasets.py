"""The samples from the standard library: made once by whoever comes first, split without overlap, and read back as written."""

import json
import os
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from src.data.dataset_spec import DatasetSpec
from src.data.sources import resolve_source
from src.download import sample_datasets
from tests.helpers import kit


@pytest.fixture(scope="module")
def few():
    """A few packages of the standard library, so that tests are fast; some files have characters of several bytes."""
    return [
        (path, text)
        for path, text in sample_datasets.stdlib_sources()
        if path.split("/")[0] in ("json", "http", "email", "html")
    ]


@pytest.fixture
def root(few, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_datasets, "stdlib_sources", lambda: few)
    return tmp_path


def folder(root, name) -> Path:
    return root / "samples" / f"{name}-{sample_datasets.VERSION}"


def rows(root, name, split):
    return [json.loads(line) for line in (folder(root, name) / f"{split}.jsonl").read_text().splitlines()]


def test_sources_are_the_modules_of_the_standard_library():
    found = dict(sample_datasets.stdlib_sources())
    assert list(found) == sorted(found)
    assert "json/decoder.py" in found
    assert "class JSONDecoder" in found["json/decoder.py"]
    assert not any(sample_datasets.LEFT_OUT & set(path.split("/")[:-1]) for path in found)


def test_code_is_split_by_file_without_overlap(root, few):
    assert sample_datasets.sample_folder("stdlib_code", root) == str(folder(root, "stdlib_code"))
    train, validation = rows(root, "stdlib_code", "train"), rows(root, "stdlib_code", "validation")
    assert sorted((row["path"], row["text"]) for row in train + validation) == sorted(r for r in few if r[1].strip())
    assert not {row["path"] for row in train} & {row["path"] for row in validation}
    assert len(train) > 5 * len(validation) > 0


def test_functions_are_split_without_overlap(root, few):
    sample_datasets.sample_folder("stdlib_functions", root)
    train, validation = rows(root, "stdlib_functions", "train"), rows(root, "stdlib_functions", "validation")
    assert not {row["text"] for row in train} & {row["text"] for row in validation}  # nor the same function twice
    assert len(train) > 5 * len(validation) > 0
    assert {row["label"] for row in validation} <= {row["label"] for row in train} == {"json", "http", "email", "html"}
    for row in train + validation:
        assert row["path"].startswith(row["label"] + "/")
        assert "def " in row["text"]
        compile(row["text"], row["path"], "exec")  # a whole function, moved to the left margin
    texts = dict(few)
    assert all(row["text"].splitlines()[0].strip() in texts[row["path"]] for row in train)


@pytest.mark.parametrize("name", sample_datasets.SAMPLES)
def test_the_tokenizer_gives_every_text_back(root, name):
    tokenizer = AutoTokenizer.from_pretrained(sample_datasets.sample_tokenizer(name, root))
    texts = [row["text"] for row in rows(root, name, "validation")]
    assert [tokenizer.decode(ids) for ids in tokenizer(texts)["input_ids"]] == texts
    strange = "für 漢字 🙂\t\r\n\x00"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange
    assert 1000 < len(tokenizer) <= sample_datasets.VOCABULARY
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")


def test_the_name_is_a_dataset_and_a_tokenizer(root):
    """As the run file uses it: `dataset_name: stdlib_code` and `tokenizer_name: stdlib_code`."""
    kit.write_yaml(root / "llama.yaml", {k: v for k, v in kit.LLAMA.items() if k != "vocab_size"})
    fields = {"dataset_name": "stdlib_code", "tokenizer_name": "stdlib_code", "model_config": root / "llama.yaml"}
    task, splits = kit.open_data(**fields, cache_dir=root, max_length=64)
    assert task.config.vocab_size == len(task.tokenizer)
    assert splits["train"].stats["source_rows"] == len(rows(root, "stdlib_code", "train"))
    assert splits["validation"].stats["source_rows"] == len(rows(root, "stdlib_code", "validation"))


def test_other_names_are_no_samples(root):
    assert sample_datasets.sample_folder("stdlib", root) is sample_datasets.sample_tokenizer("gpt2", root) is None
    assert (
        resolve_source(DatasetSpec("dataset_name", "train", (), "someone/something"), root).name == "someone/something"
    )
    assert not (root / "samples").exists()


def _make(root):
    """What one of several processes does that start at once; the making is slow and leaves a line."""
    original = sample_datasets._code

    def slow(target):
        with open(root / "calls", "a") as calls:
            calls.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        original(target)

    sample_datasets._code = slow
    return sample_datasets.sample_folder("stdlib_code", root), len(rows(root, "stdlib_code", "train"))


def test_processes_that_start_together_make_it_once(root):
    made = kit.spawn(3, _make, root, out=root / "out")
    assert len(set(made)) == 1
    assert made[0][1] > 0
    assert len((root / "calls").read_text().splitlines()) == 1


def test_mutant_without_a_lock_is_caught(root, monkeypatch):
    monkeypatch.setattr(sample_datasets, "FileLock", lambda path: nullcontext())
    with suppress(kit.RankFailed):  # they delete each other's folder
        kit.spawn(3, _make, root, out=root / "out")
    assert len((root / "calls").read_text().splitlines()) > 1


def _killed(root):
    def dies(texts, target):
        os.kill(os.getpid(), signal.SIGKILL)  # the rows are written, the tokenizer is not

    sample_datasets._train_tokenizer = dies
    sample_datasets.sample_folder("stdlib_code", root)


def test_an_interrupted_making_starts_again(root):
    with pytest.raises(kit.RankFailed):
        kit.spawn(1, _killed, root, out=root / "out")
    target = folder(root, "stdlib_code")
    assert (target / "train.jsonl").exists()
    assert not (target / "DONE").exists()
    (target / "DONE").touch()  # the mutant: a marker that is written first
    assert not os.path.exists(f"{sample_datasets.sample_tokenizer('stdlib_code', root)}/tokenizer.json")
    (target / "DONE").unlink()
    (target / "left over").touch()
    assert AutoTokenizer.from_pretrained(sample_datasets.sample_tokenizer("stdlib_code", root))("def")["input_ids"]
    assert (target / "DONE").exists()
    assert not (target / "left over").exists()


def test_what_an_older_version_made_is_made_again_and_what_is_made_is_kept(root, monkeypatch):
    calls = []
    monkeypatch.setattr(sample_datasets, "_code", lambda target: calls.append(target))
    for expected in (1, 1):
        sample_datasets.sample_folder("stdlib_code", root)
        assert len(calls) == expected
    monkeypatch.setattr(sample_datasets, "VERSION", sample_datasets.VERSION + "+")
    for expected in (2, 2):
        sample_datasets.sample_folder("stdlib_code", root)
        assert len(calls) == expected
