"""Checks that refuse what would train wrong numbers or hang: settings, model, parameters in a step.

Tests: tests/engine/distributed/test_unused_parameters.py, tests/src/training/.
"""

import re
from typing import Any

import torch

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig, field_values
from engine.distributed.exact_sums import ADDENDS, use_exact_kernels
from engine.distributed.sharded_tensors import plain_name
from engine.process import private_apis


def check_settings(backend: Any, cfg: RunConfig) -> None:
    """Raise UsageError for settings that this backend does not support."""
    mesh = backend.accelerator.parallelism_config
    if mesh and (mesh.cp_size > 1 or mesh.sp_size > 1):
        raise UsageError("context and sequence parallelism are not supported: docs/scaling.md says what to use instead")
    if cfg.exact_sums:  # of an evaluation, too: it has the kernels of the training
        use_exact_kernels(backend.accelerator.device)
    for name in backend.unsupported:
        value = field_values(cfg).get(name)  # it may belong to an add-on that the run file does not name
        if value:
            raise UsageError(
                f"{name} is {str(value).lower()}, which {backend.name} does not support: remove it, or use DDP or FSDP2 "
                "(accelerate_configs/ddp.yaml, fsdp2.yaml)"
            )


def check_exact(backend: Any, cfg: RunConfig) -> None:
    """Raise UsageError if `exact_sums` cannot hold in this launch."""
    device = backend.accelerator.device.type
    reasons = {
        f"{backend.name} adds gradients in its own order: use one process or DDP (accelerate_configs/ddp.yaml)": (
            backend.is_sharded or backend.ranks_per_batch > 1
        ),
        f"ddp_comm_hook {cfg.ddp_comm_hook} rounds what is sent: set it to 'no'": cfg.ddp_comm_hook != "no",
        f"a device of type {device} is not supported: use CPUs or CUDA": device not in ("cpu", "cuda"),
        "compile chooses kernels by measured times: set compile to false": cfg.compile and device != "cpu",
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"exact_sums is true, but {reason}, or set exact_sums to false")


def check_addends(count: int) -> None:
    """Raise UsageError if a step has more micro-batches than exact sums can hold."""
    if count > ADDENDS:
        raise UsageError(
            f"exact_sums adds at most {ADDENDS:,} micro-batches, but a step has up to {count:,}: give a greater "
            "per_device_batch_size"
        )


def check_scaled(is_scaled: bool) -> None:
    """Raise UsageError if the loss was not multiplied by `loss_scale`, as in a train.py that lacks it."""
    if not is_scaled:
        raise UsageError(
            "exact_sums is true, but compute_gradient in train.py does not call backend.loss_scale(totals): let it be the "
            "factor of the loss, in place of backend.data_world_size / totals.weight"
        )


def check_model(backend: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for state that cannot be sharded, a layer that depends on the number of processes, or a
    parameter without an optimizer."""
    if backend.cfg.exact_sums:
        check_exact(backend, backend.cfg)
    if backend.is_sharded:
        check_only_tensors(model)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and backend.accelerator.num_processes > 1:
            raise UsageError(
                f"{name} is a SyncBatchNorm, which depends on the number of processes: use BatchNorm; its running statistics "
                "are the same on all processes here"
            )
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = [plain_name(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]
    if trainable:
        raise UsageError(
            f"{', '.join(trainable[:5])}: trainable, but in no parameter group of the optimizer: add it to one "
            "(`parameter_groups` in src/training/optimizers.py), or freeze it in `build`"
        )


def check_only_tensors(model: torch.nn.Module) -> None:
    """Raise UsageError if a state dict holds something else than tensors, which can be neither sharded nor saved."""
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name} of {type(model).__name__} is extra state and not a tensor, which a checkpoint cannot hold: make it "
                "a buffer"
            )


def check_trainable(parameters: dict[str, torch.nn.Parameter], trainable: set[str]) -> None:
    """Raise UsageError if a parameter was frozen or unfrozen after the optimizer and the reduction were built."""
    changed = [name for name, p in parameters.items() if p.requires_grad != (name in trainable)]
    if changed:
        raise UsageError(
            f"requires_grad of {', '.join(changed[:5])} was changed during training, which neither the optimizer nor the "
            "reduction of gradients notices: set it in `build` of the task; to change it later, train the second part "
            "as a run of its own with --init_from CHECKPOINT"
        )


def check_all_gradients_reduced(module: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Raise UsageError if DDP is still waiting for a gradient after the last backward pass of a step.

    Otherwise it says so only in its next forward pass, after an update with gradients that were not reduced."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return
    try:
        private_apis.check_ddp_finalized(module)
    except RuntimeError as error:
        names = [name for name, p in parameters.items() if p.requires_grad]
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        missing = [names[int(index)] for index in indices[1].split()] if indices else ["some parameters"]
        raise UsageError(
            f"the loss does not use {', '.join(missing[:5])} in this step, and DDP waits for their gradients: freeze them by "
            "the field freeze (of an adapter: name the layers in its exclude_modules), or, if other rows use them, "
            "set --ddp_find_unused_parameters true"
        ) from error
