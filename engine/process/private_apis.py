"""Private and undocumented APIs of libraries: every use is a function here, with version, reason and test.

After an upgrade run the tests named here; each test fails if its API has changed. tests/project/test_private_apis.py
checks that no other file uses private names.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(functions: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace functions, {(module or class, name): function}, within; ignore those that this version lacks."""
    originals = {(owner, name): getattr(owner, name) for owner, name in functions if hasattr(owner, name)}
    try:
        for owner, name in originals:
            setattr(owner, name, functions[owner, name])
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


# ---- torch 2.13 ------------------------------------------------------------------------------------------------------

# fsdp_activation_checkpointing of an accelerate file inserts this into parameter names. Test:
# tests/engine/distributed/test_fsdp2.py.
CHECKPOINT_WRAPPER_PREFIX = "_checkpoint_wrapped_module."


def skip_update_on_device(optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
    """Make a fused optimizer skip its next update if `skip` is true, so that the host need not wait for the device.

    GradScaler passes its decision to fused kernels in this attribute; it stays until the next call.
    Tests: tests/src/test_step.py, tests/addons/techniques/test_unfreeze.py."""
    optimizer.found_inf = skip.float()


def copy_all_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target in one kernel for all. Test: tests/engine/distributed/test_running_statistics.py."""
    torch._foreach_copy_(targets, sources)


def move_all_(targets: list[torch.Tensor], sources: list[torch.Tensor], share: float | torch.Tensor) -> None:
    """Add `share` * (source - target) to each target, in three kernels; takes as much memory as the targets.

    Test: tests/addons/techniques/test_averages.py."""
    difference = torch._foreach_sub(sources, targets)
    if isinstance(share, torch.Tensor) and difference:
        share = share.to(difference[0].dtype)  # otherwise a kernel for each
    torch._foreach_mul_(difference, share)
    torch._foreach_add_(targets, difference)


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers of a module itself, also those that are None until a forward pass makes them.

    Test: tests/engine/distributed/test_running_statistics.py."""
    return dict(module._buffers)


def check_ddp_finalized(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Raise RuntimeError if DDP has not reduced all gradients in its last backward pass.

    Otherwise it says so only in its next forward pass, and until then the ranks wait for each other.
    Test: tests/engine/distributed/test_unused_parameters.py."""
    module._check_reducer_finalized()


def local_slices(sharded: torch.Tensor) -> tuple[slice, ...]:
    """Return the slices of a DTensor that this rank holds, so that it reads only these from a file.

    Test: tests/engine/distributed/test_fsdp2_checkpoints.py."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def count_compiled_graphs() -> int:
    """Return the number of compiled graphs. Test: tests/engine/models/test_compile_and_recompute.py."""
    from torch._dynamo import utils

    return utils.counters["stats"]["unique_graphs"]


def mark_dynamic(tensor: torch.Tensor) -> None:
    """Make compiled code take any length of the first dimension. Test: tests/engine/models/test_compile_and_recompute.py."""
    if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and its import takes a second
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def compile_for_any_rows(function: Callable) -> Callable:
    """Return the function compiled once for any number of rows of its first two arguments, other sizes being constants,
    which makes faster kernels than torch.compile(dynamic=True). Test: tests/src/losses/test_chunked_cross_entropy.py."""
    compiled = torch.compile(function, options={"deterministic": True})  # no choice of kernels by time measurements

    def call(rows, others, *arguments):
        for tensor in (rows, others):
            mark_dynamic(tensor)
        return compiled(rows, others, *arguments)

    return call


# ---- transformers 5.23 -----------------------------------------------------------------------------------------------


def layer_class_names(model: torch.nn.Module) -> set[str]:
    """Return the class names of a model's repeated layers: the units to shard and compile.

    A model may also name layers that it does not have. A class of your own can have this attribute, too. A module
    that contains models has the layers of all of them.
    Tests: tests/engine/distributed/test_fsdp2.py and tests/engine/models/test_compile_and_recompute.py."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return names & {kind.__name__ for module in model.modules() for kind in type(module).__mro__} if names else names


def set_layer_class_names(wrapper: torch.nn.Module, names: set[str]) -> None:
    """Give a wrapper the layer class names by which accelerate shards.

    Tests: tests/engine/distributed/test_fsdp2.py and tests/addons/tasks/test_frozen_teacher.py."""
    wrapper._no_split_modules = sorted(names) or None


def names_not_to_quantize(model: torch.nn.Module) -> list[str]:
    """Return the names of modules that transformers does not quantize: head, tied weights, the last module.

    Test: tests/addons/adapters/test_low_bit_base.py."""
    from transformers.quantizers.base import get_keys_to_not_convert

    return get_keys_to_not_convert(model)


def may_quantize(name: str, kept: list[str]) -> bool:
    """Return whether transformers quantizes a module that no name in `kept` stands for.

    Test: tests/addons/adapters/test_low_bit_base.py."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    return should_convert_module(name, kept)


def attention_kernel(config: Any) -> str | None:
    """Return the attention kernel that a configuration names. Test: tests/engine/config/test_foreign_code.py."""
    return config._attn_implementation


def save_on_every_rank(model: torch.nn.Module) -> None:
    """Make `save_pretrained` write on every rank, not only on rank 0. Test: tests/engine/distributed/test_fsdp2_checkpoints.py."""
    model.should_save_on_this_rank = lambda is_main_process: True


def copy_mapped_weights(model: torch.nn.Module) -> None:
    """Copy weights that begin where torch would not put them: `from_pretrained` maps its files into memory.

    Kernels of a CPU round differently there, so a resumed run would leave the undisturbed one in the last place.
    Test: tests/engine/checkpointing/test_resume.py."""
    alignment = 64  # bytes, of memory that torch allocates on a CPU
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % alignment:
            tensor.data = tensor.data.clone()


@contextmanager
def known_masks(packed: bool) -> Iterator[None]:
    """Tell transformers whether rows are packed or padded, so that it does not read this from the device.

    Otherwise it calls `mask.all()` in every forward pass, or looks for padding tokens to warn of, and the host waits
    for all queued work. If a version lacks these functions, only this wait comes back.
    Tests: tests/src/test_step.py, tests/src/tasks/test_causal_lm.py and tests/conformance/test_task.py."""
    from transformers import PreTrainedModel, masking_utils

    def find_packed_sequence_indices(position_ids):
        if not packed:
            return None
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    def ignore_mask(padding_mask, kv_length, local_attention_size=None):
        return padding_mask is None and (local_attention_size is None or kv_length < local_attention_size)

    ignores_causal_mask = getattr(masking_utils, "_ignore_causal_mask_sdpa", lambda *args, **kwargs: False)

    def ignore_causal_mask(padding_mask, *args, **kwargs):
        return padding_mask is None and ignores_causal_mask(padding_mask, *args, **kwargs)

    ours = {
        (masking_utils, "find_packed_sequence_indices"): find_packed_sequence_indices,
        (masking_utils, "_ignore_causal_mask_sdpa"): ignore_causal_mask,
        (masking_utils, "_ignore_bidirectional_mask_sdpa"): ignore_mask,
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask"): lambda model, input_ids, attention_mask: None,
    }
    with replaced(ours):
        yield


# ---- accelerate 1.15 -------------------------------------------------------------------------------------------------


def set_process_group_arguments(settings: Any, arguments: dict) -> None:
    """Make accelerate pass `arguments` to init_process_group: it drops defaults, and has no field for a store.

    Tests: tests/engine/distributed/test_stop_signals.py (torchrun with restarts), tests/engine/distributed/test_launch.py."""
    settings.to_kwargs = lambda: arguments


def remove_ddp(accelerator: Any, module: torch.nn.Module) -> torch.nn.Module:
    """Return the model in DDP's wrapper, and free the wrapper with its buckets, to which accelerate keeps a reference.

    Test: tests/conformance/test_exact_sums.py."""
    unwrapped = accelerator.unwrap_model(module)
    accelerator._models = [unwrapped if model is module else model for model in accelerator._models]
    return unwrapped


def shard_over_gloo() -> None:
    """Make accelerate run FSDP2 and DeepSpeed on CPUs, over gloo; otherwise it would use DDP or separate replicas.

    Test: tests/engine/distributed/test_launch.py."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda *_args, **_settings: ("gloo", DistributedType.MULTI_GPU)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate uses DDP


# ---- bitsandbytes 0.50 -----------------------------------------------------------------------------------------------


def bitsandbytes() -> Any:
    """Import and return bitsandbytes, without code from the Hub; None if it is not installed.

    As soon as it is imported on a CPU with AVX512-BF16, it gets a kernel by the package `kernels`; without that package
    it uses its own. Call this before other packages import it. Test: tests/addons/adapters/test_low_bit_base.py."""
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    kernels = sys.modules.pop("kernels", None)
    sys.modules["kernels"] = None  # type: ignore  # importing it now raises ImportError
    try:
        return importlib.import_module("bitsandbytes")
    finally:
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels


# ---- peft 0.21 -------------------------------------------------------------------------------------------------------


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Make the adapted layers of a model compute what the base model does, within.

    peft's own switch also sets `requires_grad` of each adapter, under DDP and FSDP2 in the middle of a step.
    Test: tests/addons/tasks/test_reference.py."""
    layers: list[Any] = [module for module in model.modules() if "_disable_adapters" in vars(module)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
