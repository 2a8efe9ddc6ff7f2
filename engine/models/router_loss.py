"""Load-balancing loss of a mixture of experts, as a sum over rows.

transformers computes it from the mean routing of all tokens of a micro-batch, padding included, so it would depend on
how the global batch is split. Here each row has a loss of its own (the sequence-wise balance loss of DeepSeek-V3,
2024), weighted by its targets: for a row alone both are equal. Tests: tests/engine/models/test_router_loss.py.
"""

from typing import Any

import torch

from engine.config.errors import UsageError
from engine.models.config_and_tokenizer import config_value, text_config
from engine.models.model_checks import LENGTH, probing

TOP_K_NAMES = ("num_experts_per_tok", "moe_k", "num_experts_per_token")


def router_coefficient(config: Any, chosen: float | None) -> float:
    """Return the weight of the load-balancing loss: `chosen`, else the model's own if its config asks for that loss."""
    if chosen is None and config_value(text_config(config), "output_router_logits"):
        chosen = config_value(text_config(config), "router_aux_loss_coef")
    return chosen or 0.0


def experts_per_token(config: Any) -> int:
    """Return how many experts a token is sent to, 0 if the configuration does not tell."""
    return next((int(k) for name in TOP_K_NAMES if (k := config_value(text_config(config), name))), 0)


def balance_losses(router_logits: tuple[torch.Tensor, ...], is_real: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the load-balancing loss of each row (Fedus et al. 2021, equations 4 to 6, over all layers together).

    Each layer's logits are (rows × width, experts); `is_real` (rows, width) is false for padding."""
    chosen = probability = 0.0
    for logits in router_logits:
        shares = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))  # float32 or better
        shares = shares.view(*is_real.shape, -1)
        sent = torch.zeros_like(shares).scatter(-1, shares.topk(top_k, dim=-1).indices, 1.0)
        chosen = chosen + (sent * is_real[..., None]).sum(1)
        probability = probability + (shares * is_real[..., None]).sum(1)
    tokens = is_real.sum(1, keepdim=True).clamp(min=1) * len(router_logits)
    return (chosen / tokens * probability / tokens).sum(-1) * router_logits[0].shape[-1]


def check_router(model: Any, vocab_size: int) -> None:
    """Raise UsageError unless the load-balancing loss of this model is the one that `balance_losses` computes."""
    ids, top_k = torch.arange(LENGTH).remainder(vocab_size)[None], experts_per_token(model.config)
    with probing(model):
        output = model(input_ids=ids, use_cache=False, output_router_logits=True)
    logits, expected = getattr(output, "router_logits", None), getattr(output, "aux_loss", None)
    if not (logits and isinstance(expected, torch.Tensor) and top_k) or not torch.allclose(
        balance_losses(logits, torch.ones_like(ids), top_k)[0].float(), expected.float()
    ):
        raise UsageError(
            f"the load-balancing loss of {type(model).__name__} is not known here: give --router_aux_loss_coef 0 to train "
            "without it"
        )
