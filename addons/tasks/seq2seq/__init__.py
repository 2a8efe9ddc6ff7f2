"""Text to text with an encoder-decoder model (T5, BART, …): summaries, translations, docstrings.

A row is {"source": "…", "target": "…"}. Evaluation also generates a text for every row and compares it with the target
(ROUGE, exact match); `metrics: [none]` omits that. Tests: tests/addons/tasks/test_seq2seq.py.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from addons.tasks.seq2seq.encoder_decoder import has_plain_decoder_head, score_labels
from engine import task as base
from engine.config.errors import UsageError
from engine.config.option import option
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import check_fit, load_config, load_tokenizer, tokenizer_fingerprint
from engine.models.generation import GenerationOptions, decode_rows, generate_tokens
from engine.process.private_apis import known_masks
from engine.rows.labels import require_columns
from engine.rows.tokenize_and_pack import (
    IGNORED,
    padded_length,
    require_text,
    tokenize_truncated,
    warn_of_special_tokens,
)
from engine.task import Batch
from src.losses.chunked_cross_entropy import Scored, positions_of_targets, row_losses, sums_from_scored
from src.losses.cross_entropy import CrossEntropy
from src.losses.metrics import check_metrics, compute_metrics


@dataclass
class Options(CrossEntropy, GenerationOptions):
    max_source_length: int | None = option(
        "tokens per source; longer ones are truncated (default: 1024, or the model's limit)",
        min=1,
    )
    max_target_length: int = option("tokens per target; longer ones are truncated", 128, min=2)
    source_prefix: str = option(
        'text before every source, such as "summarize: " for T5', "", may_be_empty=True, from_checkpoint=True
    )
    max_new_tokens: int | None = option(
        "tokens to generate at most (default: max_target_length)",
        min=1,
        may_change_on_resume=True,
    )
    sample_prompt: str | None = option(
        "after training, generate a text from this source and print it (default: no sample)",
        may_be_empty=True,
        may_change_on_resume=True,
        from_checkpoint=False,
    )


class Task(base.Task):
    # A rank that builds without weights has no generation_config.json either, and would generate by other rules.
    attributes_from_weights = ("plain_head", "generation_config")

    parts = ("source", "target")
    cut_by_cost = False  # sources and targets are padded apart
    id_columns = ("input_ids", "labels")

    def load(self) -> None:
        o = self.options
        self.tokenizer: Any = load_tokenizer(self.cfg)
        if self.tokenizer is None:
            raise UsageError("seq2seq needs --tokenizer_name, or a model folder with a tokenizer")
        self.tokenizer_text = tokenizer_fingerprint(self.tokenizer)
        self.end = self.tokenizer.eos_token_id  # of a target
        self.end = self.tokenizer.sep_token_id if self.end is None else self.end
        if self.end is None or self.tokenizer.pad_token_id is None:
            raise UsageError("the tokenizer needs an end-of-text and a padding token: set eos_token and pad_token")
        self.config = load_config(self.cfg, self.tokenizer)
        fit = (self.cfg, self.config, self.tokenizer)
        self.max_length = check_fit(*fit, o.max_source_length, "max_source_length")
        for name in ("max_target_length", "max_new_tokens"):
            check_fit(*fit, getattr(o, name), name)
        if getattr(self.config, "decoder_start_token_id", None) is None:
            self.config.decoder_start_token_id = self.tokenizer.pad_token_id
        self.metric_names = check_metrics(o.metrics, self.cfg.trust_remote_code)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        o = self.options
        return repr((self.tokenizer_text, self.max_length, o.max_target_length, o.source_prefix))

    def inspect_columns(self, examples, split: str):
        from datasets import Features, List, Value

        columns = require_columns(examples, [*self.parts], split)
        features = {name: List(Value("int32")) for name in ("input_ids", "labels")}
        return columns, Features(features | {name: Value("int64") for name in ("length", "targets", "cut")})

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        """Return the columns of the prepared rows; every target ends with the end token (MBart: and its language)."""
        o, limit = self.options, self.options.max_target_length
        for column in self.parts:
            require_text(batch[column], column, locations)
            warn_of_special_tokens(self.tokenizer, batch[column], column, locations)
        texts = [o.source_prefix + text for text in batch["source"]]
        source, source_counts = tokenize_truncated(self.tokenizer, [texts], self.max_length)
        sources = [ids or [self.end] for ids in source["input_ids"]]  # attention needs a token
        target, target_counts = tokenize_truncated(
            lambda texts, **options: self.tokenizer(text_target=texts, **options),  # differs for translation models
            [batch["target"]],
            limit,
        )
        targets = []
        for i, ids in enumerate(target["input_ids"]):
            if self.end not in ids[-2:]:
                target_counts["cut"][i] += max(0, len(ids) + 1 - limit)  # to have room for the end
                ids = [*ids[: limit - 1], self.end]
            targets.append(ids)
        return {
            "input_ids": sources,
            "labels": targets,
            "length": [len(source) + len(target) for source, target in zip(sources, targets, strict=True)],
            "targets": [len(target) for target in targets],
            "cut": [one + other for one, other in zip(source_counts["cut"], target_counts["cut"], strict=True)],
        }

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForSeq2SeqLM

        model = build_model(self.cfg, self.config, AutoModelForSeq2SeqLM, weights, empty=empty)
        if not empty:
            self.plain_head = has_plain_decoder_head(model, len(self.tokenizer))
            self.generation_config = model.generation_config
        return model

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        sources, labels = [row["input_ids"] for row in rows], [row["labels"] for row in rows]
        source_lengths, lengths = [len(ids) for ids in sources], [len(ids) for ids in labels]
        multiple = self.cfg.pad_to_multiple_of
        width = padded_length(source_lengths, multiple, self.max_length)
        inputs = {
            "input_ids": pad_rows(sources, width, self.tokenizer.pad_token_id),
            "attention_mask": pad_rows([np.ones(n) for n in source_lengths], width, 0),
            "labels": pad_rows(labels, padded_length(lengths, multiple, self.options.max_target_length), IGNORED),
        }
        inputs |= positions_of_targets(inputs["labels"])
        tokens, padded = sum(source_lengths) + sum(lengths), inputs["input_ids"].size + inputs["labels"].size
        return Batch({name: torch.from_numpy(ids) for name, ids in inputs.items()}, sum(lengths), tokens, padded)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = inputs["labels"]
        scored, chosen = self._scored(model, inputs), inputs.get("target_positions")
        sums = sums_from_scored(scored, labels.flatten(), model.training, self.options, chosen)
        if model.training or not self.metric_names:
            return sums
        missing = self.options.max_target_length - labels.shape[1]
        reference = F.pad(labels, (0, missing), value=IGNORED)
        return sums | {"generated": self._generate(model, _source(inputs)), "reference": reference}

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return row_losses(self._scored(model, inputs), inputs["labels"], self.options)

    def _scored(self, model, inputs: dict[str, torch.Tensor]) -> Scored:
        with known_masks(packed=False):
            return score_labels(model, _source(inputs), inputs["labels"], self.plain_head)

    def _generate(self, model, source: dict[str, torch.Tensor]) -> torch.Tensor:
        o = self.options
        settings = {"max_new_tokens": o.max_new_tokens or o.max_target_length, "num_beams": o.num_beams}
        return generate_tokens(model, source, self.generation_config, do_sample=o.do_sample, **settings)

    # ---- results -----------------------------------------------------------------------------------------------------

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {"perplexity": math.exp(min(sums["loss"] / weight, 700.0)), "accuracy": sums["correct"] / weight}

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        generated, references = (decode_rows(self.tokenizer, rows[name]) for name in ("generated", "reference"))
        return compute_metrics(self.metric_names, generated, references, self.cfg.trust_remote_code)

    def sample(self, model: torch.nn.Module) -> str | None:
        o = self.options
        if not o.sample_prompt:
            return None
        text = o.source_prefix + o.sample_prompt
        ids = self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"] or [self.end]
        ids = torch.tensor([ids], device=model.device)
        model.eval()  # without dropout
        torch.manual_seed(self.cfg.seed)
        tokens = self._generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        return f"{o.sample_prompt}\n=> {decode_rows(self.tokenizer, tokens.cpu().numpy())[0]}"


def _source(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def pad_rows(rows: list, width: int, fill: int) -> np.ndarray:
    """Return rows of token ids as one array (rows, width), filled up on the right."""
    padded = np.full((len(rows), width), fill, np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
