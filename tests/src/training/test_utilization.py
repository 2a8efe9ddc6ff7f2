"""FLOPs per token against PyTorch's own count of operations, and the table of peak rates."""

import gzip
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from src.training.utilization import flops_per_token, peak_tflops
from tests.helpers import kit


def counted(model, rows: int, length: int) -> float:
    """Return the FLOPs per token of one forward and backward pass, counted operation by operation."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("tied, lora", [(True, False), (False, False), (False, True)])
def test_flops_are_those_that_pytorch_counts(tied, lora):
    config = AutoConfig.for_model(**kit.LLAMA | {"tie_word_embeddings": tied, "num_key_value_heads": 4})
    config._attn_implementation = "eager"  # its products are counted one by one
    model = AutoModelForCausalLM.from_config(config)
    if lora:  # every weight but the last is frozen, and the gradient of its input is still needed
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad = True
        model.enable_input_require_grads()
    assert flops_per_token(model, 24) == pytest.approx(counted(model, 3, 24), rel=0.01)


def test_peak_of_devices():
    assert peak_tflops("NVIDIA H100 PCIe", torch.float16) == 756  # and not the 989 of an H100
    assert peak_tflops("NVIDIA H200", torch.float32) is None
    assert peak_tflops("a device of tomorrow", torch.bfloat16) is None


def test_profile_holds_the_steps_that_were_asked_for(tiny, tmp_path):
    flags = kit.flags(**tiny, max_steps=6, global_batch_size=8)
    for steps, count in (("2 4", 3), ("5 9", 2)):  # the second one ends with the run
        run = kit.run_training(1, tmp_path / steps[0], *flags, "--profile_steps", *steps.split())
        [trace] = (run.folder / "profile").glob("*.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert sum(event["name"] == "Optimizer.step#AdamW.step" for event in events) == count
        assert "aten::addmm" in trace.with_name(trace.name.replace(".json.gz", ".txt")).read_text()
