"""Memory estimate per device for each strategy, from a model without weights.

docs/scaling.md has the arithmetic and what it ignores. Tests: tests/models/test_memory_estimate.py.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from src.config.schema import RunConfig
from src.models.activation_memory import Forward, activation_bytes
from src.runtime import private_apis

LOW_PRECISION = ("bf16", "fp16", "fp8")
DEEPSPEED_BUCKET = 5e8  # gradient elements reduced at a time (DeepSpeed's default)
DEEPSPEED_LIVE = 1e9  # weight elements gathered at a time under ZeRO-3 (DeepSpeed's default)


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts of a model; `trained` counts trainable parameters."""

    parameters: int
    trained: int
    layer: int  # in the largest layer
    layer_trained: int
    rest: int  # outside all layers: embedding, head
    rest_trained: int
    layers: int  # number of layers
    matrices: int  # in weights that autocast copies: 2-D or more, except embeddings that are not tied


@dataclass(frozen=True)
class StrategySettings:
    """One way to distribute a model. `shards` processes together hold one copy of what the strategy shards."""

    name: str
    file: str = ""  # in accelerate_configs/
    kind: str = "NO"  # NO, DDP, FSDP, ZERO1, ZERO2, ZERO3
    shards: int = 1
    low_precision: bool = True  # mixed precision: matrix products in 16 bits
    reduce_often: bool = True  # gradients are reduced after every micro-batch, not once a step
    reshard: bool = True  # gathered weights are freed after use
    offload: bool = False  # weights, gradients and optimizer state stay in host memory
    recompute: bool = False  # activation checkpointing: backward recomputes the activations of each layer
    flags: str = ""  # flags needed besides the file


def strategy_of_launch(cfg: RunConfig) -> StrategySettings:
    """Return the strategy set by the launcher's environment variables."""

    def env(name: str, default: str = "") -> str:
        return os.environ.get(name, default).lower()

    world = int(env("WORLD_SIZE", "1"))
    low_precision = env("ACCELERATE_MIXED_PRECISION") in LOW_PRECISION and cfg.dtype == "float32"
    recompute = cfg.gradient_checkpointing
    if env("ACCELERATE_USE_DEEPSPEED") == "true":
        stage = env("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        offload = env("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none"
        return StrategySettings(
            f"ZeRO-{stage}", "", f"ZERO{stage}", world, low_precision, offload=offload, recompute=recompute
        )
    if env("ACCELERATE_USE_FSDP") == "true":
        copies = int(env("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        tp_size = int(env("PARALLELISM_CONFIG_TP_SIZE", "1"))
        return StrategySettings(
            name="HSDP" if copies > 1 else "FSDP2",
            kind="FSDP",
            shards=max(1, world // copies // tp_size),  # TP splits most weights further: an upper bound
            low_precision=low_precision,
            reduce_often=cfg.sync_each_batch is not False,
            reshard=env("FSDP_RESHARD_AFTER_FORWARD", "true") == "true",
            offload=env("FSDP_OFFLOAD_PARAMS") == "true",
            recompute=recompute or env("FSDP_ACTIVATION_CHECKPOINTING") == "true",
        )
    name, kind = ("DDP", "DDP") if world > 1 else ("one device", "NO")
    return StrategySettings(name, kind=kind, low_precision=low_precision, recompute=recompute)


def count_parameters(model: torch.nn.Module) -> ModelSize:
    """Return the parameter counts of a model, which may be on the meta device or sharded."""

    def sizes(parameters: Iterable[torch.nn.Parameter]) -> tuple[int, int]:
        total = trained = 0
        for parameter in parameters:
            size = getattr(parameter, "ds_numel", parameter.numel())  # ds_numel: under ZeRO-3
            total += size
            trained += size * parameter.requires_grad
        return total, trained

    kinds = private_apis.layer_class_names(model)
    layers = [m for m in model.modules() if any(kind.__name__ in kinds for kind in type(m).__mro__)]
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tied = {
        id(p) for m in model.modules() if not isinstance(m, torch.nn.Embedding) for p in m.parameters(recurse=False)
    }
    matrices = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) >= 2]
    return ModelSize(
        *sizes(model.parameters()),
        *max((sizes(layer.parameters()) for layer in layers), default=(0, 0)),
        *sizes(p for p in model.parameters() if id(p) not in in_layers),
        layers=len(layers),
        matrices=sizes(p for p in matrices if id(p) not in tables - tied)[0],
    )


def optimizer_moments(cfg: RunConfig) -> int:
    """Return the number of optimizer state values per trainable parameter; a guess for unlisted optimizers."""
    return {"sgd": 1, "lion": 1, "muon": 1, "adafactor": 0}.get(cfg.optim.lower(), 2)


def resting_bytes(size: ModelSize, cfg: RunConfig, strategy: StrategySettings, copies: int = 0) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer state that a process keeps between steps.

    `copies`: copies of the trained weights, in float32, that techniques have; they count as weights."""
    width, shards = getattr(torch, cfg.dtype).itemsize, strategy.shards
    weights, gradients = width * size.parameters, width * size.trained
    if strategy.kind.startswith("ZERO"):
        stage = int(strategy.kind[-1])
        compute = 2 if strategy.low_precision else width
        # DeepSpeed adds a float32 master copy, sharded at every stage, even if the weights are float32.
        weights = compute * size.parameters / (shards if stage == 3 else 1) + 4 * size.trained / shards
        gradients = 4 * size.trained / (shards if stage > 1 else 1)
    elif strategy.kind == "FSDP":
        weights, gradients = weights / shards, gradients / shards
    weights += copies * max(width, 4) * size.trained / shards
    optimizer = optimizer_moments(cfg) * width * size.trained / shards
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def working_bytes(size: ModelSize, cfg: RunConfig, strategy: StrategySettings) -> float:
    """Return the bytes that forward and backward need temporarily, besides activations.

    These are low-precision copies of weights, gathered weights, and gradients before they are reduced."""
    width = getattr(torch, cfg.dtype).itemsize
    compute = 2 if strategy.low_precision else width
    if strategy.kind == "FSDP":
        # Gathered: the current layer, the next one, embedding and head. Gradients are reduced in full precision.
        gathered = compute * (size.rest + 2 * size.layer if strategy.reshard else size.parameters)
        unreduced = width * size.trained
        if strategy.reduce_often:
            unreduced = compute * (size.rest_trained + size.layer_trained)
        return gathered + unreduced + width * max(size.rest_trained, size.layer_trained)
    if strategy.kind == "ZERO3":
        return compute * (min(DEEPSPEED_LIVE, size.parameters) + DEEPSPEED_BUCKET)
    if strategy.kind.startswith("ZERO"):
        return compute * DEEPSPEED_BUCKET
    return compute * size.matrices if strategy.low_precision else 0.0


def activations(
    forward: Forward, size: ModelSize, length: int, cfg: RunConfig, strategy: StrategySettings
) -> float | None:
    """Return the activation bytes of a micro-batch with rows of `length` tokens, None if they cannot be measured."""
    dtype = torch.bfloat16 if strategy.low_precision else getattr(torch, cfg.dtype)
    autocast = strategy.low_precision and strategy.kind in ("NO", "DDP")  # the others cast whole weights
    layers = size.layers if strategy.recompute else 0
    return activation_bytes(forward, rows_per_forward(cfg, length), dtype, autocast, layers)


def rows_per_forward(cfg: RunConfig, length: int) -> int:
    """Return the number of rows of `length` tokens in a forward pass."""
    if cfg.per_device_batch_tokens:
        return max(1, cfg.per_device_batch_tokens // length)
    return 1 if cfg.per_device_batch_size == "auto" else cfg.per_device_batch_size


def describe_memory(
    cfg: RunConfig,
    model: torch.nn.Module,
    format_size: Callable[[float], str],
    forward: Forward | None = None,
    length: int = 1,
    copies: int = 0,
) -> str:
    """Return one line: the memory per device under this launch's strategy. Activations need a `forward` pass.

    `copies`: copies of the trained weights that techniques have."""
    size, strategy = count_parameters(model), strategy_of_launch(cfg)
    resting = format_size(sum(resting_bytes(size, cfg, strategy, copies).values()))
    where = f"rest in host memory ({strategy.name}, offload)" if strategy.offload else f"per device ({strategy.name})"
    extra = f" ({copies} extra cop{'ies' if copies > 1 else 'y'} for techniques)" if copies else ""
    parts = [f"{resting} {where} for weights{extra}, gradients and optimizer"]
    if working := working_bytes(size, cfg, strategy):
        parts.append(f"{format_size(working)} for temporary copies")
    kept = activations(forward, size, length, cfg, strategy) if forward else None
    parts.append(f"about {format_size(kept)} for activations" if kept else "plus activations")
    return "; ".join(parts)
