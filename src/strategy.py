"""How a model is spread over processes, and all that differs by it: a replica on each (DDP), FSDP2, or DeepSpeed's ZeRO.

Leave alone. Guarded by tests/test_fsdp2.py, tests/test_deepspeed.py and tests/test_step.py.
"""

import os
from contextlib import contextmanager
from dataclasses import replace

import torch

from src import tensor_parallel
from src.fields import RunConfig
from src.inputs import Failure, UsageError, warn
from src.progress import Window

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}  # mixed_precision -> what matrix products are computed in


def sharded(accelerator) -> bool:
    """Return whether no process holds the whole model, so that a forward or backward pass is a collective of all."""
    return accelerator.distributed_type.value in ("FSDP", "DEEPSPEED") or tensor_parallel.size(accelerator) > 1


def named(accelerator) -> str:
    """Return the strategy in words."""
    kind, mesh = accelerator.distributed_type.value, accelerator.parallelism_config
    if (cut := tensor_parallel.size(accelerator)) > 1:
        shards = f", FSDP2 over {mesh.dp_shard_size}" if kind == "FSDP" else ""
        return (
            f"layers cut over {cut} processes{shards}"
            + f", {mesh.dp_replicate_size} copies" * mesh.dp_replicate_enabled
        )
    if kind == "FSDP":
        copies = mesh.dp_replicate_size if mesh else 1
        return "FSDP2" if copies == 1 else f"HSDP: {copies} copies, each over {mesh.dp_shard_size} processes"
    if kind == "DEEPSPEED":
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if accelerator.num_processes == 1:
        return "one process"
    return "DDP over " + torch.distributed.get_backend()


def check_version() -> None:
    """Raise UsageError for FSDP1, before accelerate looks for a device that it needs."""
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UsageError(f"fsdp_version is {version}: give 2, as accelerate_configs/fsdp2.yaml does")


def complete_mesh(world: int) -> None:
    """Let a model of which there are several copies (HSDP), or whose layers are cut, be sharded over all processes that it has.

    So the accelerate file names copies and cuts only, and fits any number of processes."""
    sizes = {f"parallelism_config_{name}_size": 1 for name in ("dp_replicate", "dp_shard", "tp")}
    for name in sizes:
        value = os.environ.get(name.upper(), "1")
        if not value.isdecimal() or not int(value):
            raise UsageError(f"{name} is {value!r}: give a whole number above zero")
        sizes[name] = int(value)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true" or set(sizes.values()) == {1}:
        return
    copies, shards, cuts = sizes.values()
    said = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if shards == 1 and not world % (copies * cuts) and world > copies * cuts:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(world // (copies * cuts))
    elif copies * shards * cuts != world or shards == 1:
        raise UsageError(
            f"{said} does not cut {world} processes into groups of two or more that each hold one copy of the model: change either"
        )


def configure(accelerator, run: RunConfig) -> None:
    """Give the backend what follows from the run file; UsageError for what cannot be had or is said in two places."""
    kind, mesh = accelerator.distributed_type.value, accelerator.parallelism_config
    for name, meaning in (("cp", "context"), ("sp", "sequence")):
        if mesh and getattr(mesh, f"{name}_size") > 1:
            raise UsageError(
                f"parallelism_config_{name}_size is {getattr(mesh, f'{name}_size')}: {meaning} parallelism is not offered, and each "
                "process would train on other rows; take it out (docs/scaling.md says why, and what to use)"
            )
    if sharded(accelerator) and run.per_device_batch_size == "auto":
        raise UsageError(f"per_device_batch_size is auto, which cannot be tried out under {kind}: give a number")
    tensor_parallel.check(accelerator, run)
    if run.local_sgd_steps:
        _configure_local_sgd(accelerator, run)
    if kind == "FSDP":
        _configure_fsdp(accelerator, run)
    elif kind == "DEEPSPEED":
        from src import zero

        zero.configure(accelerator, run)
    if run.ddp_comm_hook != "no" and (kind not in ("MULTI_GPU", "MULTI_CPU") or accelerator.num_processes == 1):
        warn(f"ddp_comm_hook {run.ddp_comm_hook} is ignored: gradients of whole replicas (DDP) only go through it")
    if run.ddp_comm_hook == "bf16" and accelerator.device.type == "cpu":
        raise UsageError("ddp_comm_hook is bf16, which torch has for GPUs only: leave it out, or use fp16")
    if run.sync_each_batch and not sharded(accelerator):
        warn("sync_each_batch is ignored: a replica holds all of its gradient anyway, so waiting costs no memory")


def syncs_each(accelerator, run: RunConfig) -> bool:
    """Return whether gradients are reduced after every micro-batch."""
    return accelerator.distributed_type.value == "FSDP" and run.sync_each_batch is not False


def _configure_local_sgd(accelerator, run: RunConfig) -> None:
    asked = f"local_sgd_steps is {run.local_sgd_steps}"
    if sharded(accelerator):
        raise UsageError(
            f"{asked}, but under {accelerator.distributed_type.value} no process holds a whole model to update by itself: "
            "leave it out, or use accelerate_configs/ddp.yaml"
        )
    if accelerator.num_processes == 1:
        warn("local_sgd_steps is ignored: there is one process, and nothing to average")
    elif accelerator.mixed_precision == "fp16":
        raise UsageError(
            f"{asked}, but with fp16 each process would scale its gradient by a factor of its own: use bf16"
        )


def _configure_fsdp(accelerator, run: RunConfig) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and accelerator.device.type == "cpu":
        raise UsageError("fsdp_offload_params is true, but there is no accelerator to offload from: set it to false")
    if low := LOW.get(accelerator.mixed_precision):
        if run.dtype == "bfloat16":
            raise UsageError(
                "dtype is bfloat16, but FSDP2 keeps float32 weights with mixed_precision: set that to 'no'"
            )
        # accelerate would also reduce gradients, and return the loss, in 16 bits.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)


def fuses(accelerator, run: RunConfig) -> bool:
    """Return whether the optimizer may be a fused kernel.

    Under a gradient scaler that would skip on the device, where nobody could tell the schedule to wait; and torch has no
    fused SGD for shards."""
    return accelerator.mixed_precision != "fp16" and not (
        accelerator.distributed_type.value == "FSDP" and run.optim == "sgd"
    )


def build(accelerator, task, weights) -> torch.nn.Module:
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
            learnt = {name: getattr(task, name) for name in getattr(task, "learnt", ())}
            found[0] = learnt, {name: p.requires_grad for name, p in model.named_parameters()}
        except UsageError as error:
            found[1] = error
    broadcast_object_list(found)
    if found[1]:
        raise found[1]
    if model is None:
        model = task.build(weights, empty=True)
        learnt, trained = found[0]
        vars(task).update(learnt)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    return model


@contextmanager
def _buffers_apart(accelerator, objective: torch.nn.Module):
    """Let every process have the main process's buffers, which accelerate 1.15 can send only where they are not saved."""
    if accelerator.distributed_type.value != "FSDP" or not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        yield
        return
    saved = [
        (module, name)
        for module in objective.modules()
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


def prepare(accelerator, objective: torch.nn.Module, optimizer: torch.optim.Optimizer):
    """Return both as Accelerate prepares them, without the wrappers that would only cost time here."""
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        from src import zero

        return zero.prepare(accelerator, objective, optimizer)
    dtypes = {name: p.dtype for name, p in objective.named_parameters() if p.requires_grad}
    count = len(list(objective.parameters()))  # tied ones once
    try:
        with _buffers_apart(accelerator, objective):
            module, optimizer = accelerator.prepare(objective, optimizer)
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
        if len(list(objective.parameters())) != count:
            raise Failure(
                "weights that the model ties would be trained apart: give it a method tie_weights, as transformers has, or "
                "set fsdp_cpu_ram_efficient_loading to false"
            )
        changed = [n for n, p in objective.named_parameters() if p.requires_grad and p.dtype not in dtypes.values()]
        if changed:
            raise Failure(
                f"{len(changed)} weights have another dtype than before they were sharded, first {changed[0]}"
            )
    return module, optimizer


def prepare_to_evaluate(accelerator, objective: torch.nn.Module):
    """Return it as Accelerate prepares it where nothing is trained; sharded as in training, and in the same precision."""
    if not sharded(accelerator):
        return accelerator.prepare_model(objective, evaluation_mode=True)
    # accelerate shards no model that comes without an optimizer, and leaves it on the CPU.
    return accelerator.prepare(objective, torch.optim.SGD(objective.parameters(), lr=0.0))[0]


# ---- in a step -----------------------------------------------------------------------------------------------------------


def turns(accelerator, window: Window) -> list[float]:
    """Return, for the vector that all ranks add up, how many micro-batches each has; nothing where that may differ."""
    if not sharded(accelerator):
        return []
    mine, world = tensor_parallel.place(accelerator)
    return [float(len(window) * (rank == mine)) for rank in range(world)]


def even(window: Window, turns: list[float]) -> Window:
    """Return the window with fillers of weight zero before it, so that all ranks run as many forward passes."""
    micro, batch = window[0]
    filler = replace(micro, ids=micro.ids[:1], filler=True, last=False)
    return [(filler, batch)] * int(max(turns, default=0) - len(window)) + window


@contextmanager
def reducing(accelerator, module: torch.nn.Module, last: bool, each: bool):
    """Reduce the gradients of a backward pass in here if its micro-batch is the last of a window, or after each one.

    Of a model that is replicated and sharded (HSDP), the sum over replicas always waits for the last."""
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        module.set_gradient_accumulation_boundary(last)
        yield
    elif kind == "FSDP":
        module.set_requires_gradient_sync(last or each)
        module.set_requires_all_reduce(last)
        yield
    elif last:
        yield
    else:
        with accelerator.no_sync(module):
            yield


def backward(accelerator, module: torch.nn.Module, loss: torch.Tensor) -> None:
    """Add the gradient of a loss, which nothing divides any more."""
    if accelerator.distributed_type.value == "DEEPSPEED":
        module.backward(loss, scale_wrt_gas=False)  # accelerate's would also update the weights
    else:
        accelerator.backward(loss)
