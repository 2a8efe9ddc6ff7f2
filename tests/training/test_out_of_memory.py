"""A rank that runs out of memory: all ranks repeat the step in smaller micro-batches, or all end with one message."""

import json
import os
from pathlib import Path

import pytest
import torch

import train
from src.checkpointing.checkpoint_list import read_state
from src.distributed.step_buffers import StepBuffers
from src.reporting import ledger
from src.tasks import causal_lm, text_classification
from src.training import out_of_memory
from tests.helpers import batch_norm, kit, technique_runs

LIMIT = 4  # rows of a micro-batch for which the last rank has memory


def allocate() -> None:
    torch.empty(1 << 50)  # RuntimeError: DefaultCPUAllocator: can't allocate memory


def in_forward(loss: torch.Tensor, model) -> None:
    allocate()


def before_the_first_gradient(loss: torch.Tensor, model) -> None:
    loss.register_hook(lambda gradient: allocate())


def after_other_gradients(loss: torch.Tensor, model) -> None:
    model.transformer.wte.weight.register_hook(lambda gradient: allocate())


def limit_memory(monkeypatch, how=in_forward, error=None) -> None:
    """Let the last rank run out of memory in each micro-batch of more than LIMIT rows."""
    loss = causal_lm.Task.loss

    def limited(self, model, inputs):
        if model.training and len(inputs["input_ids"]) > LIMIT and is_last_rank():
            if error:
                raise error
            sums = loss(self, model, inputs)
            how(sums["loss"], model)
            return sums
        return loss(self, model, inputs)

    monkeypatch.setattr(causal_lm.Task, "loss", limited)


def limit_memory_in_pass(monkeypatch, number: int, task=causal_lm) -> None:
    """Let the last rank run out of memory in the pass over a window with this number, in more than LIMIT rows."""
    compute, loss, count = train.compute_gradient, task.Task.loss, [0]

    def counted(*args):
        count[0] += 1
        return compute(*args)

    def limited(self, model, inputs):
        if count[0] == number and model.training and len(inputs["input_ids"]) > LIMIT and is_last_rank():
            allocate()
        return loss(self, model, inputs)

    monkeypatch.setattr(train, "compute_gradient", counted)
    monkeypatch.setattr(task.Task, "loss", limited)


def is_last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


@pytest.mark.parametrize(
    "world, micro, sizes, logging_steps, how",
    [
        (1, 16, [8, 4], 3, before_the_first_gradient),
        (2, 8, [4], 1, before_the_first_gradient),
        (2, 8, [4], 3, in_forward),
        (2, 5, [2], 3, in_forward),  # two micro-batches on a rank: the first has no reduction
    ],
)
def test_step_is_repeated_with_the_same_examples(tmp_path, monkeypatch, world, micro, sizes, logging_steps, how):
    """With logging_steps 3 the totals of the next step tell; with 1 the ranks ask before they write a line."""
    fields = technique_runs.files(tmp_path) | {"logging_steps": logging_steps, "eval_steps": 2}
    straight = technique_runs.train(tmp_path / "straight", fields, world, micro)
    limit_memory(monkeypatch, how)
    run = technique_runs.train(tmp_path / "run", fields, world, micro)
    assert kit.distance(run.weights, straight.weights) <= 1e-10
    halved = [line["per_device_batch_size"] for line in run.kind("out_of_memory")]
    assert halved == sizes
    for kind in ("train", "eval"):
        assert [line["step"] for line in run.kind(kind)] == [line["step"] for line in straight.kind(kind)]
        losses = [[line["loss"] for line in found.kind(kind)] for found in (run, straight)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert run.kind("train")[-1]["skipped"] == 0
    assert ledger.compare(run.folder) is None
    assert ledger.compare(run.folder, straight.folder) is None
    progress = read_state(run.folder / "checkpoints/step_00000005")["progress"]
    assert progress["smaller_batch"] == {"given": micro, "used": sizes[-1]}


@pytest.mark.parametrize("world", [1, 2])
def test_techniques_count_a_repeated_step_once(tmp_path, monkeypatch, world):
    """Averages of weights, and the median of the gradient's norms, are those of a run with enough memory."""
    techniques = {
        "sam": {"rho": 0.1},
        "spike_watch": {"warmup": 2, "window": 4},
        "lookahead": {"k": 3},
        "ema": {"decay": 0.6},
        "swa": {"start": 2},
        "lawa": {"k": 3, "every": 1},
    }
    fields = technique_runs.files(tmp_path) | {"techniques": json.dumps(techniques), "logging_steps": 2}
    straight = technique_runs.train(tmp_path / "straight", fields, world, 8)
    limit_memory_in_pass(monkeypatch, 6)  # the second pass of step 3
    run = technique_runs.train(tmp_path / "run", fields, world, 8)
    assert [line["step"] for line in run.kind("out_of_memory")] == [3]
    for checkpoint in ("step_00000004", "step_00000005"):
        folders = [found.folder / "checkpoints" / checkpoint for found in (run, straight)]
        parts = [path.stem for path in sorted(folders[0].glob("*.safetensors"))]
        assert {"lookahead", "lawa", "swa", "ema", "spike_watch"} <= {*parts}
        for part in parts:
            found, expected = (kit.load_weights(folder, part) for folder in folders)
            for name, value in expected.items():
                assert torch.allclose(found[name], value, rtol=1e-7, atol=1e-10, equal_nan=True), (part, name)
        numbers = [read_state(folder)["numbers"] for folder in folders]
        assert numbers[0] == numbers[1]


def test_schedule_free_repeats_a_step(tmp_path, monkeypatch):
    """Its weights are in the model while the gradient is computed."""
    more = {"techniques": '{"schedule_free": null}', "adam_beta1": 0.0}
    fields = technique_runs.files(tmp_path) | more
    straight = technique_runs.train(tmp_path / "straight", fields, 1, 8)
    limit_memory_in_pass(monkeypatch, 3)
    run = technique_runs.train(tmp_path / "run", fields, 1, 8)
    assert run.kind("out_of_memory")
    assert kit.distance(run.weights, straight.weights) <= 1e-10


def test_running_statistics_count_a_repeated_step_once(tmp_path, monkeypatch):
    """The first pass of SAM has counted its micro-batches when the second one runs out of memory."""
    monkeypatch.setattr(text_classification.Task, "build", batch_norm.build)
    limit_memory_in_pass(monkeypatch, 4, text_classification)
    flags = batch_norm.recipe(tmp_path, max_steps=3, per_device_batch_size=8, techniques='{"sam": null}')
    run = kit.run_training(1, tmp_path / "run", *flags)
    assert [line["step"] for line in run.kind("out_of_memory")] == [2]
    assert run.weights["blocks.0.norm.num_batches_tracked"].item() == 3


def test_neftune_survives(tmp_path, monkeypatch):
    fields = technique_runs.files(tmp_path) | {"techniques": '{"neftune": null}', "max_steps": 2}
    limit_memory(monkeypatch)
    run = technique_runs.train(tmp_path / "run", fields, 2, 8)
    assert [line["step"] for line in run.kind("out_of_memory")] == [1]


def test_requested_save_waits_for_the_repeated_step(tmp_path, monkeypatch):
    """Nothing else is due at step 3, for which a save is requested and in which a rank runs out of memory."""
    update, folder, count = train.optimizer_step, tmp_path / "run", [0]

    def requesting(*args):
        count[0] += 1
        if count[0] == 2:
            (folder / "save").touch()
            kit.until(lambda: not (folder / "save").exists())
        return update(*args)

    monkeypatch.setattr(train, "optimizer_step", requesting)
    limit_memory_in_pass(monkeypatch, 3)
    more = {"logging_steps": 100, "save_steps": 100}
    run = technique_runs.train(folder, technique_runs.files(tmp_path) | more, 1, 16)
    assert run.kind("out_of_memory")
    saved = sorted(Path(run.folder, "checkpoints").iterdir())
    assert len(saved) == 2
    for checkpoint in saved:
        progress = read_state(checkpoint)["progress"]
        assert progress["updates"] == progress["step"]


def test_token_limit_is_halved(tmp_path, monkeypatch):
    fields = technique_runs.files(tmp_path) | {"per_device_batch_tokens": 64}
    straight = technique_runs.train(tmp_path / "straight", fields, 1, 4)
    limit_memory(monkeypatch, error=torch.OutOfMemoryError("CUDA out of memory"))
    run = technique_runs.train(tmp_path / "run", fields, 1, 4)
    assert kit.distance(run.weights, straight.weights) <= 1e-10
    assert run.kind("out_of_memory")[0]["per_device_batch_tokens"] == 32


def test_resumed_run_keeps_the_smaller_size(tmp_path, monkeypatch):
    limit_memory(monkeypatch)
    technique_runs.check_resume(tmp_path, technique_runs.files(tmp_path), 2, 8)
    assert "fewer than the run file says" in (tmp_path / "resumed.out" / "rank0.txt").read_text()
    config = (tmp_path / "resumed" / "config.yaml").read_text()
    assert "per_device_batch_size: 8" in config


def test_mutant_that_leaves_the_reduction_is_caught(tmp_path, monkeypatch):
    limit_memory(monkeypatch)

    def alone(strategy, module, window):
        strategy.out_of_memory = 1.0
        return [torch.zeros(())] * len(window), {}

    monkeypatch.setattr(out_of_memory, "give_up_gradient", alone)
    with pytest.raises(kit.RankFailed):
        technique_runs.train(tmp_path / "run", technique_runs.files(tmp_path), 2, 8, ddp_timeout=5, timeout=20)


@pytest.mark.parametrize(
    "name, how, micro, limit",
    [
        ("fsdp2", in_forward, 8, 4),
        ("ddp", after_other_gradients, 8, 4),
        ("ddp", in_forward, 1, 0),
        ("ddp", in_forward, 8, 0),  # halved down to one row, which is too much, too
    ],
)
def test_all_ranks_end_with_the_command_to_resume(tmp_path, monkeypatch, name, how, micro, limit):
    limit_memory(monkeypatch, how)
    monkeypatch.setattr(f"{__name__}.LIMIT", limit)
    fields = technique_runs.files(tmp_path) | {"dtype": "float32", "per_device_batch_size": micro}
    env = kit.where("fsdp2", 2, mixed_precision="no") if name == "fsdp2" else None
    argv = kit.flags(**fields, output_dir=tmp_path / "run")
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "cwd", world=2, env=env)
    assert codes == [1, 1]
    assert ("--per_device_batch_size 4" if limit else "--gradient_checkpointing") in texts[1]
    assert "can't allocate memory" in texts[1]


def test_spoiled_buffers_keep_their_values():
    norm = torch.nn.BatchNorm1d(3)
    buffers = StepBuffers(norm, torch.device("cpu"), all_ranks=False)
    for spoiled in (False, True):
        before = norm.running_mean.clone()
        with buffers.step():
            norm(torch.randn(4, 3))
            buffers.record()
            if spoiled:
                buffers.spoil()
        assert torch.equal(norm.running_mean, before) == spoiled


def test_other_errors_are_raised():
    with pytest.raises(RuntimeError, match="shape"):
        out_of_memory.check_survivable(RuntimeError("shape"), None, None, [])
