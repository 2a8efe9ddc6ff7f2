"""Runs that every technique must pass: the same weights however a step is split, and those of a plain loop.

`check_splits` trains on 1, 4 and 2 processes with accumulation 1, 1 and 4 and resumes one of these runs, `Plain` is the
independent loop, `check_resume` resumes from the middle, `check_fsdp2` shards the model.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.helpers import kit

ROWS, STEPS = 16, 5  # the global batch is the whole dataset, so that a plain loop needs no order of rows
# (processes, per_device_batch_size): accumulation 1, 1, 4
SPLITS = [(1, 16), (4, 4), (2, 2)]


def files(folder) -> dict:
    """Return the fields of a run without dropout in float64 on 16 rows of different lengths; Adam with a constant rate."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 12, ROWS)
    rows = [{"input_ids": generator.integers(0, 50, n).tolist()} for n in lengths]
    off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    return {
        "model_config": kit.write_yaml(Path(folder, "gpt2.yaml"), kit.TINY | off),
        "train_file": kit.write_jsonl(Path(folder, "train.jsonl"), rows),
        "validation_file": kit.write_jsonl(Path(folder, "validation.jsonl"), rows[:5]),
        "dtype": "float64",
        "global_batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_steps": 2,
        "save_total_limit": 10,
    }


def with_dropout(folder, fields: dict) -> dict:
    """Return the fields of the same run with dropout 0.2."""
    return fields | {"model_config": kit.write_yaml(Path(folder, "dropout.yaml"), kit.TINY)}


def train(folder, fields: dict, world: int = 1, micro: int = ROWS, **more) -> kit.Run:
    """Train on `world` processes with micro-batches of `micro` rows; `env` and `units` go to kit.run_training."""
    rest = {name: more.pop(name) for name in ("env", "units", "timeout") if name in more}
    argv = kit.flags(**(fields | {"per_device_batch_size": micro} | more))
    return kit.run_training(world, folder, *argv, **rest)


def check_splits(
    folder, fields: dict, reference: dict | None = None, bar: float = 1e-10, dropout: dict | None = None
) -> kit.Run:
    """Assert that the weights agree for all splits, with `reference` if given; return the first run.

    The run on two processes is also resumed from step 2, and must end bitwise as before. `dropout`: fields of a run with
    dropout; its runs are compared for each size of a micro-batch."""
    runs = {split: train(Path(folder, f"{split[0]}x{split[1]}"), fields, *split) for split in SPLITS}
    first = runs[1, 16]
    expected = first.weights if reference is None else {name: reference[name] for name in first.weights}
    for split, run in runs.items():
        assert kit.distance(run.weights, expected) <= bar, f"(processes, micro-batch) = {split}"
    _check_resumed(runs[2, 2], Path(folder, "resumed"), fields, 2, 2)
    if dropout:
        by_world = [train(Path(folder, f"dropout{world}"), dropout, world, 2) for world in (1, 4)]
        assert kit.distance(by_world[1].weights, by_world[0].weights) <= bar
        assert kit.distance(by_world[0].weights, first.weights) > 1e-6  # there was dropout
    return first


def check_resume(
    folder, fields: dict, world: int = 2, micro: int = 4, env: dict | None = None, bar: float = 0.0, units: int = 2
) -> kit.Run:
    """Assert that a run resumed from step 2 ends as the straight one; bitwise with `bar` 0. Return the straight run."""
    straight = train(Path(folder, "straight"), fields, world, micro, env=env, units=units)
    _check_resumed(straight, Path(folder, "resumed"), fields, world, micro, bar, env=env, units=units)
    return straight


def _check_resumed(
    straight: kit.Run, resumed: Path, fields: dict, world: int, micro: int, bar: float = 0.0, **launch
) -> None:
    """Resume a copy of `straight` from its first checkpoint; assert that it ends the same, bitwise with `bar` 0."""
    again = train(kit.rewind(straight.folder, fields["save_steps"], resumed), fields, world, micro, **launch)
    assert kit.distance(again.weights, straight.weights) <= bar
    if not bar:
        assert kit.timeless(again.folder) == kit.timeless(straight.folder)
        last = [sorted((run.folder / "checkpoints").iterdir())[-1] for run in (straight, again)]
        for part in sorted(last[0].glob("*.safetensors")):  # also what the technique saves beside the model
            assert part.read_bytes() == (last[1] / part.name).read_bytes(), part.name


def check_fsdp2(folder, fields: dict, bar: float = 1e-10) -> None:
    """Assert that FSDP2 on two processes ends with the weights of one process in float64, and that it resumes.

    In float32, what a division by a small norm makes of rounding depends on the kernels of the CPU."""
    # With Adam's default epsilon, gradients that are zero except for rounding would become whole steps.
    fields = fields if fields.get("optim") == "sgd" else {"adam_epsilon": 1e-4} | fields
    one = train(Path(folder, "one"), fields, 1, 4)
    env = kit.where("fsdp2", 2, mixed_precision="no")
    sharded = check_resume(Path(folder, "fsdp2"), fields, 2, 4, env, bar, units=1)
    assert kit.distance(sharded.weights, one.weights) <= bar


# ---- the independent loop ----------------------------------------------------------------------------------------------


class Plain:
    """One process, one batch, plain torch: the model and data of `files`, and its loss as one mean over all targets."""

    def __init__(self, fields: dict):
        names = ("model_config", "train_file", "dtype")
        task, splits = kit.open_data(**{name: fields[name] for name in names}, output_dir="unused")
        torch.manual_seed(42)
        self.model = task.build(None).train()
        rows = splits["train"].rows(range(ROWS))
        self.batch = task.collate(rows, training=True)
        self.task = task

    def loss(self) -> torch.Tensor:
        """Return the mean cross-entropy of next tokens, by torch on full logits."""
        logits = self.model(input_ids=self.batch.inputs["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.batch.inputs["targets"].flatten())

    def optimizer(self, kind=torch.optim.AdamW, **options) -> torch.optim.Optimizer:
        """Return an optimizer that decays parameters with two dimensions or more, as the project does."""
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return kind(groups, lr=1e-2, **options)

    def descend(self, optimizer, change: Callable[[int], object] = lambda step: None) -> dict[str, torch.Tensor]:
        """Train by plain steps; `change(step)` may change the gradient before the update. Return the weights by name."""

        def update(step: int) -> None:
            optimizer.zero_grad()
            self.loss().backward()
            change(step)
            optimizer.step()

        return self.train(update)

    def train(self, update: Callable[[int], None], steps: int = STEPS) -> dict[str, torch.Tensor]:
        """Call `update(step)` for each step; return the weights by name."""
        for step in range(steps):
            update(step)
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}
