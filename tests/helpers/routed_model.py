"""A tiny classifier with experts, each used only by some rows, as the model of classifier_task.py."""

import torch
from transformers.modeling_outputs import SequenceClassifierOutput

from engine.models.build_model import build_model
from tests.helpers import classifier_task, kit
from tests.helpers.batch_norm import TinyClassifier

EXPERTS = 5


class Block(torch.nn.Module):
    """Each row goes through one expert; `spare` is used by no row."""

    def __init__(self, size: int):
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(size, size) for _ in range(EXPERTS)])
        self.spare = torch.nn.Linear(size, size)

    def forward(self, hidden, route):
        for number, expert in enumerate(self.experts):
            chosen = route == number
            if chosen.any():
                hidden = torch.where(chosen[:, None], torch.tanh(expert(hidden)), hidden)
        return hidden


class RoutedClassifier(TinyClassifier):
    def __init__(self, config):
        super().__init__(config, Block(config.hidden_size))

    def forward(self, input_ids, **unused):
        hidden = self.embedding(input_ids[:, 1:4]).mean(1)
        for block in self.blocks:
            hidden = block(hidden, self.route(input_ids))
        return SequenceClassifierOutput(logits=self.head(hidden))

    def route(self, input_ids):
        return input_ids[:, 1] % EXPERTS


class DenseClassifier(RoutedClassifier):
    """All rows use the first expert."""

    def route(self, input_ids):
        return torch.zeros_like(input_ids[:, 1])


def build(task, weights=None, empty=False, frozen=("spare",), dense=False):
    task.config.num_labels = len(task.labels)
    model = build_model(task.cfg, task.config, DenseClassifier if dense else RoutedClassifier, weights, empty=empty)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def recipe(folder, **fields) -> list[str]:
    values = {"train_file": folder / "train.jsonl", "dtype": "float64", "global_batch_size": 8}
    values |= {"per_device_batch_size": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "logging_steps": 1}
    values["max_steps"] = 28  # 26 steps of the first epoch, the last of 3 rows: one of two ranks has a batch of one row
    return classifier_task.write_data(folder) + kit.flags(**values | fields)
