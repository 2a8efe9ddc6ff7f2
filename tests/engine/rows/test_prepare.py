"""Prepared bytes are the same for any number of processes, complete or absent; packed rows are full."""

import functools
import hashlib
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.config.errors import UsageError, said
from engine.plan import dataset
from engine.rows import file_parts, prepare
from engine.rows.prepared_split import data_notes, format_stats
from engine.run import run_record
from engine.storage import cache_folder
from src.tasks import causal_lm
from tests.engine.conftest import WORDS
from tests.helpers import kit


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return a file of 300 texts."""
    generator = np.random.default_rng(0)
    lengths = (3 + 94 * generator.random(300) ** 2.5).astype(int)
    rows = [{"text": " ".join(generator.choice(WORDS, length))} for length in lengths]
    return kit.write_jsonl(tmp_path_factory.mktemp("rows") / "texts.jsonl", rows)


@pytest.fixture
def fields(tools, rows):
    """The fields of packed rows."""
    given = {"model_config": tools / "gpt2.yaml", "tokenizer_name": tools / "tokenizer", "train_file": rows}
    return given | {"packing": True, "max_length": 100}


@pytest.fixture
def small(monkeypatch):
    """Many blocks; children inherit it."""
    monkeypatch.setattr(file_parts, "PART", 1500)


def opened(fields: dict, cache: Path) -> None:
    kit.open_data(**fields | {"cache_dir": cache})


def digest(cache: Path) -> dict[str, str]:
    """Return hashes of the files of complete preparations, by name."""
    files = [file for stats in cache.glob("prepared/[!.]*/facts.json") for file in stats.parent.iterdir()]
    return {f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# ---- the same bytes ----------------------------------------------------------------------------------------------------


def test_bytes_do_not_depend_on_processes(fields, tmp_path, small):
    caches = []
    for world, processes in ((1, 1), (2, 1), (1, 3)):  # processes per rank
        caches.append(tmp_path / f"{world}{processes}")
        fields |= {"preprocessing_num_workers": processes, "packing": "whole"}
        kit.spawn(world, opened, fields, caches[-1], out=tmp_path / "out")
    one = digest(caches[0])
    (facts,) = caches[0].glob("prepared/*/facts.json")
    assert len(json.loads(facts.read_text())["blocks"]) > 20
    assert [digest(cache) == one for cache in caches] == [True] * 3


def test_mutant_with_blocks_by_process(fields, tmp_path, small, monkeypatch):
    caches = []
    for processes in (1, 2):
        monkeypatch.setattr(file_parts, "PART", 1500 * processes)
        caches.append(tmp_path / f"{processes}")
        opened(fields, caches[-1])
    assert digest(caches[0]) != digest(caches[1])


# ---- prepared once -----------------------------------------------------------------------------------------------------


def killed(fields: dict, cache: Path, out: Path) -> None:
    """Prepare data in a process that is killed by one of its children."""
    original = causal_lm.Task.encode

    @functools.wraps(original)
    def encode(self, batch, locations):
        if locations[0].start < 15_000:  # the byte at which its part begins
            return original(self, batch, locations)
        os.kill(multiprocessing.parent_process().pid, signal.SIGKILL)
        time.sleep(600)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(kit.RankFailed) as failed:
        patch.setattr(causal_lm.Task, "encode", encode)
        kit.spawn(1, opened, fields | {"preprocessing_num_workers": 3}, cache, out=out)
    assert failed.value.codes == [-signal.SIGKILL]


def test_killed_preparation_leaves_nothing_that_counts(fields, tmp_path, small):
    """The next start prepares all; children of a killed process end, or they would hold its lock."""
    opened(fields, tmp_path / "straight")
    killed(fields, tmp_path / "cache", tmp_path / "out")
    assert digest(tmp_path / "cache") == {}
    opened(fields, tmp_path / "cache")
    assert digest(tmp_path / "cache") == digest(tmp_path / "straight") != {}
    assert [path.name for path in (tmp_path / "cache" / "prepared").iterdir() if path.name.startswith(".")] == []


def test_mutant_that_writes_in_place(fields, tmp_path, small, monkeypatch):
    """Such a cache seems complete before it is."""

    def in_place(folder, write):
        final = folder.parent / folder.name.split(".")[0]
        final.mkdir()
        write(final)

    monkeypatch.setattr(prepare.atomic_folder, "publish", in_place)
    killed(fields, tmp_path / "cache", tmp_path / "out")
    with pytest.raises(UsageError, match="is damaged"):
        opened(fields, tmp_path / "cache")


def test_error_in_a_process_ends_the_preparation(fields, tmp_path, small):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"text": "def f return self"}] * 300 + [{"text": None}])
    fields = fields | {"train_file": file, "preprocessing_num_workers": 3}
    with pytest.raises(UsageError, match=r"^\S+rows.jsonl, line 301: train data: `text` holds nothing"):
        opened(fields, tmp_path / "cache")
    assert digest(tmp_path / "cache") == {}


def test_process_killed_while_it_sends_rows_ends_the_preparation(tmp_path):
    def half(item):
        def send(self, message, *_):
            os.write(self.fileno(), bytes(message)[:2])
            os.kill(os.getpid(), signal.SIGKILL)

        if item == 3:
            Connection._send = send
        return bytes(1 << 20)

    with pytest.raises(kit.RankFailed, match=r"DataLoader worker \(pid"):
        kit.spawn(1, lambda: list(prepare.in_processes(2, half, list(range(20)))), out=tmp_path / "out", timeout=60)


def test_data_is_prepared_before_the_process_group_exists(tmp_path, monkeypatch):
    """So no collective waits for it, and preparation may take longer than ddp_timeout."""
    original = causal_lm.Task.encode

    @functools.wraps(original)
    def noted(self, batch, locations):
        (tmp_path / f"{str(locations[0]).split()[-2]}_{torch.distributed.is_initialized()}").touch()
        return original(self, batch, locations)

    monkeypatch.setattr(causal_lm.Task, "encode", noted)
    fields = kit.tiny_files(tmp_path) | {"cache_dir": tmp_path / "cache", "max_steps": 2, "global_batch_size": 8}
    run = kit.run_training(2, tmp_path / "run", *kit.flags(**fields))
    assert {path.name for path in tmp_path.glob("*_*e")} == {"train_False", "validation_False"}
    assert run.kind("eval")


# ---- long, empty and repeated rows -------------------------------------------------------------------------------------


GOOD = [{"text": f"def f{i} return self"} for i in range(9)]
LONG = [*GOOD, {"text": "def f return self " * 40}, {"text": "return " * 90}]


def documents(split) -> list[list[int]]:
    """Return the token ids of every document of prepared rows, in their order."""
    documents = []
    for row in kit.all_rows(split):
        ends = np.cumsum(row.get("documents", [len(row["input_ids"])]))
        documents += [part.tolist() for part in np.split(row["input_ids"], ends[:-1])]
    return documents


@pytest.mark.parametrize("long_rows", ["cut", "drop"])
@pytest.mark.parametrize("packing", [False, True, "whole"])
def test_long_rows_are_cut_split_or_dropped_and_repeated_rows_are_counted(open_data, tmp_path, packing, long_rows):
    new = [{"text": f"return x{i} self"} for i in range(4)]
    file = kit.write_jsonl(tmp_path / "rows.jsonl", LONG)
    other = kit.write_jsonl(tmp_path / "other.jsonl", [*new, *GOOD[3:6], {"text": " " + GOOD[0]["text"]}])
    fields = {"max_length": 64, "packing": packing, "long_rows": long_rows}
    task, splits = open_data(train_file=file, validation_file=other, **fields)
    whole = [[*task.tokenizer(row["text"])["input_ids"], task.tokenizer.eos_token_id] for row in LONG]
    stats, cut = splits["train"].stats, [len(ids) - 64 for ids in whole if len(ids) > 64]
    *notes, repeated = data_notes(splits)
    assert repeated == "validation data: 3 of 8 examples checked are also in the training data"
    expected = [ids for ids in whole if len(ids) <= 64]
    counts = {"rows_cut": 0, "rows_dropped": 2, "tokens_cut": sum(cut) + 2 * 64, "source_rows": len(whole)}
    if long_rows == "cut" and packing is True:
        parts = [ids[i : i + 64] for ids in whole for i in range(0, len(ids), 64)]
        expected = [part for part in parts if len(part) > 1]
        counts |= {"rows_dropped": 0, "tokens_cut": 0}
    elif long_rows == "cut":
        expected = [ids[:64] for ids in whole]
        counts |= {"rows_cut": 2, "rows_dropped": 0, "tokens_cut": sum(cut)}
    assert {name: stats[name] for name in counts} == counts
    assert "".join(notes).count("train data: 2 rows were longer than max_length") == (counts["tokens_cut"] > 0)
    assert ("left out" in "".join(notes)) == (long_rows == "drop")
    rows = "" if not packing else f" packed from {len(whole) - counts['rows_dropped']}"
    assert format_stats(stats).startswith(f"{len(splits['train'])} rows{rows}, ")
    if not packing:
        assert documents(splits["train"]) == expected
        return
    assert sorted(documents(splits["train"])) == sorted(expected)
    assert len(splits["train"]) == len(kit.all_rows(splits["train"])) < len(expected)


def test_dropping_all_rows_and_where_nothing_could_be_dropped_are_refused(open_data, plain, tmp_path):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", LONG[-2:])
    with pytest.raises(UsageError, match="2 of them are longer than max_length, and long_rows: drop leaves them out"):
        open_data(train_file=file, max_length=64, long_rows="drop")
    with pytest.raises(UsageError, match="long_rows is drop, but rows of task plain have no max_length"):
        kit.open_data(task="plain", **plain, long_rows="drop")


def test_unknown_tokens_are_counted(open_data, tmp_path):
    words = {"[UNK]": 0, "[PAD]": 1, "[EOS]": 2, "red": 3, "fox": 4}
    model = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(tmp_path / "words")
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"text": "red fox"}, {"text": "red 漢字 wolf"}])
    _, splits = open_data(train_file=file, tokenizer_name=tmp_path / "words")
    assert splits["train"].stats["unknown_tokens"] == 2
    [note] = data_notes(splits)
    assert note.startswith("train data: 2 tokens (28.57%) are the unknown token")

    special = dict.fromkeys(special, "[UNK]")  # as the end of the text of GPT-2, which knows all bytes
    PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(tmp_path / "one")
    _, splits = open_data(train_file=file, tokenizer_name=tmp_path / "one")
    assert splits["train"].stats["unknown_tokens"] == 0


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_tokenizer_that_drops_characters_or_has_no_end_is_warned_of(open_data, tmp_path, capfd, unknown):
    model = Tokenizer(models.BPE({"a": 0, "b": 1, "<unk>": 2}, [], unk_token=unknown))
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token=unknown).save_pretrained(tmp_path / "ab")
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"text": "ab漢a"}])
    _, splits = open_data(train_file=file, tokenizer_name=tmp_path / "ab")
    assert documents(splits["train"]) == [[0, 1, 0] if unknown is None else [0, 1, 2, 0]]
    warnings = capfd.readouterr().err
    assert ("it leaves out the characters" in warnings) == (unknown is None)
    assert warnings.count("the tokenizer has no eos_token") == 1


def test_tokenizer_that_refuses_unknown_words_is_used(open_data, tmp_path):
    model = Tokenizer(models.WordLevel({"one": 0, "two": 1, "[EOS]": 2}))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="[EOS]").save_pretrained(tmp_path / "words")
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"text": "one two"}])
    _, splits = open_data(train_file=file, tokenizer_name=tmp_path / "words")
    assert documents(splits["train"]) == [[0, 1, 2]]
    kit.write_jsonl(file, [{"text": "one two"}, {"text": "one three"}])
    with pytest.raises(UsageError, match=r"rows.jsonl, line 2: .*Missing \[UNK\]"):
        open_data(train_file=file, tokenizer_name=tmp_path / "words")


@pytest.mark.parametrize(
    "labels, length, reason",
    [([-100] * 9 + [5], 4, "1 of them are longer than max_length.*raise --max_length"), ([-100] * 9, 20, "masked")],
)
def test_reason_for_rows_without_targets(open_data, tmp_path, labels, length, reason):
    file = kit.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [1] * len(labels), "labels": labels}])
    with pytest.raises(UsageError, match=f"none of the 1 rows .*{reason}"):
        open_data(train_file=file, max_length=length)


# ---- the cache folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, owner, name",
    [("cache_dir", dataset, "_load_splits"), ("output_dir", run_record.RunRecord, "_begin_files")],
)
def test_full_disk_at_the_start_is_named(fields, tmp_path, monkeypatch, field, owner, name):
    fields = fields | {"output_dir": tmp_path / "run", "max_steps": 2, "cache_dir": tmp_path / "cache"}
    original = getattr(owner, name)

    def call(*args):
        """Write files of 100 bytes at most."""
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
        try:
            return original(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    monkeypatch.setattr(owner, name, call)
    codes, [text] = kit.run_command("train.py", *kit.flags(**fields), folder=tmp_path, world=1)
    assert codes == [2], text
    assert text.rstrip().splitlines()[-1].startswith(f"error: {field}: {fields[field]} cannot be written")
    if field == "cache_dir":
        assert digest(tmp_path / "cache") == {}  # nothing partial counts


@pytest.fixture
def read_only(tmp_path):
    """Return a function that mounts a folder read-only until the test ends."""
    mounted = []

    def mount(folder: Path) -> None:
        for options in (["--bind", folder], ["-o", "remount,ro,bind"]):
            if subprocess.run(["mount", *options, folder], check=False, capture_output=True).returncode:
                pytest.skip("no file system can be mounted here")
            mounted.append(folder)

    yield mount
    for folder in set(mounted):
        subprocess.run(["umount", "-l", folder], check=True)


def test_complete_cache_may_be_read_only(fields, tmp_path, read_only):
    """For training and evaluation, on several processes; what is missing in it is one sentence."""
    cache = tmp_path / "cache"
    fields = fields | {"validation_file": fields["train_file"], "cache_dir": cache, "max_steps": 1, "packing": "whole"}
    opened(fields, cache)
    read_only(cache)
    training = ("train.py", *kit.flags(**fields, output_dir="run", global_batch_size=4, per_device_batch_size=2))
    evaluation = ("eval.py", "--checkpoint", tmp_path / "run", "--cache_dir", cache)
    for command in (training, evaluation):
        codes, texts = kit.run_command(*command, folder=tmp_path, world=2)
        assert codes == [0, 0], texts
    codes, [text] = kit.run_command(*training, "--max_length", "50", folder=tmp_path, world=1)
    assert codes == [2]
    last = text.rstrip().splitlines()[-1]
    assert f"cache_dir: {cache} cannot be written (Read-only file system): make it writable" in last


def test_read_only_folder_has_no_locks(tmp_path, read_only):
    (tmp_path / "cache").mkdir()
    read_only(tmp_path / "cache")
    with cache_folder.exclusive(tmp_path / "cache/target", "a test"):
        pass


def _open_on_two_hosts(fields: dict, cache: Path) -> None:
    socket.gethostname = lambda: f"node{os.environ['RANK']}.cluster"
    opened(fields | {"cache_per_node": True}, cache)


def test_cache_per_node_prepares_the_same_bytes_on_each_node(fields, tmp_path):
    kit.spawn(2, _open_on_two_hosts, fields, tmp_path, out=tmp_path / "out")
    one, other = (digest(tmp_path / f"node_node{i}.cluster") for i in (0, 1))
    assert one == other != {}


# ---- warnings about rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_warnings_about_rows_are_said_once_at_each_start(
    fields, tools, tmp_path, small, capsys, monkeypatch, processes
):
    """Also if another rank has prepared the rows, which prints nothing."""
    turns = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three", "mood": "good"}]
    fields["train_file"] = kit.write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns, "weight": 1}] * 200)
    fields |= {"chat_template": "chatml", "preprocessing_num_workers": processes, "cache_dir": tmp_path / "cache"}
    for rank, count in ((1, 0), (0, 1), (0, 1)):
        said.clear()  # of the process before
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        kit.open_data(**fields)
        printed = capsys.readouterr().err
        assert printed.count("the chat template does not read `mood` of a turn") == count
        assert printed.count("the columns weight are not used") == count
    said.clear()
    monkeypatch.setattr(dataset, "warn_once", lambda *_: None)  # the mutant says them only where rows are prepared
    kit.open_data(**fields)
    assert "mood" not in capsys.readouterr().err
    [facts] = tmp_path.glob("cache/prepared/*/facts.json")
    assert len(json.loads(facts.read_text())["blocks"]) > 5


def test_warnings_about_files_are_said_at_each_start(fields, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    kit.write_jsonl(tmp_path / "data/a.jsonl", [{"text": "one two three"}])
    kit.write_jsonl(tmp_path / "data/a.jsonl.bak", [{"text": "one two"}])
    del fields["train_file"]
    for _ in range(2):
        said.clear()
        kit.open_data(**fields, dataset_name=tmp_path / "data", cache_dir=tmp_path / "cache")
        assert capsys.readouterr().err.count("a.jsonl.bak is read, too") == 1


# ---- make data -----------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_make_data_prepares_what_training_opens(fields, rows, tmp_path):
    fields = fields | {"validation_file": rows, "cache_dir": tmp_path / "cache"}
    run = {name: str(value) for name, value in fields.items()} | {"max_steps": 1}
    file = kit.write_yaml(tmp_path / "run.yaml", run)
    command = ["make", "-s", "-o", ".venv/done", "data", f"CONFIG={file}"]
    done = subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert all(re.search(rf"{split}: \d+ rows packed from 300, ", done.stdout) for split in ("train", "validation"))
    codes, [text] = kit.run_command("train.py", "--config", file, "--output_dir", tmp_path / "run", folder=tmp_path)
    assert codes == [0], text
    assert "preparing" not in text
