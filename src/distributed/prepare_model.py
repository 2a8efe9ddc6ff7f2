"""Build the task's model and let Accelerate place and wrap it.

Tests: tests/distributed/test_fsdp2.py, tests/models/test_loading.py and tests/distributed/test_launch.py.
"""

from contextlib import contextmanager

import torch

from src.config.errors import Failure, UsageError, warn
from src.distributed import tensor_parallel
from src.distributed.strategies import is_sharded


def build_model(accelerator, task, weights) -> torch.nn.Module:
    """Return the task's model on the CPU; under FSDP2 the main process alone reads or draws its weights.

    The others get the shapes, in memory that is never touched; `prepare` sends each process its shard. A fault of the
    main process reaches all."""
    from accelerate.utils import broadcast_object_list

    if accelerator.mixed_precision == "fp16" and getattr(task.config, "dtype", None) is torch.bfloat16:
        warn(
            "this model was trained in bfloat16, whose range is that of float32, and is now to be computed in float16, whose "
            "largest number is 65,504: activations may overflow; prefer mixed_precision: bf16"
        )
    if accelerator.distributed_type.value != "FSDP" or not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        tensor_parallel.apply(accelerator, model := task.build(weights))
        return model
    model, found = None, [None, None]
    if accelerator.is_main_process:
        try:
            model = task.build(weights)
            attributes_from_weights = {
                name: getattr(task, name) for name in getattr(task, "attributes_from_weights", ())
            }
            found[0] = attributes_from_weights, {name: p.requires_grad for name, p in model.named_parameters()}
        except UsageError as error:
            found[1] = error
    broadcast_object_list(found)
    if found[1]:
        raise found[1]
    if model is None:
        model = task.build(weights, empty=True)
        attributes_from_weights, trained = found[0]
        vars(task).update(attributes_from_weights)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    return model


@contextmanager
def _buffers_apart(accelerator, model_with_loss: torch.nn.Module):
    """Let every process have the main process's buffers, which accelerate 1.15 can send only where they are not saved."""
    if accelerator.distributed_type.value != "FSDP" or not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        yield
        return
    saved = [
        (module, name)
        for module in model_with_loss.modules()
        for name, value in module._buffers.items()
        if value is not None and name not in module._non_persistent_buffers_set
    ]
    for module, name in saved:
        value = module._buffers[name].to(accelerator.device)
        torch.distributed.broadcast(value, 0)
        module._buffers[name] = value
        module._non_persistent_buffers_set.add(name)
    yield
    for module, name in saved:
        module._non_persistent_buffers_set.discard(name)


def prepare(accelerator, model_with_loss: torch.nn.Module, optimizer: torch.optim.Optimizer):
    """Return both as Accelerate prepares them, without the wrappers that would only cost time here."""
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        from src.distributed import deepspeed

        return deepspeed.prepare(accelerator, model_with_loss, optimizer)
    dtypes = {name: p.dtype for name, p in model_with_loss.named_parameters() if p.requires_grad}
    count = len(list(model_with_loss.parameters()))  # tied ones once
    try:
        with _buffers_apart(accelerator, model_with_loss):
            module, optimizer = accelerator.prepare(model_with_loss, optimizer)
    except ValueError as error:
        if "layer class" not in str(error):
            raise
        raise UsageError(
            f"fsdp_transformer_layer_cls_to_wrap: {error}: leave it out, or give one of the model's"
        ) from error
    if accelerator.num_processes == 1 and isinstance(module, torch.nn.parallel.DistributedDataParallel):
        # accelerate wraps a group of one on CPU, and then never skips its reductions.
        module = accelerator.unwrap_model(module)
    if accelerator.scaler is None and kind in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        # Without a scaler its wrapper does nothing but search the import path for a package in every step: 0.3 ms.
        optimizer = optimizer.optimizer
    if kind == "FSDP":
        if not isinstance(module, torch.distributed.fsdp.FSDPModule):
            raise Failure("FSDP2 was asked for, but accelerate has not sharded the model")
        if len(list(model_with_loss.parameters())) != count:
            raise Failure(
                "weights that the model ties would be trained apart: give it a method tie_weights, as transformers has, or "
                "set fsdp_cpu_ram_efficient_loading to false"
            )
        changed = [
            n for n, p in model_with_loss.named_parameters() if p.requires_grad and p.dtype not in dtypes.values()
        ]
        if changed:
            raise Failure(
                f"{len(changed)} weights have another dtype than before they were sharded, first {changed[0]}"
            )
    return module, optimizer


def prepare_to_evaluate(accelerator, model_with_loss: torch.nn.Module):
    """Return it as Accelerate prepares it where nothing is trained; sharded as in training, and in the same precision."""
    if not is_sharded(accelerator):
        return accelerator.prepare_model(model_with_loss, evaluation_mode=True)
    # accelerate shards no model that comes without an optimizer, and leaves it on the CPU.
    return accelerator.prepare(model_with_loss, torch.optim.SGD(model_with_loss.parameters(), lr=0.0))[0]
