"""Prepared bytes are the same for any number of processes, complete or absent; packed rows are full, memory is bounded."""

import functools
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from src.config.errors import Failure, UsageError
from src.data import prepare
from src.tasks import causal_lm, text_classification
from tests.helpers import kit

WORDS = ["def", "return", "self", "import", "class", "yield", "lambda", "für", "漢字", "0x1f", "assert", "None", "True"]


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    generator = np.random.default_rng(0)
    rows = []
    for i in range(300):
        words = generator.choice(WORDS, int(3 + 94 * generator.random() ** 2.5))
        rows.append({"text": " ".join(words), "label": ["a", "b", "c"][i % 3]})
    kit.tiny_tokenizer(folder / "tokenizer", [row["text"] for row in rows])
    kit.write_jsonl(folder / "texts.jsonl", rows)
    kit.write_yaml(folder / "gpt2.yaml", kit.TINY | {"vocab_size": 400, "n_positions": 128})
    bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    kit.write_yaml(folder / "bert.yaml", bert | {"intermediate_size": 32, "max_position_embeddings": 64})
    return folder


KINDS = {
    "rows": {"model_config": "gpt2.yaml"},
    "packed": {"model_config": "gpt2.yaml", "packing": True, "max_length": 100},
    "labels": {"task": "text_classification", "model_config": "bert.yaml"},
}


def fields_of(tools, kind: str) -> dict:
    fields = {"tokenizer_name": tools / "tokenizer", "train_file": tools / "texts.jsonl"} | KINDS[kind]
    return fields | {"model_config": tools / fields["model_config"]}


@pytest.fixture
def small(monkeypatch):
    """Many parts of several blocks each; children inherit it."""
    monkeypatch.setattr(prepare, "PART", 4000)
    monkeypatch.setattr(prepare, "BLOCK", 1500)


def opened(fields: dict, cache: Path) -> int:
    _, splits = kit.open_data(**fields, cache_dir=cache)
    return len(splits["train"])


def digest(cache: Path) -> dict[str, str]:
    """Return hashes of the files of complete preparations, by name."""
    files = [file for stats in cache.glob("prepared/[!.]*/facts.json") for file in stats.parent.iterdir()]
    return {f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def count_blocks(monkeypatch, folder: Path) -> None:
    """Write a line for each block that is encoded."""

    def counted(original):
        @functools.wraps(original)
        def encode(self, batch, places):
            with open(folder / "calls", "a") as file:
                file.write(f"{places.rows[0]}\n")
            return original(self, batch, places)

        return encode

    for task in (causal_lm.Task, text_classification.Task):
        monkeypatch.setattr(task, "encode", counted(task.encode))


def encoded(folder: Path) -> list[int]:
    file = folder / "calls"
    return sorted(map(int, file.read_text().split())) if file.exists() else []


# ---- the same bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_do_not_depend_on_processes(tools, tmp_path, small, monkeypatch, kind):
    count_blocks(monkeypatch, tmp_path)
    fields, caches = fields_of(tools, kind), []
    for world, processes in ((1, 1), (2, 1), (1, 3)):  # processes per rank
        caches.append(tmp_path / f"{world}{processes}")
        fields["preprocessing_num_workers"] = processes
        kit.spawn(world, opened, fields, caches[-1], out=tmp_path / "out")
        shutil.move(tmp_path / "calls", caches[-1] / "calls")
        assert encoded(caches[-1]) == encoded(caches[0])  # each block once
    one = digest(caches[0])
    assert sum(name.endswith(".arrow") for name in one) >= 8
    assert {Path(name).name for name in one} > {"lengths", "hashes", "kept", "facts.json"}
    assert len(encoded(caches[0])) > 2 * sum(name.endswith(".arrow") for name in one)
    assert [digest(cache) == one for cache in caches] == [True] * 3


def test_mutant_with_parts_by_process(tools, tmp_path, small, monkeypatch):
    caches = []
    for processes in (1, 2):
        bounds = lambda rows, size, n=4 * processes: [rows * i // n for i in range(n + 1)]  # noqa: E731
        monkeypatch.setattr(prepare, "part_bounds", bounds)
        caches.append(tmp_path / f"{processes}")
        opened(fields_of(tools, "packed"), caches[-1])
    assert digest(caches[0]) != digest(caches[1])


def test_part_bounds_depend_on_the_data_alone():
    for rows, size in ((1, 1), (7, 10**9), (10**9, 10**14), (5000, 3 * prepare.PART), (3, 0)):
        bounds = prepare.part_bounds(rows, size)
        assert bounds[0] == 0
        assert bounds[-1] == rows
        assert all(a < b for a, b in pairwise(bounds))
        assert len(bounds) - 1 <= prepare.PARTS


# ---- prepared once -----------------------------------------------------------------------------------------------------


def killed(fields: dict, cache: Path, out: Path) -> None:
    with pytest.raises(kit.RankFailed) as failed:
        kit.spawn(1, opened, fields, cache, out=out)
    assert failed.value.codes == [-signal.SIGKILL]


@pytest.mark.parametrize("processes", [1, 3])
def test_killed_preparation_leaves_nothing_that_counts(tools, tmp_path, small, monkeypatch, processes):
    """The next start prepares all; children of a killed process end, or they would hold its lock."""
    fields = fields_of(tools, "packed") | {"preprocessing_num_workers": processes}
    opened(fields, tmp_path / "straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm.Task, "encode", killing(os.getpid()))
        killed(fields, tmp_path / "cache", tmp_path / "out")
    assert digest(tmp_path / "cache") == {}
    opened(fields, tmp_path / "cache")
    assert digest(tmp_path / "cache") == digest(tmp_path / "straight") != {}
    assert [path.name for path in (tmp_path / "cache" / "prepared").iterdir() if path.name.startswith(".")] == []


def killing(test: int):
    """Return an `encode` that kills the process that prepares the data: the child of this test."""

    def encode(self, batch, locations):
        if locations.rows[0] < 100:
            return original(self, batch, locations)
        parent = multiprocessing.parent_process().pid
        os.kill(os.getpid() if parent == test else parent, signal.SIGKILL)
        time.sleep(600)

    original = causal_lm.Task.encode
    return functools.wraps(original)(encode)


def test_mutant_that_writes_in_place(tools, tmp_path, small, monkeypatch):
    """Such a cache seems complete before it is."""
    fields = fields_of(tools, "rows")

    def in_place(folder, write):
        final = folder.parent / folder.name.split(".")[0]
        final.mkdir()
        write(final)

    monkeypatch.setattr(prepare.atomic_folder, "publish", in_place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm.Task, "encode", killing(os.getpid()))
        killed(fields, tmp_path / "cache", tmp_path / "out")
    with pytest.raises(FileNotFoundError):
        opened(fields, tmp_path / "cache")


@pytest.mark.parametrize("how", ["killed", "error"])
def test_failing_process_ends_the_preparation(tools, tmp_path, small, monkeypatch, how):
    test, original = os.getpid(), causal_lm.Task.encode

    def encode(self, batch, locations):
        if os.getpid() != test and locations.rows[0] > 100:
            if how == "error":
                raise UsageError("a cosmic ray")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, batch, locations)

    monkeypatch.setattr(causal_lm.Task, "encode", functools.wraps(original)(encode))
    fields = fields_of(tools, "rows") | {"preprocessing_num_workers": 3}
    with pytest.raises((UsageError, Failure), match="a cosmic ray" if how == "error" else "host memory was full"):
        opened(fields, tmp_path / "cache")
    assert digest(tmp_path / "cache") == {}


# ---- the process group does not wait -------------------------------------------------------------------------------------


def test_rename_after_a_kill_and_files_of_another_size(tools, tmp_path, monkeypatch):
    """A preparation that was killed before its last rename is used; one with a truncated file is refused."""
    fields = fields_of(tools, "rows") | {"cache_dir": tmp_path}
    kit.open_data(**fields)
    [stats] = tmp_path.glob("prepared/[!.]*/facts.json")
    stats.parent.rename(f"{stats.parent}.{prepare.SharedWork(tmp_path).host}")
    count_blocks(monkeypatch, tmp_path)
    kit.open_data(**fields)
    assert encoded(tmp_path) == []
    lengths = stats.parent / "lengths"
    lengths.write_bytes(lengths.read_bytes()[:-4])
    with pytest.raises(UsageError, match=f"{lengths} is damaged: remove the folder"):
        kit.open_data(**fields)


def test_error_of_any_class_reaches_the_parent():
    class Unpicklable(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    def fail(item):
        raise Unpicklable("a cosmic ray", item)

    with pytest.raises(Failure, match="a cosmic ray"):
        list(prepare.in_processes(2, fail, [1, 2, 3]))


def test_data_is_prepared_before_the_process_group_exists(tmp_path, monkeypatch):
    """So no collective waits for it, and preparation may take longer than ddp_timeout."""
    original = causal_lm.Task.encode

    @functools.wraps(original)
    def noted(self, batch, places):
        (tmp_path / f"{places.split}_{torch.distributed.is_initialized()}").touch()
        return original(self, batch, places)

    monkeypatch.setattr(causal_lm.Task, "encode", noted)
    fields = kit.tiny_files(tmp_path) | {"cache_dir": tmp_path / "cache", "max_steps": 2, "global_batch_size": 8}
    run = kit.run_training(2, tmp_path / "run", *kit.flags(**fields))
    assert {path.name for path in tmp_path.glob("*_*e")} == {"train_False", "validation_False"}
    assert run.kind("eval")


# ---- rows are full, memory is bounded ------------------------------------------------------------------------------------


def fill(split, max_length: int) -> float:
    return split.stats["tokens"] / (len(split) * max_length)


def test_packed_rows_are_full(tools, tmp_path):
    generator = np.random.default_rng(1)
    lengths = 3 + (94 * generator.random(8000) ** 2.5).astype(int)
    file = kit.write_jsonl(
        tmp_path / "ids.jsonl", [{"input_ids": generator.integers(0, 400, n).tolist()} for n in lengths]
    )
    fields = {"model_config": tools / "gpt2.yaml", "packing": True, "max_length": 128, "cache_dir": tmp_path / "cache"}
    _, splits = kit.open_data(**fields, train_file=file)
    assert fill(splits["train"], 128) >= 0.98


def test_mutant_that_packs_in_file_order(tools, tmp_path, monkeypatch):
    def first_come(max_length, batch):
        rows, room = [], 0
        for i, n in enumerate(batch["length"]):
            if n > room:
                rows, room = [*rows, []], max_length
            rows[-1].append(i)
            room -= n
        joined = {"input_ids": [[x for i in row for x in batch["input_ids"][i]] for row in rows]}
        sums = {
            name: [sum(batch[name][i] for i in row) for row in rows] for name in ("length", "targets", "bytes", "cut")
        }
        return joined | sums | {"documents": [[batch["length"][i] for i in row] for row in rows]}

    monkeypatch.setattr(causal_lm, "pack", first_come)
    _, splits = kit.open_data(**fields_of(tools, "packed"), cache_dir=tmp_path / "cache")
    assert fill(splits["train"], 100) < 0.95


def test_memory_does_not_grow_with_the_data(tools, tmp_path):
    """60 MB of texts with words of one token each, so that tokenization is fast."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"{i:x}" * 8 for i in range(4096, 4396)]
    model = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<eos>", "<unk>", *words])}, unk_token="<unk>")
    )
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        tmp_path / "words"
    )
    file, text = tmp_path / "large.jsonl", " ".join(words)
    with open(file, "w") as out:
        for i in range(60_000_000 // len(text[:3000])):
            out.write(json.dumps({"text": text[i % 99 * 33 :][:3000]}) + "\n")
    assert file.stat().st_size > 55e6

    def grown():
        import ctypes

        kit.open_data(**fields_of(tools, "rows"), cache_dir=tmp_path / "warm")  # imports
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        ctypes.CDLL(None).malloc_trim(0)
        fields = fields_of(tools, "rows") | {"train_file": file, "tokenizer_name": tmp_path / "words"}
        kit.open_data(**fields, cache_dir=tmp_path / "cache")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return (peak - before) / 1e6

    [megabytes] = kit.spawn(1, grown, out=tmp_path / "out")
    assert megabytes < 600


# ---- make data -----------------------------------------------------------------------------------------------------------


def test_make_data_prepares_what_training_opens(tools, tmp_path, monkeypatch):
    fields = fields_of(tools, "rows") | {"validation_file": tools / "texts.jsonl", "max_steps": 1}
    run = {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}
    file = kit.write_yaml(tmp_path / "run.yaml", run | {"cache_dir": str(tmp_path / "cache")})
    command = [
        "make",
        "-s",
        "-o",
        ".venv/done",
        "data",
        f"CONFIG={file}",
    ]  # calls python -m src.data.dataset --config FILE
    done = subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    printed = {line.split(":")[0]: line for line in done.stdout.splitlines()}
    for split in ("train", "validation"):
        assert f"{split}: 300 rows, " in printed[split]
        assert Path(printed[split].rsplit(": ", 1)[1], "facts.json").exists()
    assert not (tmp_path / "run").exists()
    count_blocks(monkeypatch, tmp_path)
    codes, [text] = kit.run_command("train.py", "--config", file, "--output_dir", tmp_path / "run", folder=tmp_path)
    assert codes == [0], text
    assert encoded(tmp_path) == []
    assert "preparing" not in text
