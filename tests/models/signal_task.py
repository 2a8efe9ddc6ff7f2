"""A task for models of images and sound, as a fork would write it: random signals, and a class for each.

`registered` of plain_task.py makes it known as `--task signal`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from src.config.fields import option
from src.models.build_model import build_model
from src.models.chunked_cross_entropy import sums_from_logits
from src.models.load_config import load_config
from src.tasks import base
from src.tasks.base import Batch
from tests.helpers import kit

NAME, LABELS = "signal", 3


@dataclass
class Options:
    needs_model = True

    shape: list[int] = option("shape of a signal", [1], from_checkpoint=True)
    auto_class: str = option("class of transformers that builds the model", "", from_checkpoint=True)


class Task(base.Task):
    def load(self) -> None:
        self.config: Any = load_config(self.cfg, None)
        self.config.num_labels = LABELS

    def fingerprint(self) -> str:
        return "1"

    def inspect_columns(self, examples, split):
        from datasets import Features, Value

        return ["id"], Features({name: Value("int64") for name in ("id", "length", "targets", "cut")})

    def encode(self, batch, locations):
        ones = [1] * len(batch["id"])
        return {"id": batch["id"], "length": ones, "targets": ones, "cut": [0] * len(ones)}

    def build(self, weights=None, empty=False):
        import transformers

        return build_model(self.cfg, self.config, getattr(transformers, self.options.auto_class), weights, empty=empty)

    def collate(self, rows, training):
        ids = [int(row["id"]) for row in rows]
        signals = np.stack([np.random.default_rng(i).normal(i % LABELS, 1, self.options.shape) for i in ids])
        inputs = {"signal": torch.from_numpy(signals).to(getattr(torch, self.cfg.dtype))}
        inputs["labels"] = torch.tensor(ids) % LABELS
        return Batch(inputs, len(rows), len(rows), len(rows))

    def loss(self, model, inputs):
        logits = model(**{model.main_input_name: inputs["signal"]}).logits
        return sums_from_logits(logits.flatten(0, -2), inputs["labels"], model.training)

    def metrics(self, sums, weight):
        return {"accuracy": sums["correct"] / weight}


def write_data(folder) -> dict:
    """Write rows to `folder`; return the fields of the run file that name them."""
    counts = {"train": range(16), "validation": range(16, 22)}
    return {
        f"{split}_file": kit.write_jsonl(folder / f"{split}.jsonl", [{"id": i} for i in ids])
        for split, ids in counts.items()
    }
