"""Encoder-decoder language models: hidden states for a loss in bounded memory.

Tests: tests/addons/tasks/test_seq2seq.py.
"""

from typing import TYPE_CHECKING

import torch

from engine.models.model_checks import is_plain_head
from src.losses.chunked_cross_entropy import Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_states(model: "PreTrainedModel", inputs: dict[str, torch.Tensor], decoder_ids: torch.Tensor):
    """Return what the output embedding is applied to, (rows, target tokens, features)."""
    encoded = model.get_encoder()(**inputs).last_hidden_state
    hidden = model.get_decoder()(
        input_ids=decoder_ids,
        encoder_hidden_states=encoded,
        encoder_attention_mask=inputs["attention_mask"],
        use_cache=False,
    ).last_hidden_state
    if getattr(model.config, "scale_decoder_outputs", False):  # T5
        hidden = hidden * model.config.d_model**-0.5
    return hidden


def score_labels(
    model: "PreTrainedModel", inputs: dict[str, torch.Tensor], labels: torch.Tensor, plain_head: bool
) -> Scored:
    """Return what the model computes for each label; the head runs only if it is not linear.

    The decoder reads the labels one place later. Their padding is on the right, where causal attention never looks."""
    if plain_head:
        decoder_ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
        return Scored(decoder_states(model, inputs, decoder_ids).flatten(0, 1), model.get_output_embeddings())
    return Scored(model(**inputs, labels=labels, use_cache=False).logits.flatten(0, 1))


def has_plain_decoder_head(model: "PreTrainedModel", vocab_size: int) -> bool:
    """Return True if the logits are exactly the output embedding applied to `decoder_states`."""
    if not hasattr(model, "prepare_decoder_input_ids_from_labels") or model.get_decoder().get_output_embeddings():
        return False  # M2M100 (NLLB) shifts labels itself; an EncoderDecoderModel holds a whole language model
    ids = torch.arange(8).remainder(vocab_size)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return is_plain_head(
        model,
        lambda: model(**inputs, decoder_input_ids=ids, use_cache=False).logits,
        lambda: decoder_states(model, inputs, ids),
    )
