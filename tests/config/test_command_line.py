"""train.py and eval.py as typed: from any folder, without arguments, with --help, with --dry_run; make help."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import kit


def command(*words, folder: Path) -> subprocess.CompletedProcess:
    words = [str(word) for word in words]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_train_and_eval_from_other_folders_report_the_same_loss(files, tmp_path):
    recipe = kit.write_yaml(
        tmp_path / "recipe.yaml",
        {
            "model_config": "configs/models/llama_small.yaml",  # found in the repository
            "train_file": "here.jsonl",  # found in the working directory
            "validation_file": str(files / "validation.jsonl"),
            "max_eval_examples": 20,
            "global_batch_size": 4,
            "per_device_batch_size": 2,
            "max_steps": 2,
        },
    )
    kit.write_jsonl(tmp_path / "here.jsonl", [{"input_ids": [1, 2, 3, n]} for n in range(9)])
    done = command(sys.executable, kit.REPOSITORY / "train.py", "--config", recipe, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = kit.Run(tmp_path / "runs" / "recipe")
    assert str(run.folder.resolve()) in done.stdout

    (tmp_path / "elsewhere").mkdir()
    words = ["--checkpoint", run.folder, "--output_dir", "scores"]
    codes, [printed] = kit.run_command("eval.py", *words, folder=tmp_path / "elsewhere")
    assert codes == [0], printed
    values = json.loads((tmp_path / "elsewhere" / "scores" / "eval.json").read_text())
    reported = run.kind("eval")[-1]
    assert values["loss"] == reported["loss"]
    assert values["examples"] == reported["examples"] == 20
    assert str(reported["loss"]) in printed  # to the last digit
    assert "global batch" not in printed  # only training has one


@pytest.fixture
def plan(files, tmp_path):
    """Return a function that prints the plan of a run with the given flags."""

    def dry_run(**flags) -> str:
        values = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "output_dir": "run"}
        values |= {"global_batch_size": 32, "per_device_batch_size": 4, "dry_run": "true"} | flags
        folder = tmp_path / "here"
        folder.mkdir(exist_ok=True)
        codes, [output] = kit.run_command("train.py", *kit.flags(**values), folder=folder)
        assert codes == [0], output
        assert not list(folder.iterdir())  # a dry run writes nothing
        return output

    return dry_run


def row(output: str, name: str) -> str:
    return re.search(rf"^  {name}  +(.*)$", output, re.MULTILINE)[1]


def test_dry_run_prints_the_plan(files, plan):
    output = plan(validation_file=files / "validation.jsonl", num_train_epochs=2, learning_rate=1e-3, warmup_steps=4)
    tokens = sum(len(json.loads(line)["input_ids"]) for line in (files / "train.jsonl").read_text().splitlines())
    assert row(output, "training data").startswith(f"1,003 rows, {tokens:,} tokens")
    assert row(output, "evaluation data").startswith("103 rows")
    # 1003 = 31 × 32 + 11
    steps = "64 of 32 examples = 2.00 epochs of 32 steps; the last step of an epoch has 11 examples"
    assert row(output, "steps") == steps
    assert row(output, "tokens") == f"{2 * tokens:,} in the whole run"
    corners = re.findall(r"([\d.e+-]+) at step (\d+)", row(output, "learning rate"))
    assert corners == [("0.00e+00", "0"), ("1.00e-03", "4"), ("5.33e-04", "32"), ("1.67e-05", "63")]
    # embeddings and head 2 × 500 × 32; a layer: q, o 32 × 32, k, v 32 × 16, three of 32 × 64, two norms of 32; one norm
    parameters = 2 * 500 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    assert row(output, "parameters") == f"{parameters:,} ({parameters:,} trainable) in float32"
    assert row(output, "memory").startswith(
        f"{4 * 4 * parameters / 1024:.3g} KiB per device"
    )  # weights, gradients, 2 moments
    assert row(output, "disk").endswith("in run")
