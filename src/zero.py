"""DeepSpeed's ZeRO behind the same few functions: its configuration, its engine, its pieces of weights and moments.

Leave alone; imported only where DeepSpeed was asked for. Guarded by tests/test_deepspeed.py.
"""

import torch

from src.fields import RunConfig
from src.inputs import UsageError, warn


def configure(accelerator, run: RunConfig) -> None:
    """Fill in what follows from the run file, so that DeepSpeed's configuration says only where, not what."""
    plugin = accelerator.state.deepspeed_plugin
    config = plugin.deepspeed_config
    for part in ("optimizer", "scheduler"):
        if part in config:
            raise UsageError(f"the DeepSpeed configuration has a field {part}: the run file says that; take it out")
    if run.dtype == "float64":
        raise UsageError("dtype is float64, which DeepSpeed does not have: use accelerate_configs/fsdp2.yaml")
    if plugin.zero_stage not in (1, 2, 3):
        raise UsageError(
            f"zero_stage is {plugin.zero_stage}: give 1, 2 or 3, or for whole replicas accelerate_configs/ddp.yaml"
        )
    said = config.get("gradient_clipping", "auto")
    if said not in ("auto", run.max_grad_norm):
        warn(f"gradient_clipping of {said} is set for DeepSpeed and ignored: max_grad_norm is {run.max_grad_norm:g}")
    config["gradient_clipping"] = run.max_grad_norm
    # We divide by the weight of the global batch ourselves, and say which micro-batch is a window's last.
    config["gradient_accumulation_steps"] = 1
    config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed only prints it
    if accelerator.mixed_precision == "bf16":
        config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}


def prepare(accelerator, objective: torch.nn.Module, optimizer: torch.optim.Optimizer):
    """Return (DeepSpeed's engine, the optimizer as it wraps it), with masters that are the float32 weights they were."""
    from deepspeed.utils import safe_set_full_fp32_param

    whole = {name: p.detach().clone() for name, p in objective.named_parameters() if p.requires_grad}
    module, optimizer = accelerator.prepare(objective, optimizer)
    if accelerator.mixed_precision != "no":  # the masters were copied from weights that had been rounded
        for name, parameter in module.module.named_parameters():
            if name in whole:
                safe_set_full_fp32_param(parameter, whole[name].to(accelerator.device))
    return module, optimizer


def update(module) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the engine clip and step; return the gradient's norm and whether the step was left out, on the host."""
    module.step()
    skipped = bool(module.optimizer.overflow)
    norm = float("nan") if skipped else float(module.get_global_grad_norm())
    return torch.tensor(norm), torch.tensor(skipped)
