"""Prepared bytes are the same for any number of processes, complete or absent; packed rows are full, memory is bounded."""

import functools
import hashlib
import json
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

from src.config.errors import UsageError
from src.data import preprocessing
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
    """Many pieces of several blocks each; children inherit it."""
    monkeypatch.setattr(preprocessing, "PIECE", 4000)
    monkeypatch.setattr(preprocessing, "BLOCK", 1500)


def opened(fields: dict, cache: Path) -> int:
    _, splits = kit.open_data(**fields, cache_dir=cache)
    return len(splits["train"])


def digest(cache: Path) -> dict[str, str]:
    """Return hashes of the files of complete preparations, by name."""
    found = {}
    for stats in cache.glob("prepared/*/facts.json"):
        files = sorted(path for path in stats.parent.iterdir() if path.suffix in (".arrow", ".npy") or path == stats)
        for path in files:
            found[f"{stats.parent.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def count_blocks(monkeypatch, folder: Path, seconds: float = 0.0, action=lambda count: None) -> None:
    """Write a line for each block that is encoded, and call `action(number of blocks)` before."""

    def counted(original):
        count = [0]

        @functools.wraps(original)
        def encode(self, batch, places):
            count[0] += 1
            action(count[0])
            with open(folder / "calls", "a") as file:
                file.write(f"{places.rows[0]}\n")
            time.sleep(seconds)
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
    count_blocks(monkeypatch, tmp_path, 0.005)
    fields, found = fields_of(tools, kind), {}
    for world, helpers in ((1, 1), (2, 1), (3, 1), (1, 3), (2, 3)):
        cache = tmp_path / f"{world}{helpers}"
        kit.spawn(world, opened, fields | {"preprocessing_num_workers": helpers}, cache, out=tmp_path / "out")
        found[world, helpers] = digest(cache)
        shutil.move(tmp_path / "calls", cache / "calls")
        assert encoded(cache) == encoded(tmp_path / "11")  # each block once
    one = found[1, 1]
    assert sum(name.endswith(".arrow") for name in one) >= 8
    assert {Path(name).name for name in one} > {"lengths.npy", "hashes.npy", "facts.json"}
    assert len(encoded(tmp_path / "11")) > 2 * sum(name.endswith(".arrow") for name in one)
    assert [other == one for other in found.values()] == [True] * 5


def test_mutant_with_pieces_by_rank(tools, tmp_path, small, monkeypatch):
    def by_rank(rows, size):
        pieces = 4 * int(os.environ["WORLD_SIZE"])
        return [rows * i // pieces for i in range(pieces + 1)]

    monkeypatch.setattr(preprocessing, "piece_bounds", by_rank)
    found = []
    for world in (1, 2):
        kit.spawn(world, opened, fields_of(tools, "packed"), tmp_path / f"{world}", out=tmp_path / "out")
        found.append(digest(tmp_path / f"{world}"))
    assert found[0] != found[1]


def test_piece_bounds_depend_on_the_data_alone():
    for rows, size in ((1, 1), (7, 10**9), (10**9, 10**14), (5000, 3 * preprocessing.PIECE), (3, 0)):
        bounds = preprocessing.piece_bounds(rows, size)
        assert bounds[0] == 0
        assert bounds[-1] == rows
        assert all(a < b for a, b in pairwise(bounds))
        assert len(bounds) - 1 <= preprocessing.PIECES


# ---- prepared once -----------------------------------------------------------------------------------------------------


def test_two_jobs_started_together_prepare_once(tools, tmp_path, small, monkeypatch):
    fields = fields_of(tools, "packed")
    count_blocks(monkeypatch, tmp_path, 0.02)
    opened(fields, tmp_path / "alone")
    shutil.move(tmp_path / "calls", tmp_path / "alone" / "calls")
    jobs = [kit.fork(1, opened, fields, tmp_path / "cache", out=tmp_path / name)[0] for name in ("a", "b")]
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0, 0]
    assert encoded(tmp_path) == encoded(tmp_path / "alone")
    assert digest(tmp_path / "cache") == digest(tmp_path / "alone") != {}


def killed(fields: dict, cache: Path, out: Path, world: int = 1) -> None:
    with pytest.raises(kit.RankFailed) as failed:
        kit.spawn(world, opened, fields, cache, out=out)
    assert -9 in failed.value.codes
    assert None not in failed.value.codes


def last_rank_dies(marker: Path, last: str, count: int) -> None:
    """Kill the last rank at its 13th block; another rank waits for that at its third, so that blocks are left for it."""
    if os.environ["RANK"] != last and count > 2:
        kit.until(marker.exists)
    elif os.environ["RANK"] == last and count > 12:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("world", [1, 2])
def test_killed_preparation_continues(tools, tmp_path, small, monkeypatch, world):
    fields = fields_of(tools, "packed")
    with pytest.MonkeyPatch.context() as patch:
        count_blocks(patch, tmp_path)
        opened(fields, tmp_path / "straight")
        whole = encoded(tmp_path)
        (tmp_path / "calls").unlink()
    with pytest.MonkeyPatch.context() as patch:
        count_blocks(patch, tmp_path, 0, functools.partial(last_rank_dies, tmp_path / "dying", str(world - 1)))
        killed(fields, tmp_path / "cache", tmp_path / "out", world)
        (tmp_path / "calls").unlink()
    if world == 1:  # another rank does the work of one that died, until the launcher ends it
        assert digest(tmp_path / "cache") == {}  # nothing that counts as complete
    assert (ready := list((tmp_path / "cache").glob("prepared/*/piece_*.json")))
    count_blocks(monkeypatch, tmp_path)
    opened(fields, tmp_path / "cache")
    assert len(encoded(tmp_path)) <= len(whole) - len(ready)  # pieces that were ready are used
    assert digest(tmp_path / "cache") == digest(tmp_path / "straight") != {}


def test_mutant_that_writes_the_marker_first(tools, tmp_path, small, monkeypatch):
    """Such a cache seems complete before it is: half of it is opened, or it is found damaged."""
    fields = fields_of(tools, "rows")
    opened(fields, tmp_path / "straight")
    (stats,) = (tmp_path / "straight").glob("prepared/*/facts.json")
    original = preprocessing._run_with_helpers

    def marked(run, work, targets, *rest):
        targets[0].parent.mkdir(parents=True)
        shutil.copy(stats, targets[0].parent)
        original(run, work, targets, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocessing, "_run_with_helpers", marked)
        count_blocks(patch, tmp_path, 0, lambda n: n > 12 and os.kill(os.getpid(), signal.SIGKILL))
        killed(fields, tmp_path / "cache", tmp_path / "out")
    assert digest(tmp_path / "cache").keys() < digest(tmp_path / "straight").keys()  # what the test above would see
    with pytest.raises(UsageError, match=r"bytes instead of \d+: remove the folder"):
        opened(fields, tmp_path / "cache")


# ---- the process group does not wait -------------------------------------------------------------------------------------


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
    rows = [{"input_ids": generator.integers(0, 400, n).tolist()} for n in lengths]
    file = kit.write_jsonl(tmp_path / "ids.jsonl", rows)
    fields = {"model_config": tools / "gpt2.yaml", "packing": True, "max_length": 128, "cache_dir": tmp_path / "cache"}
    _, splits = kit.open_data(**fields, train_file=file)
    ids = fill(splits["train"], 128)
    texts = json.loads("[" + ",".join((tools / "texts.jsonl").read_text().splitlines()) + "]")
    generator.shuffle(texts)
    file = kit.write_jsonl(
        tmp_path / "texts.jsonl", [{"text": row["text"][: 4 + i % 300]} for i, row in enumerate(texts * 8)]
    )
    _, splits = kit.open_data(**fields, train_file=file, tokenizer_name=tools / "tokenizer")
    of_texts = fill(splits["train"], 128)
    print(f"ids {ids:.4f}, texts {of_texts:.4f}")
    assert min(ids, of_texts) >= 0.98


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
