"""A tiny classifier with batch norm, as the model of classifier_task.py."""

import torch
from transformers import BertConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from engine.models.build_model import build_model
from tests.helpers import classifier_task, kit


class Block(torch.nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size)

    def forward(self, hidden):
        return self.norm(torch.tanh(self.linear(hidden)))


class TinyClassifier(PreTrainedModel):
    """An embedding, some blocks and a linear head."""

    config_class = BertConfig
    _no_split_modules = ("Block",)

    def __init__(self, config, *blocks: torch.nn.Module):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @classmethod
    def from_config(cls, config, **options):
        return cls._from_config(config, **options)


class BatchNormClassifier(TinyClassifier):
    """Mean of the embeddings of a row, two blocks with batch norm, a linear head."""

    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config, *(Block(config.hidden_size) for _ in range(2)))
        self.register_buffer("constant", torch.tensor([1 / 3, -0.0, float("-inf")]))  # training never changes it
        self.recompute = False

    def activation_checkpointing_enable(self, options):
        self.recompute = True

    def forward(self, input_ids, attention_mask=None, **unused):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask[..., None].to(self.embedding.weight.dtype)
        hidden = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        for block in self.blocks:
            if self.recompute and self.training:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return SequenceClassifierOutput(logits=self.head(hidden))


def build(task, weights=None, empty=False):
    """Build the classifier instead of the one that the configuration names."""
    task.config.num_labels = len(task.labels)
    return build_model(task.cfg, task.config, BatchNormClassifier, weights, empty=empty)


def recipe(folder, **fields) -> list[str]:
    """Return the flags of a run; the last step of its first epoch leaves one of four ranks without a micro-batch."""
    values = {f"{split}_file": folder / f"{split}.jsonl" for split in ("train", "validation")}
    values |= {"global_batch_size": 16, "per_device_batch_size": 4, "per_device_eval_batch_size": 8, "dtype": "float64"}
    values |= {"learning_rate": 1e-2, "logging_steps": 1, "save_steps": 8, "eval_steps": 8}
    values["max_steps"] = 16  # 13 steps of the first epoch, the last of 11 rows
    return classifier_task.write_data(folder) + kit.flags(**values | fields)
