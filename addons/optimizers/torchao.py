"""AdamW and Adam of the package torchao (requirements-extra.txt) with moments in 8 bits, 4 bits or fp8: adamw_8bit, …

Moments are quantized in blocks of the flattened parameter, and the update is compiled, once for each shape. A checkpoint
holds codes and scales as plain tensors. Dettmers 2021, arXiv:2110.02861 (8 bits); Li 2023, arXiv:2309.01507 (4 bits).
Tests: tests/addons/optimizers/test_torchao.py.
"""

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from engine.config.errors import UsageError, warn
from engine.config.run_config import RunConfig
from engine.distributed.sharded_tensors import gather_full, local_part
from engine.plan.seeding import derive_seed, seed_everything
from engine.process import private_apis

NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8")
SMALLEST = 4096  # values: torchao, after bitsandbytes, leaves smaller tensors in the dtype of the weights
MANY = 0.1  # of the trained weights
BYTES_OF_SCALE = 4
PARTS = ("codes", "scale", "qmap")  # plain tensors of a quantized one; fp8 has no qmap


@cache
def classes() -> list[type]:
    """Return the optimizers of the package, made to fit this step and its checkpoints; nothing if it is not installed."""
    logging.disable(logging.WARNING)  # it warns of its kernels for other devices
    try:
        from torchao import optim
    except ImportError:
        return []
    finally:
        logging.disable(logging.NOTSET)
    warnings.filterwarnings("ignore", ".*_stable_hash_for_caching")  # a cache of torch.compile skips these tensors
    return [type(name, (LowBit, getattr(optim, name)), {}) for name in NAMES]


def errors(cfg: RunConfig) -> Iterator[str]:
    """Yield a sentence for each argument that would be ignored or cannot work."""
    given = cfg.optim_args or {}
    if given.get("bf16_stochastic_round") and cfg.dtype != "bfloat16":
        yield f"optim_args: bf16_stochastic_round is for dtype: bfloat16, and dtype is {cfg.dtype}: change one of them"
    if given.get("amsgrad"):  # torchao 0.18 takes the maximum of a quantized tensor, which it has not defined
        yield "optim_args: amsgrad does not work with quantized moments: remove it, or use adamw"
    size = given.get("block_size", 2)
    if not isinstance(size, int) or size < 2 or size % 2:
        yield f"optim_args: block_size is {size}: give an even number of at least 2, or remove it"


def bytes_per_weight(cfg: RunConfig, kind: type) -> float:
    """Return the bytes of state for each weight of a quantized tensor."""
    given = cfg.optim_args or {}
    default = 128 if "4bit" in kind.__name__ else 256
    code = 0.5 if "4bit" in kind.__name__ else 1.0
    return 2 * (code + BYTES_OF_SCALE / given.get("block_size", default))


def make(cfg: RunConfig, kind: type, groups: list[dict], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer of these groups, which rounds by the run's seed."""
    optimizer: Any = kind(groups, **options)
    optimizer.seed = cfg.seed
    for group in optimizer.param_groups:
        group["lr"] = options["lr"]  # the package has made it a tensor in float32
    return optimizer


class LowBit(torch.optim.Optimizer):
    """What the classes of the package lack for this step: rates as floats, seeds, state as plain tensors, block rules."""

    takes_adam_fields = True  # adam_beta1, adam_beta2 and adam_epsilon, as torch's AdamW does
    seed = 0
    block_size: int  # these two are set by the package
    bf16_stochastic_round: bool
    constants: list[tuple] | None = None  # of the groups in the first step of this process

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters. The first call compiles the update, once for each shape and group."""
        if self.constants is None:
            self._warn_of_wide_moments()
        self._check_constants()
        self._add_state()
        if self.bf16_stochastic_round:
            # By update, not by process: replicas draw the same numbers, and a resumed run those of an undisturbed one.
            first = self.param_groups[0]
            first["updates"] = first.get("updates", 0) + 1
            seed_everything(derive_seed("stochastic rounding", self.seed, first["updates"]))
        for group in self.param_groups:
            # On the host, a copy of one number. A float would be a constant of the compiled update: one graph a rate.
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        with self._local_parts():
            super().step()

    @contextmanager
    def _local_parts(self) -> Iterator[None]:
        """Show the package this process's part of each parameter, gradient and state as plain tensors.

        An update needs no other part. torchao 0.18 takes DTensors, but compiles them only for float32 weights: a view of
        its state, which DTensor makes, forgets the dtype."""
        state = self.state
        params = [group["params"] for group in self.param_groups]
        self.state = defaultdict(dict)
        try:
            for group in self.param_groups:
                updated = []
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    local = local_part(parameter.detach())  # another tensor in the same memory
                    if not local.numel():
                        state[parameter]["step"] += 1  # each process may be the one that saves it
                        continue
                    local.grad = local_part(parameter.grad)
                    self.state[local] = state[parameter]
                    updated.append(local)
                group["params"] = updated
            yield
        finally:
            self.state = state
            for group, originals in zip(self.param_groups, params, strict=True):
                group["params"] = originals

    def _check_constants(self) -> None:
        """Raise UsageError if what is compiled into the update has changed: each step would compile it again."""
        now = [(*group["betas"], group["eps"], group["weight_decay"]) for group in self.param_groups]
        self.constants = self.constants or now
        if now != self.constants:
            raise UsageError(
                f"optim is {type(self).__name__}, which compiles betas, eps and weight_decay into its update, and something "
                "changes them while training (cycle_momentum?): remove that, or use adamw"
            )

    def _warn_of_wide_moments(self) -> None:
        """Warn if many weights have moments that are not quantized."""
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        wide = [parameter for parameter in trained if not blocks_fit(parameter, self.block_size)]
        total = sum(parameter.numel() for parameter in trained)
        share = sum(parameter.numel() for parameter in wide) / max(total, 1)
        if share > MANY:
            warn(
                f"optim is {type(self).__name__}, but {len(wide)} of {len(trained)} tensors, {share:.0%} of the trained weights, "
                f"keep moments in the dtype of the weights: they have less than {SMALLEST:,} values, or are on some process no "
                f"whole number of blocks of {self.block_size} values (optim_args: block_size)"
            )

    # ---- state -------------------------------------------------------------------------------------------------------

    def _add_state(self) -> None:
        """Add the state of each parameter that has a gradient for the first time."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                if not parameter.is_contiguous():
                    raise UsageError(
                        f"optim is {type(self).__name__}, which divides contiguous weights into blocks, but one of shape "
                        f"{list(parameter.shape)} has another layout in memory (channels_last?): use adamw"
                    )
                state = {"step": torch.tensor(0.0), "exp_avg": self._moment(parameter, signed=True)}
                state["exp_avg_sq"] = self._moment(parameter, signed=False)
                self.state[parameter] = state

    def _moment(self, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
        """Return this process's part of a moment of zeros, quantized if its blocks fit."""
        local = local_part(parameter)
        return self._zeros(local, signed) if blocks_fit(parameter, self.block_size) else torch.zeros_like(local)

    def _zeros(self, like: torch.Tensor, signed: bool) -> Any:
        """Return a quantized tensor of zeros in the shape of a plain one."""
        from torchao.optim.subclass_4bit import OptimState4bit
        from torchao.optim.subclass_8bit import OptimState8bit
        from torchao.optim.subclass_fp8 import OptimStateFp8

        name = type(self).__name__
        shape, device, dtype = like.shape, like.device, like.dtype  # the dtype is only what it shows
        if name.endswith("Fp8"):
            return OptimStateFp8.zeros(shape, self.block_size, device, dtype=dtype)
        kind = OptimState4bit if name.endswith("4bit") else OptimState8bit
        return kind.zeros(shape, signed, self.block_size, device, dtype=dtype)

    # ---- checkpoints, called by engine/distributed/optimizer_state.py ------------------------------------------------

    @torch.no_grad()
    def state_to_save(self, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter as plain tensors, or DTensors: a quantized one is a dict of its parts."""
        saved = dict(state)
        for key, value in state.items():
            if hasattr(value, "codes"):
                saved[key] = take_apart(value, parameter)
            elif value.dim():
                saved[key] = like_parameter(value, parameter, parameter.shape)
        return saved

    @torch.no_grad()
    def state_from_saved(self, parameter: torch.Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter from what `state_to_save` returned, perhaps on another number of processes."""
        state = {}
        for key, value in saved.items():
            is_quantized = isinstance(value, dict)
            state[key] = self._moment_from_saved(parameter, key, value) if is_quantized else local_part(value)
        return state

    def _moment_from_saved(self, parameter: torch.Tensor, key: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a moment with saved codes and scales; where shards of this run cut blocks, their values as floats."""
        fits = blocks_fit(parameter, self.block_size)
        shape = local_part(parameter).shape if fits else parameter.shape
        local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        values = self._zeros(local, signed=key == "exp_avg")
        if "qmap" in parts and not torch.equal(gather_full(parts["qmap"]), values.qmap):
            raise UsageError(
                "resume: the moments were quantized by another version of torchao: install that version, or start a new run from "
                "these weights with --init_from"
            )
        for target, part in ((values.codes.view(torch.uint8), parts["codes"]), (values.scale, parts["scale"])):
            source = rows_of(part, parameter) if fits else gather_full(part)
            target.reshape(-1).copy_(source.reshape(-1))
        if fits:
            return values
        return values.dequantize()[private_apis.local_slices(parameter)].to(parameter.dtype)


# ---- blocks and shards -----------------------------------------------------------------------------------------------


def blocks_fit(parameter: torch.Tensor, block_size: int) -> bool:
    """Return whether a parameter is quantized: it is large, and a whole number of blocks on every process.

    All ranks return the same. Where rows are whole blocks, no number of processes changes it."""
    size = parameter.numel()
    if size < SMALLEST or size % block_size:
        return False
    if not isinstance(parameter, DTensor):
        return True
    divided = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if not divided:
        return True
    if len(divided) > 1 or parameter.placements[divided[0]] != Shard(0):
        return False
    shards = parameter.device_mesh.size(divided[0])
    rows = parameter.shape[0]
    if rows % shards == 0:
        return size // shards % block_size == 0
    largest = -(-rows // shards)  # rows of each shard but the last
    return size // rows % block_size == 0 and largest * (shards - 1) < rows


def take_apart(value: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parts of this process's share of a quantized tensor, as plain tensors or DTensors."""
    parts = {name: getattr(value, name) for name in PARTS if hasattr(value, name)}
    parts["codes"] = parts["codes"].view(torch.uint8)  # gloo sends no fp8
    rows = parameter.shape[0]
    has_whole_rows = parameter.numel() // rows % value.block_size == 0
    for name in ("codes", "scale"):
        part = parts[name]
        whole = part.numel() * parameter.numel() // value.numel()  # values on all processes
        if part.shape == local_part(parameter).shape:
            shape = parameter.shape  # then a resume reads only its own rows
        else:
            shape = torch.Size((rows, whole // rows) if has_whole_rows else (whole,))
            part = part.reshape(-1, *shape[1:])
        parts[name] = like_parameter(part, parameter, shape)
    return parts


def rows_of(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of saved codes or scales, which may be whole or sharded like the parameter."""
    if isinstance(part, DTensor) and part.placements == parameter.placements:
        return part.to_local()
    flat = gather_full(part).reshape(-1)
    if not isinstance(parameter, DTensor):
        return flat
    rows = private_apis.local_slices(parameter)[0]
    per_row = parameter.numel() // parameter.shape[0]
    begin = rows.start * per_row * flat.numel() // parameter.numel()
    end = rows.stop * per_row * flat.numel() // parameter.numel()
    return flat[begin:end]


def like_parameter(local: torch.Tensor, parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return this process's part of a tensor of `shape`, as a DTensor if the parameter is one."""
    if not isinstance(parameter, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return whole.to(parameter.device)  # with offload, weights and moments are in host memory
