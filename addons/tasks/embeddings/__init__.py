# Needs addons/techniques/_batch_loss.py.
"""Text embeddings: a contrastive loss (InfoNCE) over pairs of texts; negatives are the other texts of the global batch.

A row is {"anchor": "…", "positive": "…"}; if `columns` names a `negative`, it has a hard one as well. The loss does not
change with the micro-batch or the number of processes. final/ is a model of sentence-transformers, and a base model of
that kind keeps its pooling, length and prompts. Tests: tests/addons/tasks/test_embeddings.py.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from addons.tasks.embeddings.sentence_transformers_files import DOCUMENT, KEYS, BaseFiles, read_base, write_files
from addons.techniques._batch_loss import BatchLossTask
from engine.config.errors import UsageError, warn, warn_once
from engine.config.option import option
from engine.config.paths import locate
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import (
    config_value,
    load_text_encoder,
    model_folder,
    position_limit,
    text_config,
)
from engine.models.packed_attention import call_on_tokens
from engine.rows.labels import require_columns
from engine.rows.tokenize_and_pack import pad_columns, padded_length, tokenize_columns
from engine.storage.jsonl import read_json
from engine.task import Batch

CHUNK_ELEMENTS = 1 << 24  # similarities that exist at once in `retrieval_metrics`
RATINGS = ("label", "labels", "score", "similarity", "similarity_score")  # columns that may say that a pair is none
TEMPERATURE = "temperature.json"  # the learned one: no program that loads model.safetensors knows such a weight
NO_LIMIT = 1 << 30  # a tokenizer without a limit has 1e30
TIE = 1e-5  # cosine similarities closer than this are equal


@dataclass
class Options:
    needs_model = True  # model_name_or_path or model_config

    max_length: int | None = option(
        "tokens per text; longer texts are truncated (default: that of a sentence-transformers model, else the model's "
        "limit, at most 1024)",
        min=2,
        from_checkpoint=True,
    )
    anchor_prompt: str | None = option(
        "text before each anchor (default: the prompt `query` of a sentence-transformers model)",
        may_be_empty=True,
        from_checkpoint=True,
    )
    positive_prompt: str | None = option(
        "text before each positive and negative (default: the prompt `document` of a sentence-transformers model)",
        may_be_empty=True,
        from_checkpoint=True,
    )
    pooling: str | None = option(
        "vector of a text: the mean over its tokens, its first token, or its last one (default: that of a "
        "sentence-transformers model, else mean)",
        choices=tuple(KEYS),
    )
    temperature: float = option("the loss divides cosine similarities by this", 0.05, above=0)
    learn_temperature: bool = option("train the temperature, from that value", False)


class Task(BatchLossTask):
    parts = ("anchor", "positive", "negative")
    new_head = ("logit_scale",)
    id_columns = ("ids_0", "ids_1", "ids_2")  # of anchors, positives and negatives

    def load(self) -> None:
        o = self.options
        self.tokenizer, self.tokenizer_text, self.config, self.max_length = load_text_encoder(self.cfg, o.max_length)
        self._read_base()
        if self.pooling == "cls" and self.tokenizer.cls_token_id is None:
            raise UsageError("pooling is cls, but the tokenizer has no cls_token: give --pooling mean")
        self.config.use_cache = False
        self.columns = [*self.parts] if "negative" in self.cfg.columns else ["anchor", "positive"]

    def _read_base(self) -> None:
        """Set pooling, length and prompts: those of the options, else of a base model of sentence-transformers."""
        o, name = self.options, self.cfg.model_name_or_path
        self.base = base = read_base(Path(model_folder(self.cfg, name))) if name else BaseFiles()
        if base.pooling and o.pooling not in (None, base.pooling):
            warn(f"pooling is {o.pooling}, but that of {name} (sentence-transformers) is {base.pooling}")
        self.pooling = o.pooling or base.pooling or "mean"
        if self.pooling not in KEYS:
            raise UsageError(
                f"pooling of {name} is {self.pooling}, which is not supported: give --pooling {' or '.join(KEYS)}"
            )
        if base.not_used:
            warn(
                f"{name} (sentence-transformers) has what this task does not use and final/ does not have: {', '.join(base.not_used)}"
            )
        if base.is_complete and o.max_length is None:
            lengths = (base.max_length or self.tokenizer.model_max_length, position_limit(self.config) or math.inf)
            self.max_length = min(*lengths) if min(*lengths) < NO_LIMIT else self.max_length
        anchor = base.prompt("query") if o.anchor_prompt is None else o.anchor_prompt
        positive = base.prompt(*DOCUMENT) if o.positive_prompt is None else o.positive_prompt
        self.prompts = (anchor, positive, positive)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        return repr((self.tokenizer_text, self.max_length, self.columns, self.prompts))

    def inspect_columns(self, examples, split: str):
        from datasets import Features, List, Value

        if "negative" in examples.column_names and "negative" not in self.columns:
            warn_once("the column negative is not used: give --columns '{negative: negative}'")
        if ratings := [name for name in RATINGS if name in examples.column_names and name not in self.columns]:
            warn_once(
                f"{split} data: the column {ratings[0]} is not used: every pair is one of texts that belong together, so "
                "remove the others"
            )
        require_columns(examples, self.columns, split)
        features = {f"ids_{i}": List(Value("int32")) for i in range(len(self.columns))}
        features |= {name: Value("int64") for name in ("length", "targets", "cut")}
        return self.columns, Features(features)

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        columns, lengths = {}, np.zeros((len(self.columns), len(batch[self.columns[0]])), np.int64)
        truncated = np.zeros(lengths.shape[1], np.int64)
        for i, column in enumerate(self.columns):
            # A value that is no text is refused by its column.
            texts = [f"{self.prompts[i]}{text}" if isinstance(text, str) else text for text in batch[column]]
            encoded, counts = tokenize_columns(self.tokenizer, {column: texts}, [column], self.max_length, locations)
            columns[f"ids_{i}"], lengths[i] = encoded["input_ids"], counts["length"]
            truncated += counts["cut"]
            if (lengths[i] == 0).any():
                raise UsageError(f"{locations[int(lengths[i].argmin())]}: `{column}` has no tokens")
        # All texts of a row are padded to the longest one, and the length is what a forward pass computes.
        length = lengths.max(0) * len(self.columns)
        return columns | {"length": length.tolist(), "targets": [1] * len(length), "cut": truncated.tolist()}

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        texts = [row[f"ids_{i}"] for row in rows for i in range(len(self.columns))]
        lengths = [len(text) for text in texts]
        width = padded_length(lengths, self.cfg.pad_to_multiple_of, self.max_length)
        padded = pad_columns([{"input_ids": text} for text in texts], {"input_ids": self.tokenizer.pad_token_id}, width)
        padded["texts"] = np.array([xxhash.xxh3_64_intdigest(text.astype(np.int32)) >> 1 for text in texts])
        inputs = {name: torch.from_numpy(ids).unflatten(0, (len(rows), -1)) for name, ids in padded.items()}
        return Batch(inputs, weight=len(rows), tokens=sum(lengths), padded_tokens=len(texts) * width)

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModel

        model: Any = build_model(self.cfg, self.config, AutoModel, weights, ("pooler",), empty)
        if (pooler := getattr(model, "pooler", None)) is not None:
            pooler.requires_grad_(False)  # the loss does not use it
        if self.options.learn_temperature:
            model.register_parameter("logit_scale", self._logit_scale(weights, next(model.parameters()).dtype))
        return model

    def _logit_scale(self, weights: str | None, dtype: torch.dtype) -> torch.nn.Parameter:
        """Return the learned scale: its value in `weights`, else in the pretrained model, else that of the options.

        FSDP2 cannot shard a scalar: one dimension."""
        name = self.cfg.model_name_or_path
        place = locate(weights) if weights else name and model_folder(self.cfg, name)
        value = torch.full((1,), -math.log(self.options.temperature))
        if not place:
            return torch.nn.Parameter(value.to(dtype))
        folder = Path(place)
        if (folder / TEMPERATURE).exists():
            value = torch.tensor(read_json(folder / TEMPERATURE)["logit_scale"], dtype=torch.float64)
        return torch.nn.Parameter(value.to(dtype))

    def write_files(self, folder: Path, tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Write the learned temperature and the files of sentence-transformers; return the weights of the model."""
        own = {name: value.double().tolist() for name, value in tensors.items() if name in self.new_head}
        if own:
            (folder / TEMPERATURE).write_text(json.dumps(own) + "\n")
        if rank == 0:
            dimension = config_value(text_config(self.config), "hidden_size")
            prompts = dict(zip(("query", "document"), self.prompts, strict=False))
            write_files(folder, self.base, self.pooling, self.max_length, dimension, prompts)
        return {name: value for name, value in tensors.items() if name not in own}

    def represent(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `vectors`, (rows, texts, features): unit vectors, but anchors are divided by the temperature."""
        ids, mask = (inputs[name].flatten(0, 1) if name in inputs else None for name in ("input_ids", "attention_mask"))
        hidden = call_on_tokens(model, {"input_ids": ids, "attention_mask": mask}).last_hidden_state
        hidden = hidden.float() if hidden.dtype in (torch.bfloat16, torch.float16) else hidden
        real = torch.ones_like(ids) if mask is None else mask
        counts = real.sum(1, keepdim=True)
        if self.pooling == "mean":
            pooled = (hidden * real[..., None]).sum(1) / counts
        elif self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            pooled = hidden.take_along_dim(counts[..., None] - 1, 1).squeeze(1)
        texts = F.normalize(pooled, dim=-1).unflatten(0, (-1, len(self.columns)))
        scale = model.logit_scale.exp() if self.options.learn_temperature else 1 / self.options.temperature
        numbers = {} if model.training else {"texts": inputs["texts"]}  # equal for equal texts
        return {"vectors": torch.cat([texts[:, :1] * scale, texts[:, 1:]], 1)} | numbers

    def batch_loss(self, vectors: dict[str, torch.Tensor], weight: float) -> dict[str, torch.Tensor]:
        texts = vectors["vectors"]
        return {"loss": info_nce(texts[:, 0], texts[:, 1:])}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        vectors, texts = (torch.from_numpy(rows[name]) for name in ("vectors", "texts"))
        return retrieval_metrics(vectors[:, 0], vectors[:, 1:], texts[:, 1:])


# ---- the loss and the metrics ------------------------------------------------------------------------------------------


def info_nce(anchors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the sum over rows of the mean of two cross-entropies: positive given anchor, and anchor given positive.

    `anchors` is (rows, features), `others` (rows, 1 or more, features): a row's positive, then its negatives. The
    logits are dot products. An anchor's negatives are all others of all rows. Oord et al., "Representation Learning
    with Contrastive Predictive Coding", 2018; in both directions: Radford et al., 2021 (CLIP)."""
    rows = torch.arange(len(anchors), device=anchors.device)
    logits = anchors @ others.transpose(0, 1).flatten(0, 1).T  # all positives, then all negatives
    loss = F.cross_entropy(logits, rows, reduction="sum")
    return (loss + F.cross_entropy(logits[:, : len(rows)].T, rows, reduction="sum")) / 2


def retrieval_metrics(anchors: torch.Tensor, others: torch.Tensor, texts: torch.Tensor) -> dict[str, float]:
    """Return recall at 1 and 10 and mean reciprocal rank of each anchor's positive among the others of all rows.

    Takes the shapes of `info_nce`, in O(rows²) time. `texts`: numbers, equal for equal others. One with the text of the
    positive does not count; other texts as similar stand before it, so vectors that are all alike find nothing."""
    candidates, ranks = others.flatten(0, 1), []
    size = max(1, CHUNK_ELEMENTS // len(candidates))
    for part, positives, own in zip(*(x.split(size) for x in (anchors, others[:, 0], texts[:, :1])), strict=True):
        similarity = (part * positives).sum(-1, keepdim=True) - TIE * part.norm(dim=-1, keepdim=True)
        ranks.append(1 + (~(part @ candidates.T < similarity) & (texts.flatten() != own)).sum(1))
    rank = torch.cat(ranks).double()
    return {f"recall_at_{k}": (rank <= k).double().mean().item() for k in (1, 10)} | {"mrr": (1 / rank).mean().item()}
