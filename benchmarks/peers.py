"""Benchmark of preparation against the usual maps: chats against TRL's, texts against `datasets` with the tokenizer.

    python benchmarks/peers.py [--only chats|texts] [--turns 3]

From a .jsonl file to rows of ids: 3,000 chats of six turns in one process, with masks (needs trl); 100,000 texts in two
processes. Both sides alternate in one run. Prints medians of the ratios of wall time and of CPU time; writes results.json.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import datasets
import numpy as np
import pyarrow.compute as pc
import xxhash
from transformers import AutoTokenizer

from benchmarks.data import opened
from engine.config.run_config import RunConfig
from engine.storage import cache_folder

TEMPLATE = REPOSITORY / "configs/chat_templates/chatml.jinja"
CHATS, TURNS, TEXTS = 3_000, 6, 100_000
LENGTH = 2048


def words(draw: random.Random, count: int) -> str:
    """Return random words, so that no part of a text is known from another one."""
    return " ".join(
        f"{draw.choice(('def', 'return', 'value', 'of', 'list'))}{draw.randrange(10**4)}" for _ in range(count)
    )


def write_rows(file: Path, kind: str, count: int) -> Path:
    draw = random.Random(0)
    with open(file, "w", encoding="utf-8") as out:
        for _ in range(count):
            row: dict = {"text": words(draw, 20)}
            if kind == "chats":
                row = {
                    "messages": [
                        {"role": ("user", "assistant")[i % 2], "content": words(draw, 30)} for i in range(TURNS)
                    ]
                }
            out.write(json.dumps(row) + "\n")
    return file


def tokenizer_folder() -> Path:
    return Path(cache_folder.sample_folder("stdlib_code", cache_folder.cache_root(RunConfig())), "tokenizer")


def tokenizer():
    return AutoTokenizer.from_pretrained(tokenizer_folder())


def ours(processes: int, folder: Path, file: Path):
    fields = {"tokenizer_name": tokenizer_folder(), "max_length": LENGTH, "preprocessing_num_workers": processes}
    return opened(folder, train_file=file, chat_template=TEMPLATE, **fields)[2]


def of_trl(folder: Path, file: Path):
    """Return the rows that TRL's trainer prepares, by its own code."""
    from trl import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    known = tokenizer()
    args = SFTConfig(
        output_dir=str(folder), assistant_only_loss=True, max_length=LENGTH, report_to=[], use_cpu=True, bf16=False
    )
    template = TEMPLATE.read_text(encoding="utf-8")
    trainer = SimpleNamespace(_tokenizer=known, chat_template=template, completion_only_loss=False)
    rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder))
    return SFTTrainer._prepare_dataset(trainer, rows, known, args, False, None, "train")


def of_datasets(folder: Path, file: Path):
    known = tokenizer()

    def encode(batch: dict) -> dict:
        return known([text + known.eos_token for text in batch["text"]], truncation=True, max_length=LENGTH)

    rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder))
    return rows.map(encode, batched=True, num_proc=2, remove_columns=["text"])


def seconds(prepare: Callable, file: Path) -> tuple[float, float, object]:
    """Return (wall time, CPU time with that of ended children, result) of a call with an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        began, before = time.perf_counter(), sum(os.times()[:4])
        rows = prepare(Path(name), file)
        times = time.perf_counter() - began, sum(os.times()[:4]) - before
        ids = rows.values("input_ids") if hasattr(rows, "values") else flat(rows)
    return *times, xxhash.xxh3_64_intdigest(ids.astype("int64").tobytes())


def flat(rows: datasets.Dataset) -> np.ndarray:
    return pc.list_flatten(rows.data.column("input_ids")).to_numpy()


def compare(kind: str, folder: Path, us: Callable, them: Callable, turns: int) -> dict:
    """Return and print the medians of both, and of the ratios of each turn."""
    few = write_rows(folder / "few.jsonl", kind, 100)
    for prepare in (us, them):  # imports
        seconds(prepare, few)
    file = write_rows(folder / f"{kind}.jsonl", kind, CHATS if kind == "chats" else TEXTS)
    measured = []
    for turn in range(turns):
        pair = [seconds(prepare, file) for prepare in ((us, them) if turn % 2 else (them, us))]
        mine, other = pair if turn % 2 else reversed(pair)
        assert mine[2] == other[2], "the ids differ"
        measured.append((*mine[:2], *other[:2], mine[0] / other[0], mine[1] / other[1]))
    names = ("ours", "ours_cpu", "theirs", "theirs_cpu", "ratio", "ratio_cpu")
    found = {key: statistics.median(column) for key, column in zip(names, zip(*measured, strict=True), strict=True)}
    print(
        f"{kind}: {found['ours']:.1f} s, {found['theirs']:.1f} s: {found['ratio']:.2f} × "
        f"(CPU {found['ours_cpu']:.1f}, {found['theirs_cpu']:.1f}: {found['ratio_cpu']:.2f} ×)",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["chats", "texts"])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    datasets.disable_progress_bars()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, them, processes in (("chats", of_trl, 1), ("texts", of_datasets, 2)):
            if args.only in (None, kind):
                results[kind] = compare(kind, Path(name), partial(ours, processes), them, args.turns)
    file = REPOSITORY / "benchmarks/results.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known["peers"] = known.get("peers", {}) | results
    file.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
