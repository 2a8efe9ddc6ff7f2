"""Estimate of memory per device for each strategy, without building the model.

docs/scaling.md has the arithmetic and what it leaves out. Tests: tests/models/test_memory_estimate.py.
"""

import os
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from src.config.schema import RunConfig
from src.models.attention_masks import known_masks
from src.models.losses import chunk_rows

LOW = ("bf16", "fp16", "fp8")
BUCKET, LIVE = (
    5e8,
    1e9,
)  # DeepSpeed's defaults: elements of its bucket of gradients, and of weights gathered at a time at most


@dataclass(frozen=True)
class Counted:
    """Numbers of parameters: of the model, of its largest layer, and of what is in no layer (embedding, head)."""

    parameters: int
    trained: int
    layer: int
    layer_trained: int
    rest: int
    rest_trained: int
    layers: int
    matrices: int  # in weights that autocast copies: all with two dimensions, but for an embedding of its own


@dataclass(frozen=True)
class Strategy:
    """A way of spreading a model over `shards` processes that hold one copy of it together."""

    name: str
    file: str  # of accelerate_configs/
    kind: str = "NO"  # NO, DDP, FSDP, ZERO1, ZERO2, ZERO3
    shards: int = 1
    low: bool = True  # matrix products in 16 bits
    each: bool = True  # gradients are reduced after every micro-batch, not once a step
    reshard: bool = True  # gathered weights are let go after use
    offload: bool = False  # what rests does so in host memory
    recompute: bool = False  # activations of a layer are computed again in backward
    flags: str = ""  # what it needs on the command line, besides the file


def strategies(cfg: RunConfig, gpus: int) -> list[Strategy]:
    """Return the ways of using `gpus` devices, the simplest first."""
    low, again = cfg.dtype == "float32", cfg.gradient_checkpointing
    if gpus == 1:
        return [Strategy("one GPU", "gpu", low=low, recompute=again)]
    fsdp = Strategy("FSDP2", "fsdp2", "FSDP", gpus, low, recompute=again)
    zero = Strategy("ZeRO-2", "zero2", "ZERO2", gpus, low, recompute=again)
    three = replace(zero, name="ZeRO-3", file="zero3", kind="ZERO3")
    hybrid = replace(fsdp, name="HSDP, 2 copies", file="hsdp", shards=gpus // 2)
    found = [
        Strategy("DDP", "ddp", "DDP", 1, low, recompute=again),
        replace(fsdp, name="FSDP2, reduced once", each=False, flags=" and --sync_each_batch false"),
        fsdp,
        *([hybrid] if gpus >= 4 and gpus % 2 == 0 else []),
        zero,
        three,
        replace(fsdp, name="FSDP2, offload", file="fsdp2_offload", offload=True, recompute=True),
        replace(three, name="ZeRO-3, offload", file="zero3_offload", offload=True),
    ]
    return [way for way in found if cfg.dtype != "float64" or not way.kind.startswith("ZERO")]


def strategy_here(cfg: RunConfig) -> Strategy:
    """Return the strategy that the launcher's environment asks for."""

    def env(name: str, default: str = "") -> str:
        return os.environ.get(name, default).lower()

    world, low = int(env("WORLD_SIZE", "1")), env("ACCELERATE_MIXED_PRECISION") in LOW and cfg.dtype == "float32"
    again = cfg.gradient_checkpointing
    if env("ACCELERATE_USE_DEEPSPEED") == "true":
        stage = env("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        away = env("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none"
        return Strategy(f"ZeRO-{stage}", "", f"ZERO{stage}", world, low, offload=away, recompute=again)
    if env("ACCELERATE_USE_FSDP") == "true":
        copies = int(env("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        return Strategy(
            "HSDP" if copies > 1 else "FSDP2",
            "",
            "FSDP",
            # An upper bound where layers are cut (TP).
            max(1, world // copies // int(env("PARALLELISM_CONFIG_TP_SIZE", "1"))),
            low,
            cfg.sync_each_batch is not False,
            env("FSDP_RESHARD_AFTER_FORWARD", "true") == "true",
            env("FSDP_OFFLOAD_PARAMS") == "true",
            again or env("FSDP_ACTIVATION_CHECKPOINTING") == "true",
        )
    return Strategy(*(("DDP", "", "DDP") if world > 1 else ("one device", "")), low=low, recompute=again)


def count(model: torch.nn.Module) -> Counted:
    """Return the numbers of parameters of a model, also of one on torch's meta device or in shards."""

    def sizes(parameters) -> tuple[int, int]:
        each = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in parameters]  # ds_numel: under ZeRO-3
        return sum(n for n, _ in each), sum(n for n, trained in each if trained)

    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if any(kind.__name__ in names for kind in type(m).__mro__)]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    table = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    alone = table is not None and getattr(head, "weight", None) is not table.weight
    return Counted(
        *sizes(model.parameters()),
        *max((sizes(layer.parameters()) for layer in layers), default=(0, 0)),
        *sizes(p for p in model.parameters() if id(p) not in inside),
        len(layers),
        sizes(
            p
            for p in model.parameters()
            if len(getattr(p, "ds_shape", p.shape)) >= 2 and not (alone and p is table.weight)
        )[0],
    )


def moments(cfg: RunConfig) -> int:
    """Return how many numbers the optimizer keeps for each that is trained."""
    return 1 if cfg.optim == "sgd" else 2


def resting(n: Counted, cfg: RunConfig, way: Strategy) -> dict[str, float]:
    """Return the bytes of weights, gradients and moments that a process keeps from step to step, on device or host."""
    width, shards = torch.finfo(getattr(torch, cfg.dtype)).bits // 8, way.shards
    weights, gradients = width * n.parameters, width * n.trained
    if way.kind.startswith("ZERO"):
        compute, stage = 2 if way.low else width, int(way.kind[-1])
        # Its masters are a copy, sharded at every stage, also of weights that are float32 themselves.
        weights = compute * n.parameters / (shards if stage == 3 else 1) + 4 * n.trained / shards
        gradients = 4 * n.trained / (shards if stage > 1 else 1)
    elif way.kind == "FSDP":
        weights, gradients = weights / shards, gradients / shards
    return {"weights": weights, "gradients": gradients, "optimizer": moments(cfg) * width * n.trained / shards}


def passing(n: Counted, cfg: RunConfig, way: Strategy) -> float:
    """Return the bytes that a forward and backward pass needs for a while, besides activations: compute copies, gathered
    units, and gradients that are not reduced yet."""
    width = torch.finfo(getattr(torch, cfg.dtype)).bits // 8
    compute = 2 if way.low else width
    if way.kind == "FSDP":
        # The layer at work and the next one; embedding and head stay throughout. Reductions read a copy in full precision.
        gathered = compute * (n.rest + 2 * n.layer if way.reshard else n.parameters)
        waiting = compute * (n.rest_trained + n.layer_trained) if way.each else width * n.trained
        return gathered + waiting + width * max(n.rest_trained, n.layer_trained)
    if way.kind == "ZERO3":
        return compute * (min(LIVE, n.parameters) + BUCKET)
    if way.kind.startswith("ZERO"):
        return compute * BUCKET
    return compute * n.matrices if way.low else 0.0


class _Attention(torch.autograd.Function):
    """Keeps for backward what flash attention keeps: its inputs, its output, and a number a row."""

    @staticmethod
    def forward(ctx, q, k, v):
        rows, heads, length, _ = q.shape
        out = q.new_empty(rows, length, heads, v.shape[-1]).transpose(1, 2)  # as the layers before and after have it
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32))
        return out


def _kept(model: torch.nn.Module, rows: int, length: int, dtype: torch.dtype, autocast: bool) -> tuple[int, int]:
    """Return (bytes that autograd keeps of a forward pass, bytes of one layer's input), by running it on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    base, kept, attention = getattr(model, "base_model", model), {}, F.scaled_dot_product_attention

    def keep(value):
        storage = value.untyped_storage()
        kept[storage._cdata] = storage.nbytes(), value
        return value

    def fake(value):
        as_it_is = autocast or not value.is_floating_point()
        return torch.empty(value.shape, dtype=value.dtype if as_it_is else dtype, requires_grad=value.requires_grad)

    F.scaled_dot_product_attention = lambda q, k, v, *_, **__: _Attention.apply(q, k, v)
    try:
        with FakeTensorMode():
            values = {name: fake(v) for name, v in [*base.named_parameters(), *base.named_buffers()]}
            own = {value.untyped_storage()._cdata for value in values.values()}
            inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.long), "use_cache": False}
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value)
            with hooks, known_masks(packed=False), torch.autocast("cpu", dtype, enabled=autocast):
                hidden = torch.func.functional_call(base, values, kwargs=inputs)[0]
            return sum(size for key, (size, _) in kept.items() if key not in own), hidden.nbytes
    finally:
        F.scaled_dot_product_attention = attention


@lru_cache(maxsize=2)  # the strategies ask for two kinds only
def _row(model: torch.nn.Module, length: int, dtype: torch.dtype, autocast: bool) -> tuple[int, int]:
    """Return what another row of this length adds: without copies of weights, which do not grow with rows."""
    (one, hidden), (two, _) = (_kept(model, rows, length, dtype, autocast) for rows in (1, 2))
    return two - one, hidden


def activations(model: torch.nn.Module, n: Counted, length: int, cfg: RunConfig, way: Strategy) -> float | None:
    """Return the bytes that autograd keeps of a micro-batch of rows of this length, and one chunk of logits; None for a
    model that does not run on token ids alone."""
    low, rows = torch.bfloat16 if way.low else getattr(torch, cfg.dtype), rows_at_once(cfg, length)
    try:
        each, hidden = _row(model, length, low, way.low and way.kind in ("NO", "DDP"))  # others cast whole weights
    except Exception:  # a fork's model may be anything
        return None
    if way.recompute and n.layers:
        each = n.layers * hidden + each / n.layers
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return rows * each
    vocabulary = head.weight.shape[0]
    chunk = min(rows * length, chunk_rows("meta", vocabulary))
    return rows * each + chunk * vocabulary * (low.itemsize + 3 * max(4, low.itemsize))  # logits; softmax, its gradient


def rows_at_once(cfg: RunConfig, length: int) -> int:
    """Return how many rows of this length a forward pass sees."""
    if cfg.per_device_batch_tokens:
        return max(1, cfg.per_device_batch_tokens // length)
    return 1 if cfg.per_device_batch_size == "auto" else cfg.per_device_batch_size


def in_words(cfg: RunConfig, model: torch.nn.Module, size, length: int | None) -> str:
    """Return the memory per device under the strategy of this launch, in one line; `size` writes bytes, and with a
    `length` of rows activations are counted, too."""
    n, way = count(model), strategy_here(cfg)
    rest, more = sum(resting(n, cfg, way).values()), passing(n, cfg, way)
    where = f"rest in host memory ({way.name}, offload)" if way.offload else f"per device ({way.name})"
    text = f"{size(rest)} {where} for weights, gradients and optimizer"
    text += f"; {size(more)} for copies at work" if more else ""
    kept = activations(model, n, length, cfg, way) if length else None
    return text + (f"; about {size(kept)} for activations" if kept else "; activations come on top")
