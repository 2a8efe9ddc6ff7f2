"""Benchmark of data: reading by id, tokenizing on several ranks, the second start. Writes results.json; see README.md.

    python benchmarks/data.py [--only read|prepare] [--megabytes 200]

All cases are measured in one run and compared as ratios. RAYON_NUM_THREADS=1 gives the tokenizer one thread per rank.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from engine.config import parsing, validation
from engine.config.run_config import RunConfig
from engine.find_tasks import OPTIONS, make_task
from engine.plan.batch_plan import PlanConfig, training_order
from engine.plan.data_loader import read_batches
from engine.plan.dataset import prepare_datasets
from engine.rows.prepared_split import ROWS
from engine.storage import cache_folder

MODEL = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048}


def opened(folder: Path, **fields):
    """Return (config, task, training split), made as in train.py."""
    (folder / "model.yaml").write_text(json.dumps(MODEL))
    flags = {"model_config": folder / "model.yaml", "cache_dir": folder / "cache"} | fields
    run, options = parsing.parse([word for name, value in flags.items() for word in (f"--{name}", str(value))], OPTIONS)
    validation.check(run, options)
    task = make_task(run, options)
    return run, task, prepare_datasets(run, task, wanted=("train",))["train"]


# ---- reading by id ---------------------------------------------------------------------------------------------------


def rows_of(folder: Path, lengths: np.ndarray) -> Path:
    """Write a Parquet file with rows of random token ids of the given lengths."""
    import pyarrow as pa
    import pyarrow.parquet

    ids = np.random.default_rng(0).integers(0, 32000, int(lengths.sum()), dtype=np.int32)
    column = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), ids)
    pyarrow.parquet.write_table(pa.table({"input_ids": column}), folder / "rows.parquet")
    return folder / "rows.parquet"


def plain_loader(split, micro: int, form: str | None):
    """Return a plain DataLoader over the same rows in a `datasets.Dataset`, with the padding of our loader."""
    import datasets

    rows = datasets.Dataset.from_file(str(split.folder / ROWS)).select_columns(["input_ids"]).with_format(form)

    def collate(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        ids, labels = np.zeros((len(batch), longest), np.int64), np.full((len(batch), longest), -100, np.int64)
        for i, row in enumerate(batch):
            n = len(row["input_ids"])
            ids[i, :n] = row["input_ids"]
            labels[i, : n - 1] = row["input_ids"][1:]
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}, sum(
            len(row["input_ids"]) for row in batch
        )

    return torch.utils.data.DataLoader(rows, batch_size=micro, shuffle=True, collate_fn=collate)


def throughput(batches, seconds: float = 4.0) -> float:
    """Return the tokens per second of CPU time that `batches` delivers."""
    batches, tokens = iter(batches), 0
    for _ in range(5):
        next(batches)
    began = time.process_time()
    while (spent := time.process_time() - began) < seconds and (item := next(batches, None)):
        tokens += item[1] if isinstance(item[1], int) else item[1].tokens
    return tokens / spent


def reading() -> dict:
    torch.set_num_threads(1)
    found = {}
    rng = np.random.default_rng(1)
    kinds = {
        "rows of 1,024": np.full(40_000, 1024),
        "ragged short rows": 3 + (94 * rng.random(400_000) ** 2.5).astype(int),
    }
    for name, lengths in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            file = rows_of(Path(folder), lengths)
            run, task, split = opened(Path(folder), train_file=file, max_length=1024, global_batch_size=256)
            ours, plain = [], {}
            for turn in range(3):
                order = training_order(PlanConfig(len(split), 256, 8, turn, split.lengths), 0, 1, 0, 100_000)
                ours.append(throughput(read_batches(split, task, order, run, False)))
                for form in (None, "numpy", "arrow") if turn == 0 else (max(plain, key=plain.get),):
                    if form != "arrow":  # its rows are tables
                        plain[form] = max(plain.get(form, 0), throughput(plain_loader(split, 8, form)))
            best = max(plain.values())
            found[name] = {"million_tokens_per_second": max(ours) / 1e6, "plain": best / 1e6, "ratio": max(ours) / best}
            print(
                f"{name}: {max(ours) / 1e6:.2f} M tokens/s per core, plain {best / 1e6:.2f}: {max(ours) / best:.1f} ×"
            )
    return found


# ---- preparing -------------------------------------------------------------------------------------------------------


def texts(folder: Path, megabytes: int) -> Path:
    """Write the source files of the standard library to a file, again and again in a new order up to `megabytes`."""
    file, rng = folder / "texts.jsonl", np.random.default_rng(0)
    lines = (
        Path(cache_folder.sample_folder("stdlib_code", cache_folder.cache_root(RunConfig())), "train.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [json.loads(line)["text"] for line in lines]
    size = 0
    with open(file, "w", encoding="utf-8") as out:
        while size < megabytes * 1_000_000:
            for i in rng.permutation(len(rows)):
                out.write(json.dumps({"text": rows[i]}) + "\n")
                size += len(rows[i])
    return file


def child(folder: Path, file: str) -> None:
    """Prepare the data on one rank; print seconds, memory, rows and the share of filled positions."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(2):  # in the second pass all modules are imported
        began = time.perf_counter()
        run, task, split = opened(
            folder, train_file=file, tokenizer_name="stdlib_code", max_length=1024, packing="true"
        )
        order = training_order(PlanConfig(len(split), 8, 8, 0, split.lengths), 0, 1, 0, 1)
        next(read_batches(split, task, order, run, False))
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    filled = split.stats["tokens"] / (1024 * len(split))
    print(json.dumps([*times, before / 1e6, peak / 1e6, split.stats["rows"], filled]))


def ranks(world: int, folder: Path, file: Path) -> list[list]:
    """Prepare on `world` ranks with the variables of a launcher; return the values that each rank printed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    common |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(world)}
    command = [sys.executable, __file__, "--child", str(folder), str(file)]
    started = [
        subprocess.Popen(
            command, env=common | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(world)
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def preparing(megabytes: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        file = texts(root, megabytes)
        out = {}
        for world in (1, 2):
            (root / str(world)).mkdir()
            out[world] = ranks(world, root / str(world), file)
        again = ranks(1, root / "2", file)[0]
    one, two = out[1][0], max(rank[0] for rank in out[2])
    assert len({rank[4] for world in out.values() for rank in world}) == 1, "two ranks made different rows than one"
    found = {
        "megabytes": megabytes,
        "seconds_on_one_rank": one[0],
        "two_ranks_against_one": one[0] / two,
        "peak_gb_per_rank": max(rank[3] for world in out.values() for rank in world),
        "of_that_imports_gb": one[2],
        "second_start_seconds": again[1],
        "second_start_with_imports_seconds": again[0],
        "filled": one[5],
    }
    print(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["read", "prepare"])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(Path(args.child[0]), args.child[1])
    results = {}
    if args.only != "prepare":
        results["data_read"] = reading()
    if args.only != "read":
        results["data_prepare"] = preparing(args.megabytes)
    file = REPOSITORY / "benchmarks" / "results.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
