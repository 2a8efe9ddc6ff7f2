"""Bitwise comparison of two commits: the same small float64 trainings in both, every number and tensor compared.

    make same BASE=HEAD~1 [ARGS='--only two_processes']

For a change that must not change numbers: refactoring, speed. The newer side is this folder as it is, with uncommitted
changes. Tests: tests/addons/tools/test_same.py.
"""

import argparse
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TIMES = ("seconds", "tokens_per_second", "data_seconds", "tflops", "mfu", "gpu_memory_gib")  # no two runs share them
MODEL = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1, "max_position_embeddings": 64}
FLAGS = {"dtype": "float64", "seed": 7, "max_steps": 20, "eval_steps": 5, "save_steps": 10, "logging_steps": 1}
FLAGS |= {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 3e-3}
CASES = {  # name -> (processes, flags)
    "one_process": (1, {}),
    "two_processes": (2, {}),
    "packed": (1, {"packing": "true", "max_length": 48}),
    "loss_options": (1, {"label_smoothing_factor": 0.1, "z_loss": 1e-3}),
    "sgd_cosine": (1, {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 4}),
}


def write_inputs(folder: Path) -> None:
    """Write 230 rows of random ids and the model's configuration."""
    rng = random.Random(0)
    rows = [json.dumps({"input_ids": [rng.randrange(1, 64) for _ in range(rng.randrange(3, 40))]}) for _ in range(230)]
    (folder / "train.jsonl").write_text("\n".join(rows[:200]) + "\n")
    (folder / "validation.jsonl").write_text("\n".join(rows[200:]) + "\n")
    (folder / "model.json").write_text(json.dumps(MODEL))


def copy_commit(revision: str, folder: Path) -> None:
    """Write the files of a commit to `folder`."""
    archive = subprocess.run(["git", "archive", revision], cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode:
        sys.exit(f"error: BASE={revision}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def train(checkout: Path, inputs: Path, out: Path, processes: int, flags: dict) -> dict[str, object]:
    """Train in a checkout; return its metrics lines without times, and a hash of each file of tensors."""
    files = {"model_config": "model.json", "train_file": "train.jsonl", "validation_file": "validation.jsonl"}
    values = FLAGS | flags | {name: inputs / file for name, file in files.items()}
    values |= {"resume": "never", "output_dir": out, "cache_dir": f"{out}_cache"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), "train.py"]
    command += [str(word) for name, value in values.items() for word in (f"--{name}", value)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: train.py in {checkout} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    result: dict[str, object] = {}
    for text in (out / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        name = f"{line['kind']} line of step {line['step']}"
        result[name] = {key: value for key, value in line.items() if key not in TIMES}
    for file in sorted(out.rglob("*.safetensors")):
        result[str(file.relative_to(out))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return result


def differences(old: dict, new: dict) -> list[str]:
    """Return a line for each value that differs, or that only one side has."""
    lines = []
    for name in old | new:
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += [f"{name}: {key}: {before.get(key)} → {after.get(key)}" for key in before | after
                      if before.get(key) != after.get(key)]  # fmt: skip
        elif before != after:
            lines.append(f"{name} differs" if before and after else f"{name}: only {'before' if before else 'after'}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="make same", description=__doc__.split("\n")[0])
    parser.add_argument("base", help="the commit to compare this folder with")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    count = 0
    with tempfile.TemporaryDirectory(prefix="same-") as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        (folder / "base").mkdir()
        copy_commit(options.base, folder / "base")
        for name in options.only:
            old = train(folder / "base", folder, folder / "runs" / f"{name}_base", *CASES[name])
            new = train(REPOSITORY, folder, folder / "runs" / name, *CASES[name])
            lines = differences(old, new)
            verdict = f"{len(lines)} DIFFERENCES" if lines else f"bitwise equal, {len(new)} lines and files"
            print(f"{name}: {verdict}")
            print(*(f"  {line}" for line in lines[:20]), sep="\n", end="\n" if lines else "")
            count += len(lines)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
