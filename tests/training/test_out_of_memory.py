"""A rank that runs out of memory ends all ranks with the size to resume with; the resumed run computes the same."""

import os
import re

import pytest
import torch

from src.tasks import causal_lm
from tests.helpers import kit, technique_runs

LIMIT = 4  # rows of a micro-batch for which the last rank has memory


def allocate() -> None:
    torch.empty(1 << 50)  # RuntimeError: DefaultCPUAllocator: can't allocate memory


def in_forward(loss: torch.Tensor, model) -> None:
    allocate()


def after_other_gradients(loss: torch.Tensor, model) -> None:
    model.transformer.wte.weight.register_hook(lambda gradient: allocate())


def limit_memory(monkeypatch, how=in_forward) -> None:
    """Let the last rank run out of memory in training, in micro-batches of more than LIMIT rows."""
    loss = causal_lm.Task.loss

    def limited(self, model, inputs):
        sums = loss(self, model, inputs)
        is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if model.training and is_last_rank and len(inputs["input_ids"]) > LIMIT:
            how(sums["loss"], model)
        return sums

    monkeypatch.setattr(causal_lm.Task, "loss", limited)


@pytest.mark.parametrize("launch, how", [("ddp", after_other_gradients), ("fsdp2", in_forward)])
def test_all_ranks_end_and_the_last_line_says_what_to_halve(tmp_path, monkeypatch, launch, how):
    limit_memory(monkeypatch, how)
    values = technique_runs.files(tmp_path) | {"dtype": "float32", "per_device_batch_size": 8}
    env = kit.where("fsdp2", 2, mixed_precision="no") if launch == "fsdp2" else None
    argv = kit.flags(**values, output_dir=tmp_path / "run")
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "cwd", world=2, env=env)
    assert codes == [1, 1]
    assert "can't allocate memory" in texts[1]
    last = texts[1].rstrip().splitlines()[-1]
    assert re.search("rank 1 ran out of memory: give half the --per_device_batch_size.*resumes from the last", last)
    assert "ran out of memory" not in texts[0]  # one message
