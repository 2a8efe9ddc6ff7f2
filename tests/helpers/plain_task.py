"""A task with a plain torch module, as a fork would write it: one file, and one line in OPTIONS (see `registered`).

A row holds eight numbers and four labels, some -100 (ignored); the weight is the number of labels. The
module is a small U-Net of linear layers with dropout. Options switch on what forks do: batch norm, tied weights, a
parameter that the loss does not use, a frozen teacher.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine import task as base
from engine.config.option import option
from engine.find_tasks import MODULES, OPTIONS
from engine.models.build_model import build_plain_model, saved_config
from engine.task import Batch
from tests.helpers import kit

NAME = "plain"
FEATURES, LABELS, CLASSES = 8, 4, 3


class Block(torch.nn.Module):
    def __init__(self, width: int, norm: bool, dropout: float):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(width, width), torch.nn.Dropout(dropout)
        self.norm = torch.nn.BatchNorm1d(width) if norm else torch.nn.Identity()

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Net(torch.nn.Module):
    """The outputs of the first two blocks are added to the inputs of the last two, as in a U-Net."""

    _no_split_modules = ["Block"]  # the units that FSDP2 shards

    def __init__(self, width=16, norm=False, dropout=0.1, tied=False, unused=False):
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(FEATURES, width), torch.nn.Linear(width, LABELS * CLASSES)
        self.blocks = torch.nn.ModuleList(Block(width, norm, dropout) for _ in range(4))
        self.register_buffer("shift", torch.full((FEATURES,), 0.5))
        if tied:
            self.blocks[3].linear.weight = self.blocks[0].linear.weight
        if unused:
            self.unused = torch.nn.Linear(width, 1)

    def forward(self, x):
        x = self.enter(x - self.shift)
        down = self.blocks[0](x)
        bottom = self.blocks[1](down)
        return self.leave(self.blocks[3](self.blocks[2](bottom) + down) + x).unflatten(-1, (LABELS, CLASSES))


class Taught(torch.nn.Module):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, x):
        return self.student(x)


@dataclass
class Options:
    width: int = option("width of the layers", 16, min=1)
    norm: bool = option("batch norm in each block", False)
    tied: bool = option("the first and the last block share a weight", False)
    unused: bool = option("a layer that the loss does not use", False)
    teacher: bool = option("train against a frozen random teacher as well", False)


class Task(base.Task):
    def load(self) -> None:
        names = ("width", "norm", "tied", "unused")
        self.net = {name: getattr(self.options, name) for name in names} | saved_config(self.cfg).get("net", {})

    def fingerprint(self) -> str:
        return "1"

    def inspect_columns(self, examples, split):
        from datasets import Features, List, Value

        counts = {name: Value("int64") for name in ("length", "targets", "cut")}
        return ["x", "y"], Features({"x": List(Value("float64")), "y": List(Value("int64"))} | counts)

    def encode(self, batch, locations):
        count = len(batch["x"])
        targets = [sum(label >= 0 for label in labels) for labels in batch["y"]]
        return {"x": batch["x"], "y": batch["y"], "length": [1] * count, "targets": targets, "cut": [0] * count}

    def build(self, weights=None, empty=False):
        student = build_plain_model(self.cfg, lambda: Net(**self.net), weights, empty)
        if not self.options.teacher:
            return student
        torch.manual_seed(0)
        return Taught(student, Net(width=32).to(getattr(torch, self.cfg.dtype)))

    def saved(self, model):
        return model.student if self.options.teacher else model

    def model_config(self):
        return {"net": self.net}

    def collate(self, rows, training):
        inputs = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("x", "y")}
        inputs["x"] = inputs["x"].to(getattr(torch, self.cfg.dtype))
        if training:  # a random augmentation
            inputs["x"] = inputs["x"] + 0.01 * torch.randn(inputs["x"].shape, dtype=inputs["x"].dtype)
        return Batch(inputs, float((inputs["y"] >= 0).sum()), len(rows), len(rows))

    def loss(self, model, inputs):
        logits, labels = model(inputs["x"]), inputs["y"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        if self.options.teacher and model.training:
            loss = loss + ((logits - model.teacher.eval()(inputs["x"])) ** 2).sum()
        if model.training:
            return {"loss": loss}
        right = (logits.argmax(-1).flatten() == labels).sum()
        return {"loss": loss, "right": right, "predictions": logits.argmax(-1)}

    def metrics(self, sums, weight):
        return {"accuracy": sums["right"] / weight}


@contextmanager
def registered(module=None, name: str = NAME) -> Iterator[str]:
    """Within, `--task NAME` is this file, or another module with Options and Task: a fork's file and line."""
    module = module or sys.modules[__name__]
    MODULES[name] = f"src.tasks.{name}"
    sys.modules[MODULES[name]], OPTIONS[name] = module, lambda: module.Options
    try:
        yield name
    finally:
        del sys.modules[MODULES.pop(name)], OPTIONS[name]


def write_data(folder, train: int = 83, validation: int = 21) -> dict:
    """Write rows to `folder`; return the fields of the run file that name them."""
    generator, fields = np.random.default_rng(0), {}
    teacher = generator.normal(size=(FEATURES, LABELS, CLASSES))
    for split, count in (("train", train), ("validation", validation)):
        x = generator.normal(size=(count, FEATURES))
        y = np.where(generator.random((count, LABELS)) < 0.3, -100, np.einsum("nf,flc->nlc", x, teacher).argmax(-1))
        rows = [{"x": a.tolist(), "y": b.tolist()} for a, b in zip(x, y, strict=True)]
        fields[f"{split}_file"] = kit.write_jsonl(folder / f"{split}.jsonl", rows)
    return fields


def flags(data: dict, **fields) -> list[str]:
    """Return the flags of 24 steps in float64; the 11th and 22nd are the tails of epochs, with three rows."""
    values = {"task": NAME, "dtype": "float64", "global_batch_size": 8, "per_device_batch_size": 2, "max_steps": 24}
    values |= {"learning_rate": 1e-2, "logging_steps": 1, "eval_steps": 12, "save_steps": 8, "save_total_limit": 99}
    return kit.flags(**values | data | fields)
