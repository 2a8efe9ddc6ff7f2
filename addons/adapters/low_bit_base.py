"""A base model in 4 or 8 bits under an adapter (QLoRA), by the package bitsandbytes: `load_in_4bit`, `load_in_8bit`.

The base is built in `dtype`, and its linear layers are then quantized on the CPU, so it has the same bits on every
device. This file comes before peft/ by its name: add-ons change a model in this order.
Tests: tests/addons/adapters/test_low_bit_base.py.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from engine.config.addon import Addon
from engine.config.errors import UsageError, how_to_install
from engine.config.option import option
from engine.config.run_config import field_values
from engine.distributed.init_accelerator import sharding_of_launch
from engine.process import private_apis

BLOCK = 64  # weights of NF4 that share a scale, as in the QLoRA paper (Dettmers et al. 2023)
SCALES = 256  # of these scales, which are quantized to 8 bits ("double quantization"), share one in float32
OUTLIER = 6.0  # inputs of 8-bit layers above it are multiplied in 16 bits: the default of LLM.int8() and transformers
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # mixed_precision -> products


@dataclass(frozen=True)
class LowBitBase(Addon):
    load_in_4bit: bool = option(
        "keep the linear layers of the base model of `peft` in 4 bits (QLoRA: NF4, double quantization): an eighth of the "
        "memory of float32",
        False,
        group="model",
    )
    load_in_8bit: bool = option("keep the linear layers of the base model of `peft` in 8 bits (LLM.int8)", False)

    def errors(self, cfg: Any, training: bool) -> Iterator[str]:
        """Yield why this run cannot have such a base model."""
        name = "load_in_4bit" if self.load_in_4bit else "load_in_8bit"
        if self.load_in_4bit and self.load_in_8bit:
            yield "load_in_4bit and load_in_8bit are both true: give one of them"
        if not field_values(cfg).get("peft"):
            yield (
                f"{name}: weights of so few bits cannot be trained, only an adapter on them: give peft: {{type: lora, …}}, "
                "or remove this field"
            )
        if private_apis.bitsandbytes() is None:
            yield f"{name}: it needs the package bitsandbytes: {how_to_install('bitsandbytes')}"
        sharding = sharding_of_launch()
        if int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1")) > 1:
            sharding = [*sharding, "tensor parallelism"]
        if sharding:
            yield (
                f"{name}: {sharding[0]} would shard the quantized weights, which is not supported: launch by "
                "accelerate_configs/ddp.yaml, where each device holds all of them"
            )

    @classmethod
    def names_elsewhere(cls) -> dict[str, str]:
        """Return fields of transformers' configuration and of other trainers."""
        of_transformers = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
        fixed = "load_in_4bit means NF4 with double quantization, computed in the precision of the launch"
        return dict.fromkeys(of_transformers, fixed) | {"quantization_config": "give load_in_4bit: true and peft"}

    def change_built_model(self, task: Any, model: torch.nn.Module, weights: Any, empty: bool) -> None:
        """Quantize the linear layers of the part of the model that is trained; of an empty one only their sizes.

        The adapter is merged (addons/adapters/peft/merging.py) into the weights that it was trained on, in bfloat16."""
        bits = 4 if self.load_in_4bit else 8
        quantize(task, task.saved(model), bits, empty)
        task.change_base_to_merge = partial(round_weights, task, bits=bits)
        task.dtype_of_merged = torch.bfloat16

    def complete(self, cfg: Any) -> dict[str, Any]:
        """Return that final/ holds the adapter alone, unless the run file says otherwise."""
        return {"merge": False} if field_values(cfg).get("merge", True) is None else {}

    def plan_rows(self, cfg: Any, task: Any, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return the line of the plan about the bits of the base model."""
        share = f"{task.quantized_weights:,} weights in {self._kind()}, the others in {cfg.dtype}"
        return {"base model": f"{share}; its layers compute in {str(compute_dtype(cfg)).removeprefix('torch.')}"}

    def change_card(self, card: Any, task: Any, model: torch.nn.Module) -> None:
        """Say how many bits the base model had."""
        merged = (
            " The merged weights are the dequantized ones and the adapter, in bfloat16."
            if field_values(task.cfg)["merge"]
            else ""
        )
        card.paragraphs.append(
            f"The base model had {self._kind()} in training and evaluation, by bitsandbytes.{merged}"
        )

    def _kind(self) -> str:
        return "4 bits (NF4, double quantization)" if self.load_in_4bit else "8 bits (LLM.int8)"


# ---- which layers --------------------------------------------------------------------------------------------------------


def layers_to_quantize(task: Any, model: torch.nn.Module) -> list[str]:
    """Return the names of the linear layers that become ones of fewer bits, as transformers chooses them.

    Not the head, weights that are tied, a new head of the task, nor `modules_to_save` of the adapter, which are
    trained. Experts that transformers holds as one tensor are no linear layers and stay as they are."""
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"load_in_4bit and load_in_8bit: {type(model).__name__} is no model of transformers: remove the field"
        )
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise RuntimeError("the base model has its adapter already, which would be quantized, too")
    trained = [*getattr(task, "new_head", ()), *(field_values(task.cfg)["peft"].get("modules_to_save") or ())]
    kept = private_apis.names_not_to_quantize(model)
    layers = []
    for name, module in model.named_modules():
        is_linear = type(module) is torch.nn.Linear or isinstance(module, Conv1D)
        is_trained = any(part in f"{name}." for part in trained)
        if is_linear and not is_trained and private_apis.may_quantize(name, kept):
            layers.append(name)
    if not layers:
        raise UsageError(f"load_in_4bit and load_in_8bit: {type(model).__name__} has no linear layers to quantize")
    return layers


def compute_dtype(cfg: Any) -> torch.dtype:
    """Return the dtype in which quantized layers compute: that of the launch, else `dtype`, of float64 float32.

    bitsandbytes 0.50 has no kernels in float64: on a CPU they would return memory that was never written."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    own = torch.float32 if cfg.dtype == "float64" else getattr(torch, cfg.dtype)
    return PRECISIONS.get(precision, own)


# ---- quantization --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize(task: Any, model: torch.nn.Module, bits: int, empty: bool = False) -> None:
    """Replace the linear layers of `model` by those of bitsandbytes, in place, one after the other.

    Their weights are rounded from float32, to which those of other dtypes are cast. If `empty`, only sizes are right."""
    task.quantized_weights = 0
    for name in layers_to_quantize(task, model):
        layer = model.get_submodule(name)
        task.quantized_weights += layer.weight.numel()
        new = linear_4bit(layer, compute_dtype(task.cfg), empty) if bits == 4 else linear_8bit(layer, empty)
        new.requires_grad_(False)
        model.set_submodule(name, new.train(layer.training))
    setattr(model, f"is_loaded_in_{bits}bit", True)  # peft asks for it


@torch.no_grad()
def round_weights(task: Any, model: torch.nn.Module, bits: int) -> None:
    """Give the linear layers of `model` the values that they have in `bits` bits, in their own dtype."""
    for name in layers_to_quantize(task, model):
        layer = model.get_submodule(name)
        if bits == 4:
            weight = linear_4bit(layer, torch.float32, empty=False).weight
            values = private_apis.bitsandbytes().functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            weight = linear_8bit(layer, empty=False).weight
            values = private_apis.bitsandbytes().functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        layer.weight.copy_(values if is_plain(layer) else values.T)


def is_plain(layer: torch.nn.Module) -> bool:
    """Return whether the weight of a layer is (out, in); that of Conv1D (GPT-2) is transposed."""
    return isinstance(layer, torch.nn.Linear)


def weight_of(layer: torch.nn.Module, empty: bool) -> torch.Tensor:
    """Return the weight (out, in) of a layer in float32; if `empty`, one that takes no memory."""
    weight = layer.weight.detach()
    if not is_plain(layer):
        weight = weight.T
    if empty:
        return torch.zeros(1).expand(weight.shape)
    return weight.to(torch.float32).contiguous()


def linear_4bit(layer: torch.nn.Module, compute: torch.dtype, empty: bool) -> torch.nn.Module:
    """Return the layer in NF4 with double quantization; it computes in the dtype `compute`."""
    bitsandbytes = private_apis.bitsandbytes()
    weight = weight_of(layer, empty)
    rows, columns = weight.shape
    with torch.device("meta"):
        new = bitsandbytes.nn.Linear4bit(columns, rows, layer.bias is not None, compute, quant_type="nf4")
    # On a CPU with AVX512-BF16 an evaluation would repack the weights for a kernel in bfloat16 that has no gradient, and
    # training after it would go on with that.
    new.support_avx512bf16_for_cpu = False
    new.bias = layer.bias
    options = {"compress_statistics": True, "quant_type": "nf4", "blocksize": BLOCK, "module": new}
    if empty:
        new.weight = bitsandbytes.nn.Params4bit(torch.zeros(1, BLOCK), **options).to("cpu")
        state = new.weight.quant_state
        scales = -(-weight.numel() // BLOCK)
        new.weight.data = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8)
        state.shape = weight.shape
        state.absmax = torch.empty(scales, dtype=torch.uint8)
        state.state2.absmax = torch.empty(-(-scales // SCALES))
    else:
        new.weight = bitsandbytes.nn.Params4bit(weight, **options).to("cpu")  # which quantizes it
    return new


def linear_8bit(layer: torch.nn.Module, empty: bool) -> torch.nn.Module:
    """Return the layer in 8 bits, with a scale for each output."""
    bitsandbytes = private_apis.bitsandbytes()
    weight = weight_of(layer, empty)
    rows, columns = weight.shape
    with torch.device("meta"):
        new = moving_linear_8bit()(columns, rows, layer.bias is not None, has_fp16_weights=False, threshold=OUTLIER)
    new.bias = layer.bias
    if empty:
        values = torch.empty(rows, columns, dtype=torch.int8)
        new.weight = bitsandbytes.nn.Int8Params(values, False, CB=values, SCB=torch.empty(rows))
    else:
        new.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False).to("cpu")  # which quantizes it
    return new


@cache
def moving_linear_8bit() -> type[torch.nn.Module]:
    """Return bitsandbytes' layer of 8 bits; what it computes with moves to a device together with its weight.

    In bitsandbytes 0.50, values and scales are moved only with a layer that is moved alone. With the model that holds it
    they stay where they were quantized, and the first forward pass on a GPU fails."""

    class MovingLinear8bit(private_apis.bitsandbytes().nn.Linear8bitLt):  # type: ignore
        def _apply(self, *arguments, **options):
            super()._apply(*arguments, **options)
            for owner in (self.weight, self.state):  # of the first until the first forward pass, then of the second
                if getattr(owner, "CB", None) is not None:
                    owner.CB = self.weight.data
                    owner.SCB = owner.SCB.to(self.weight.device)
            return self

    return MovingLinear8bit
