"""What a language model computes for the tokens of a batch, and the cross-entropy of single rows in chunks of logits.

Tests: tests/addons/techniques/test_hard_examples.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from src.models.cross_entropy import IGNORED, PLAIN, CrossEntropy
from src.models.losses import at_least_float32, chunk_rows, recomputed
from src.runtime.private_apis import known_masks


class Scored(NamedTuple):
    """What a language model computes for a micro-batch: hidden states (rows, features) and the head on them.

    Without a head, the hidden states are the logits."""

    hidden: torch.Tensor
    head: torch.nn.Linear | None


def score_tokens(model: torch.nn.Module, inputs: dict[str, torch.Tensor], plain_head: bool) -> Scored:
    """Run a language model on `input_ids` and `position_ids` of packed rows; the head runs only if it is not linear."""
    positions = inputs.get("position_ids")
    arguments = {"input_ids": inputs["input_ids"], "position_ids": positions, "use_cache": False}
    with known_masks(packed=positions is not None):
        output = model.base_model(**arguments) if plain_head else model(**arguments)
    if plain_head:
        return Scored(output.last_hidden_state.flatten(0, 1), model.get_output_embeddings())
    return Scored(output.logits.flatten(0, 1), None)


def row_losses(
    hidden: torch.Tensor,
    head: torch.nn.Linear | None,
    targets: torch.Tensor,
    options: CrossEntropy = PLAIN,
    class_weights: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return `loss` and `weight` of each row, (rows,), which add up to the training loss and the weight of the batch.

    targets (rows, …); hidden (number of targets, features), of which only a chunk of the logits `head(hidden)` exists
    at a time. Without a head, `hidden` are the logits. Targets of -100 are ignored."""
    flat = targets.flatten()
    if head is None:
        losses = options.per_target(at_least_float32(hidden), flat, class_weights)["loss"]
    else:
        size = chunk_rows(hidden.device.type, head.weight.shape[0])
        chunks = zip(hidden.split(size), flat.split(size), strict=True)
        losses = torch.cat([recomputed(_losses_of_chunk, h, head.weight, head.bias, t, options) for h, t in chunks])
    weights = (targets != IGNORED).long()
    if class_weights is not None:
        weights = weights * class_weights[targets.clamp(min=0)]
    found = {"loss": losses.view_as(targets), "weight": weights}
    return {name: values.reshape(len(targets), -1).sum(1) for name, values in found.items()}


def _losses_of_chunk(hidden, weight, bias, targets: torch.Tensor, options: CrossEntropy) -> torch.Tensor:
    return options.per_target(at_least_float32(F.linear(hidden, weight, bias)), targets)["loss"]
