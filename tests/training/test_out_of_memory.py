"""A rank that runs out of memory: all ranks repeat the step in smaller micro-batches, or all end with one message."""

import os

import pytest
import torch

from src.checkpointing.checkpoint_list import read_state
from src.distributed.step_buffers import StepBuffers
from src.reporting import ledger
from src.tasks import causal_lm
from src.training import out_of_memory
from tests.helpers import kit, technique_runs

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
    "name, how, micro", [("fsdp2", in_forward, 8), ("ddp", after_other_gradients, 8), ("ddp", in_forward, 1)]
)
def test_all_ranks_end_with_the_command_to_resume(tmp_path, monkeypatch, name, how, micro):
    limit_memory(monkeypatch, how)
    monkeypatch.setattr(f"{__name__}.LIMIT", min(LIMIT, micro - 1))
    fields = technique_runs.files(tmp_path) | {"dtype": "float32", "per_device_batch_size": micro}
    env = kit.where("fsdp2", 2, mixed_precision="no") if name == "fsdp2" else None
    argv = kit.flags(**fields, output_dir=tmp_path / "run")
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "cwd", world=2, env=env)
    assert codes == [1, 1]
    assert ("--per_device_batch_size 4" if micro == 8 else "--gradient_checkpointing") in texts[1]
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
