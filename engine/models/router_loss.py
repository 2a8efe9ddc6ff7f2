"""Load-balancing loss of a mixture of experts, as a sum over rows.

transformers computes it from the mean routing of all tokens of a micro-batch, padding included, so it would depend on
how the global batch is split. Here each row has a loss of its own (the sequence-wise balance loss of DeepSeek-V3,
2024), weighted by its targets: for a row alone both are equal. Tests: tests/engine/models/test_router_loss.py.
"""

from typing import Any

import torch

from engine.config.errors import UsageError
from engine.models.config_and_tokenizer import config_value, experts_per_token, text_config
from engine.models.model_checks import LENGTH, probing


class RouterLoss:
    """The load-balancing loss of a language model with experts; its coefficient is 0 without one."""

    def __init__(self, config: Any, coefficient: float | None):
        """Take the coefficient, or if it is None the model's own if its configuration asks for that loss."""
        if coefficient is None and config_value(text_config(config), "output_router_logits"):
            coefficient = config_value(text_config(config), "router_aux_loss_coef")
        self.coefficient = coefficient or 0.0
        self.top_k = experts_per_token(config)

    def by_row(self, router_logits: tuple[torch.Tensor, ...], is_real: torch.Tensor) -> torch.Tensor:
        """Return the load-balancing loss of each row; `is_real` (rows, width) is false for padding."""
        return balance_losses(router_logits, is_real, self.top_k)

    def check(self, model: Any, vocab_size: int) -> None:
        """Raise UsageError unless the load-balancing loss of this model is the one that `by_row` computes."""
        ids = torch.arange(LENGTH).remainder(vocab_size)[None]
        with probing(model):
            output = model(input_ids=ids, use_cache=False, output_router_logits=True)
        logits = getattr(output, "router_logits", None)
        expected = getattr(output, "aux_loss", None)
        is_known = bool(logits) and isinstance(expected, torch.Tensor) and self.top_k > 0
        if is_known:
            ours = self.by_row(logits, torch.ones_like(ids))[0]
            is_known = torch.allclose(ours.float(), expected.float())
        if not is_known:
            raise UsageError(
                f"the load-balancing loss of {type(model).__name__} is not known here: give --router_aux_loss_coef 0 to "
                "train without it"
            )


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
