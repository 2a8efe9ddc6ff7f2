"""Bitwise comparison of two commits, or of two runs.

    make same BASE=HEAD~1 [ARGS='--only two_processes']
    make same RUNS='runs/a runs/b'

Of two commits: the same small float64 trainings in both, every number and tensor compared. For a change that must not
change numbers: refactoring, speed. The newer side is this folder as it is, with uncommitted changes.
Of two runs: the hashes of their weights at each checkpoint that both have, then their lines, up to the first step that
differs; as with `exact_sums` on other numbers of processes. Tests: tests/addons/tools/test_same.py.
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


# ---- two runs --------------------------------------------------------------------------------------------------------


def hashes_of(run: Path) -> dict[str, str]:
    """Return the SHA-256 of the weights in each checkpoint, by step."""
    states = {
        path.parent.name: json.loads(path.read_text()) for path in sorted(run.glob("checkpoints/step_*/state.json"))
    }
    return {name: state["weights_sha256"] for name, state in states.items() if state.get("weights_sha256")}


def lines_of(run: Path) -> dict[tuple[int, str, int], dict]:
    """Return the lines of metrics.jsonl without times by step, kind and number, the first step first."""
    file = run / "metrics.jsonl"
    if not file.exists():
        sys.exit(f"error: {run} has no metrics.jsonl: give the folders of two runs")
    lines: dict[tuple[int, str, int], dict] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        numbered = sum((line["step"], line["kind"]) == key[:2] for key in lines)
        lines[line["step"], line["kind"], numbered] = {key: v for key, v in line.items() if key not in TIMES}
    return dict(sorted(lines.items()))


def compare_runs(one: Path, other: Path) -> int:
    """Print what is equal, and the first difference; return 1 if there is one, else 0."""
    lines, more = lines_of(one), lines_of(other)
    hashes, others = hashes_of(one), hashes_of(other)
    steps = [step for step in hashes if step in others]
    differing = [step for step in steps if hashes[step] != others[step]]
    for step in steps:
        verdict = f"{hashes[step][:16]} and {others[step][:16]}" if step in differing else f"equal, {hashes[step]}"
        print(f"weights sha256 of {step}: {verdict}")
    if not steps:
        print("no checkpoint of one step is in both runs")
    first = next((key for key in sorted(lines | more) if lines.get(key) != more.get(key)), None)
    if first is not None:
        step, kind, _ = first
        name = f"the {kind} line of step {step}"
        print(f"first difference: {differences({name: lines.get(first)}, {name: more.get(first)})[0]}")
    else:
        print(f"{len(lines)} lines: equal")
    return int(bool(differing) or first is not None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make same", description=__doc__.split("\n")[0])
    parser.add_argument("base", help="the commit to compare this folder with, or a run")
    parser.add_argument("other", nargs="?", type=Path, help="another run, to compare with the run `base`")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    if options.other:
        return compare_runs(Path(options.base), options.other)
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
