"""A tiny task with a classifier of transformers for rows of ids, as a fork would write it (see `registered`).

A row holds `input_ids` and a `label`, 0 or 1. `batch_norm.py` and `routed_model.py` are its models: a test sets
`Task.build` to one of them.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine import task as base
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import load_config
from engine.task import Batch
from tests.helpers import kit, plain_task

NAME = "classifier"
LABELS = ["none", "cat"]
VOCABULARY = 40
CAT = 7  # the id that makes a row one of class 1
MODEL = {"model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}


@dataclass
class Options:
    pass


class Task(base.Task):
    labels = LABELS

    def load(self) -> None:
        self.config = load_config(self.cfg, None)

    def fingerprint(self) -> str:
        return "1"

    def inspect_columns(self, examples, split):
        from datasets import Features, List, Value

        counts = {name: Value("int64") for name in ("length", "targets", "cut", "label")}
        return ["input_ids", "label"], Features({"input_ids": List(Value("int32"))} | counts)

    def encode(self, batch, locations):
        count = len(batch["label"])
        lengths = [len(ids) for ids in batch["input_ids"]]
        return {**batch, "length": lengths, "targets": [1] * count, "cut": [0] * count}

    def build(self, weights=None, empty=False):
        from transformers import AutoModelForSequenceClassification

        self.config.num_labels = len(LABELS)
        return build_model(self.cfg, self.config, AutoModelForSequenceClassification, weights, empty=empty)

    def collate(self, rows, training):
        lengths = [len(row["input_ids"]) for row in rows]
        ids = np.zeros((len(rows), max(lengths)), np.int64)
        mask = np.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : lengths[place]] = row["input_ids"]
            mask[place, : lengths[place]] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": np.array([row["label"] for row in rows])}
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        return Batch(tensors, float(len(rows)), sum(lengths), ids.size)

    def loss(self, model, inputs):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        loss = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), inputs["labels"], reduction="sum"
        )
        if model.training:
            return {"loss": loss}
        return {"loss": loss, "correct": (logits.argmax(-1) == inputs["labels"]).sum()}

    def metrics(self, sums, weight):
        return {"accuracy": sums["correct"] / weight}


def registered():
    """Within, `--task classifier` is this file."""
    return plain_task.registered(sys.modules[__name__], NAME)


def write_data(folder) -> list[str]:
    """Write rows of random ids, 203 to train on and 31 to evaluate on, to `folder`; return flags without the files."""
    generator = np.random.default_rng(2)
    for split, count in (("train", 203), ("validation", 31)):
        lengths = 4 + (20 * generator.random(count) ** 2).astype(int)
        ids = [generator.integers(1, VOCABULARY, length).tolist() for length in lengths]
        rows = [{"input_ids": row, "label": int(CAT in row)} for row in ids]
        kit.write_jsonl(folder / f"{split}.jsonl", rows)
    return kit.flags(task=NAME, model_config=kit.write_yaml(folder / "model.yaml", MODEL))
