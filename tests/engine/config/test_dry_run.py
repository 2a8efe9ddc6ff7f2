"""--dry_run prints the plan, without a process group, and without memory for a large model."""

import json
import re
from pathlib import Path

import pytest

import train
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from tests.helpers import kit, plain_task


def dry_run(plain: dict, **fields) -> None:
    """Run train.py --dry_run in this process."""
    train.main([str(word) for word in plain_task.flags(plain, dry_run=True, **fields)])


def test_plan_counts_what_is_trained_of_a_model_without_weights(plain, monkeypatch, tmp_path, capsys):
    """`build` is asked for an empty model only, so billions of parameters need no memory."""
    asked, build = [], plain_task.Task.build
    monkeypatch.setattr(
        plain_task.Task, "build", lambda task, weights=None, empty=False: asked.append(empty) or build(task, None, True)
    )
    dry_run(plain, output_dir=tmp_path / "run", freeze=["enter.*", "leave.weight"])
    assert asked == [True]
    assert "1,436 (1,100 trainable) in float64" in capsys.readouterr().out
    with pytest.raises(UsageError, match="freeze: nope"):
        dry_run(plain, output_dir=tmp_path / "run", freeze=["nope"])


@pytest.mark.parametrize("size, warmup, warned", [(8, 50, True), (1, 2, False)])
def test_few_steps_are_warned_of(plain, tmp_path, capsys, size, warmup, warned):
    few = {"max_steps": "none", "global_batch_size": size, "per_device_batch_size": 1, "warmup_steps": warmup}
    rows = tmp_path / "few.jsonl"
    rows.write_text("".join(Path(plain["train_file"]).read_text().splitlines(keepends=True)[:20]))
    dry_run(plain, **few, train_file=rows, output_dir=tmp_path / "run")
    printed = capsys.readouterr().out
    assert ("an epoch has only 3 steps of up to 8 examples" in printed) == warned
    assert ("fills all" in printed) == warned


def row(output: str, name: str) -> str:
    return re.search(rf"^  {name}  +(.*)$", output, re.MULTILINE)[1]


def test_dry_run_prints_the_plan(files, tmp_path):
    values = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "output_dir": "run"}
    values |= {"validation_file": files / "validation.jsonl", "num_train_epochs": 2}
    values |= {"global_batch_size": 32, "per_device_batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 4}
    codes, [output] = kit.run_command("train.py", *kit.flags(**values), "--dry_run", folder=tmp_path / "here")
    assert codes == [0], output
    assert not list((tmp_path / "here").iterdir())  # a dry run writes nothing
    tokens = sum(len(json.loads(line)["input_ids"]) for line in (files / "train.jsonl").read_text().splitlines())
    assert row(output, "training data").startswith(f"1,003 rows, {tokens:,} tokens")
    assert row(output, "evaluation data").startswith("103 rows")
    # 1003 = 31 × 32 + 11
    steps = "64 of 32 examples = 2.00 epochs of 32 steps; the last step of an epoch has 11 examples"
    assert row(output, "steps") == steps
    assert row(output, "tokens") == f"{2 * tokens:,} in the whole run"
    shares = re.findall(r"([\d.]+)%: rate 1\.00e-03, weight decay ([\d.]+)", row(output, "parameter groups"))
    assert [float(decay) for _, decay in shares] == [RunConfig.weight_decay, 0.0]
    assert sum(float(share) for share, _ in shares) == pytest.approx(100, abs=0.11)
    corners = re.findall(r"([\d.e+-]+) at step (\d+)", row(output, "learning rate"))
    assert corners == [("0.00e+00", "0"), ("1.00e-03", "4"), ("5.33e-04", "32"), ("1.67e-05", "63")]
    # embeddings and head 2 × 500 × 32; a layer: q, o 32 × 32, k, v 32 × 16, three of 32 × 64, two norms of 32; one norm
    parameters = 2 * 500 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    assert row(output, "parameters") == f"{parameters:,} ({parameters:,} trainable) in float32"
    assert row(output, "memory").startswith(
        f"{4 * 4 * parameters / 1024:.3g} KiB per device"
    )  # weights, gradients, 2 moments
    assert row(output, "disk").endswith("in run")


@pytest.mark.parametrize("width, is_warned", [(2**15, True), (32, False)])
def test_plan_that_needs_more_memory_than_the_device_has(files, tmp_path, capsys, width, is_warned):
    """Of a model without values, of up to 2 TB with gradients and moments."""
    model = kit.write_yaml(
        tmp_path / "llama.yaml", kit.LLAMA | {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 20}
    )
    fields = {"model_config": model, "train_file": files / "train.jsonl", "output_dir": tmp_path / "run"}
    train.main(kit.flags(**fields, max_steps=10, dry_run=True))
    warned = re.search(
        r"warning: memory: .* need ([\d.]+ \w+) on each device, which has ([\d.]+ \w+)", capsys.readouterr().err
    )
    assert bool(warned) == is_warned


@pytest.mark.parametrize("steps, is_warned", [(10**12, True), (10, False)])
def test_plan_that_needs_more_disk_than_is_free(plain, tmp_path, capsys, steps, is_warned):
    fields = {"max_steps": steps, "save_steps": 1, "save_keep_every": 1, "output_dir": tmp_path / "run"}
    dry_run(plain, **fields)
    found = re.search(r"output_dir: (\S+) needs ([\d,]+) bytes .* but ([\d,]+) bytes are free", capsys.readouterr().err)
    assert bool(found) == is_warned
    if found:
        needed, free = (int(number.replace(",", "")) for number in found.groups()[1:])
        assert found[1] == str(tmp_path / "run")
        assert needed > 8 * 1436 * 10**12 > free > 0
