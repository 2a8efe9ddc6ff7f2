"""Checks that refuse what would train wrong numbers or hang: settings, the model, parameters in a step.

Tests: tests/distributed/test_unused_parameters.py, tests/training/.
"""

import re
from typing import TYPE_CHECKING

import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed.sharded_tensors import plain_name
from src.runtime import private_apis

if TYPE_CHECKING:
    from src.distributed.strategies import Strategy


def check_settings(strategy: "Strategy", cfg: RunConfig) -> None:
    """Raise UsageError for settings that this strategy does not support."""
    mesh = strategy.accelerator.parallelism_config
    if mesh and (mesh.cp_size > 1 or mesh.sp_size > 1):
        raise UsageError("context and sequence parallelism are not supported: docs/scaling.md says what to use instead")
    for name in strategy.unsupported:
        if value := getattr(cfg, name, None):  # it may belong to an add-on that the run file does not name
            raise UsageError(
                f"{name} is {str(value).lower()}, which {strategy.name} does not support: remove it, or use DDP or FSDP2 "
                "(accelerate_configs/ddp.yaml, fsdp2.yaml)"
            )
    if cfg.per_device_batch_size == "auto" and strategy.is_sharded:
        raise UsageError(
            f"per_device_batch_size is auto, but under {strategy.name} each pass is a collective, in which all ranks would "
            "wait for one that has run out of memory: give a number"
        )


def check_model(strategy: "Strategy", model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for state that cannot be sharded, a layer that depends on the number of processes, or a
    parameter without an optimizer."""
    if strategy.is_sharded:
        check_only_tensors(model)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and strategy.accelerator.num_processes > 1:
            raise UsageError(
                f"{name} is a SyncBatchNorm, which depends on the number of processes: use BatchNorm; its running statistics "
                "are the same on all processes here"
            )
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = [plain_name(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]
    if trainable:
        raise UsageError(
            f"{_in_words(trainable)}: trainable, but in no parameter group of the optimizer: add it to one "
            "(`parameter_groups` in src/training/optimizers.py), or freeze it in `build`"
        )


def check_only_tensors(model: torch.nn.Module) -> None:
    """Raise UsageError if a state dict holds something else than tensors, which can be neither sharded nor saved."""
    if others := [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]:
        raise UsageError(
            f"{others[0]} of {type(model).__name__} is extra state and not a tensor, which a checkpoint cannot hold: make it "
            "a buffer"
        )


def check_trainable(parameters: dict[str, torch.nn.Parameter], trainable: set[str]) -> None:
    """Raise UsageError if a parameter was frozen or unfrozen after the optimizer and the reduction were built."""
    changed = [name for name, p in parameters.items() if p.requires_grad != (name in trainable)]
    if changed:
        raise UsageError(
            f"requires_grad of {_in_words(changed)} was changed during training, which neither the optimizer nor the "
            "reduction of gradients notices: set it in `build` of the task; to change it later, train the second part "
            "as a run of its own with --init_from CHECKPOINT"
        )


def check_reduced(module: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Raise UsageError if DDP is still waiting for a gradient after the last backward pass of a step.

    Otherwise it says so only in its next forward pass, after an update with gradients that were not reduced."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return
    try:
        private_apis.check_reduced(module)
    except RuntimeError as error:
        names = [name for name, p in parameters.items() if p.requires_grad]
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        missing = [names[int(index)] for index in indices[1].split()] if indices else ["some parameters"]
        raise UsageError(
            f"the loss does not use {_in_words(missing)} in this step, and DDP waits for their gradients: freeze them by "
            "the field freeze (an adapter of peft: name the layers in its exclude_modules), or, if other rows use them, "
            "set --ddp_find_unused_parameters true"
        ) from error


def _in_words(names: list[str]) -> str:
    """Return "parameter NAME" or "N parameters (NAME, …)" with at most five names."""
    if len(names) == 1:
        return f"parameter {names[0]}"
    return f"{len(names)} parameters ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
