"""Masked language models: an encoder predicts the tokens that are masked in a text (BERT).

A row is {"text": "…"} or {"input_ids": [5, 6, …]}. A text longer than max_length becomes several rows.
Shows: randomness in `collate` that evaluation does not have. Tests: tests/addons/tasks/test_masked_lm.py.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from engine import task as base
from engine.config.errors import UsageError
from engine.config.option import option
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import load_text_encoder, load_tokenizer, vocabulary_size
from engine.models.model_checks import probing
from engine.process.private_apis import known_masks
from engine.rows.encode_rows import Encoder
from engine.rows.formats import IDS, TEXT
from engine.rows.tokenize_and_pack import pad_columns, padded_length
from engine.task import Batch
from src.losses.chunked_cross_entropy import Scored, row_losses, sums_from_logits
from src.losses.cross_entropy import CrossEntropy

MASK_TOKEN = "<|mask|>"
MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens (BERT); the rest stays as it is


@dataclass
class Options(CrossEntropy):
    max_length: int | None = option(
        "tokens per row; a longer text becomes several rows (default: the model's limit, at most 1024)",
        min=2,
        from_checkpoint=True,
    )
    mlm_probability: float = option(
        "share of a row's tokens to predict; of these 80% are masked, 10% replaced by random tokens, 10% kept",
        0.15,
        above=0,
        max=1,
    )


class Task(base.Task):
    attributes_from_weights = ("positionwise_head",)
    can_shorten = True
    parts = (*IDS.required, *TEXT.required)

    def load(self) -> None:
        tokenizer = load_tokenizer(self.cfg)
        if tokenizer is not None and tokenizer.mask_token_id is None:
            if self.cfg.model_name_or_path:
                raise UsageError(
                    "masked_lm: the tokenizer has no mask token, so the model was not trained to fill masks"
                )
            tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
        encoder = load_text_encoder(self.cfg, self.options.max_length, tokenizer)
        self.tokenizer, self.tokenizer_text, self.config, self.max_length = encoder
        self.vocab_size = vocabulary_size(self.cfg, self.config)
        self.may_be_masked = np.ones(self.vocab_size, bool)
        self.may_be_masked[self.tokenizer.all_special_ids] = False

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        return repr((self.tokenizer_text, self.max_length, self.options.mlm_probability))

    def inspect_columns(self, examples, split: str):
        from datasets import Features, List, Value

        # append_eos would add a token that many models lack.
        splits = self.cfg.long_rows == "cut"
        settings = (self.tokenizer, self.vocab_size, self.max_length, splits, False, [*self.cfg.columns])
        self.encoder = Encoder(*settings, is_mixed=bool(self.cfg.mixture), formats=(IDS, TEXT))
        needed, made = self.encoder.choose(examples.column_names, split, examples.first)
        if "labels" in made:
            raise UsageError(
                f"{split} data: masked_lm chooses its labels itself, so `labels` cannot be used: give rows of `text` or "
                "`input_ids`"
            )
        features = {"input_ids": List(Value("int32"))}
        return needed, Features(features | {name: Value("int64") for name in ("length", "targets", "cut")})

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        rows = self.encoder.encode_batch(batch, locations)
        candidates = [int(self.may_be_masked[ids].sum()) for ids in rows["input_ids"]]
        rows["targets"] = [masked_count(count, self.options.mlm_probability) for count in candidates]
        return {name: rows[name] for name in ("input_ids", "length", "targets", "cut")}

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForMaskedLM

        model = build_model(self.cfg, self.config, AutoModelForMaskedLM, weights, empty=empty)
        if not empty:
            self.positionwise_head = has_positionwise_head(model, self.vocab_size)
        return model

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        lengths = [len(row["input_ids"]) for row in rows]
        width = padded_length(lengths, self.cfg.pad_to_multiple_of, self.max_length)
        masked, positions, targets = [], [], []
        for i, row in enumerate(rows):
            ids = row["input_ids"]
            # In training the masks come from the seed of the micro-batch: each epoch has others. In evaluation
            # they belong to the row, so the result does not depend on the batch size or the number of processes.
            seed = np.random.randint(1 << 62) if training else xxhash.xxh3_64_intdigest(ids.astype(np.int32).tobytes())
            changed, chosen = mask_tokens(
                ids,
                self.may_be_masked,
                self.options.mlm_probability,
                self.tokenizer.mask_token_id,
                len(self.tokenizer),
                np.random.default_rng(seed),
            )
            masked.append({"input_ids": changed})
            positions.append(i * width + chosen)
            targets.append(ids[chosen])
        inputs = pad_columns(masked, {"input_ids": self.tokenizer.pad_token_id}, width)
        inputs |= {"positions": np.concatenate(positions), "targets": np.concatenate(targets).astype(np.int64)}
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        return Batch(tensors, len(tensors["targets"]), sum(lengths), len(rows) * width)

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return sums_from_logits(self._logits(model, inputs), inputs["targets"], model.training, self.options)

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows, width = inputs["input_ids"].shape
        scored = Scored(self._logits(model, inputs))
        by_target = row_losses(scored, inputs["targets"], self.options)  # each target as a row
        is_of_row = inputs["positions"] // width == torch.arange(rows, device=inputs["positions"].device)[:, None]
        return {name: (is_of_row * values).sum(1) for name, values in by_target.items()}

    def _logits(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of the masked tokens, (targets, vocabulary)."""
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        positions = inputs["positions"]
        with known_masks(packed=False):
            if self.positionwise_head:  # one token in seven needs logits
                with hidden_states_at(model, positions):
                    return model(**arguments).logits[0]
            return model(**arguments).logits.flatten(0, 1)[positions]

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {"perplexity": math.exp(min(sums["loss"] / weight, 700.0)), "accuracy": sums["correct"] / weight}


# ---- masks -----------------------------------------------------------------------------------------------------------


def masked_count(candidates: int, probability: float) -> int:
    """Return how many of a row's tokens are chosen: its share, rounded, but at least one if there is one."""
    return min(candidates, max(1, round(candidates * probability)))


def mask_tokens(
    ids: np.ndarray,
    may_be_masked: np.ndarray,
    probability: float,
    mask_id: int,
    vocab_size: int,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids in which chosen tokens are masked, replaced by random ones or kept; the chosen positions, sorted).

    `may_be_masked` has a bool per id of the vocabulary. A row's number of chosen tokens does not depend on `generator`.
    So the weight of a row is known before training, and no row is without a target (Devlin et al. 2018)."""
    candidates = np.flatnonzero(may_be_masked[ids])
    count = masked_count(len(candidates), probability)
    positions = np.sort(generator.choice(candidates, count, replace=False))
    share = generator.random(count)
    random = (share >= MASKED) & (share < MASKED + REPLACED)
    masked = ids.copy()
    masked[positions[share < MASKED]] = mask_id
    masked[positions[random]] = generator.integers(0, vocab_size, int(random.sum()))
    return masked, positions


# ---- a prediction head at the masked positions only ------------------------------------------------------------------


@contextmanager
def hidden_states_at(model: Any, positions: torch.Tensor) -> Iterator[None]:
    """Within, the head of `model` sees only the hidden states at `positions` of the flattened batch, as one row."""

    def select(module, inputs, output):
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[positions][None]
        return output

    hook = model.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        hook.remove()


def has_positionwise_head(model: Any, vocab_size: int) -> bool:
    """Return True if logits depend only on the hidden state of their position, so that the head can skip others."""
    if model.base_model is model:
        return False
    ids = torch.arange(8).remainder(vocab_size).view(2, 4)
    positions = torch.tensor([1, 6])
    with probing(model):
        try:
            with hidden_states_at(model, positions):
                some = model(input_ids=ids).logits
        except (AttributeError, RuntimeError, ValueError):  # the base model returns no such output
            return False
        expected = model(input_ids=ids).logits.flatten(0, 1)[positions][None]
    return some.shape == expected.shape and torch.allclose(some, expected, atol=1e-5)
