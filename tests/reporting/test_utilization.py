"""FLOPs per token against PyTorch's own count of operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from src.reporting.utilization import flops_per_token
from tests.helpers import kit


def counted(model, rows: int, length: int) -> float:
    """Return the FLOPs per token of one forward and backward pass, counted operation by operation."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("tied, lora", [(True, False), (False, True)])
def test_flops_are_those_that_pytorch_counts(tied, lora):
    config = AutoConfig.for_model(**kit.LLAMA | {"tie_word_embeddings": tied, "num_key_value_heads": 4})
    config._attn_implementation = "eager"  # its products are counted one by one
    model = AutoModelForCausalLM.from_config(config)
    if lora:  # every weight but the last is frozen, and the gradient of its input is still needed
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad = True
        model.enable_input_require_grads()
    assert flops_per_token(model, 24) == pytest.approx(counted(model, 3, 24), rel=0.01)
