"""Create the Accelerator and check that its process group is the requested one; shut it down.

Tests: tests/distributed/test_launch.py.
"""

import gc
import os
import warnings
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from src.config.errors import UsageError, did_you_mean, warn
from src.config.schema import RunConfig
from src.distributed import stop_signals, strategies
from src.runtime import console
from src.runtime.exit_hooks import run_exit_hooks


def check_environment() -> None:
    """Raise UsageError when several processes were asked for and accelerate launch started one, as it sometimes does, or
    when the launcher's variables make no sense."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise UsageError(
                f"the environment variable {name} is {value!r}, where a launcher sets a whole number: unset it"
            )
    alone = os.environ.get("MASTER_ADDR") == "127.0.0.1" and "ACCELERATE_MIXED_PRECISION" in os.environ
    if alone and not {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"} & set(os.environ):
        raise UsageError(
            "several processes were asked for, but accelerate launch started one (it does so for --cpu and for "
            "distributed_type: MULTI_CPU without mpirun): use --config_file accelerate_configs/cpu_ddp.yaml, or torchrun"
        )


def init_accelerator(cfg: RunConfig):
    """Return an Accelerator whose process group is the one that was asked for; UsageError says what differs and why."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.utils import DDPCommunicationHookType

    stop_signals.check_launcher()
    console.reroute()
    asked = int(os.environ.get("WORLD_SIZE", 1))
    sharded = [name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"]
    accelerated = torch.accelerator.is_available()
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes") or (not accelerated and not sharded)
    # broadcast_buffers would be a collective per forward pass, and ranks may run different numbers of those.
    hook = DDPCommunicationHookType(cfg.ddp_comm_hook)
    # static_graph would be a little faster, but fails an assertion in torch when the first backward pass is one of no_sync.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True, comm_hook=hook)
    # accelerate has no field for what torch would have instead.
    warnings.filterwarnings("ignore", ".*broadcast_buffers. is deprecated", FutureWarning)
    check_trackers(cfg.report_to)
    if "FSDP" in sharded:
        strategies.check_version()
    strategies.complete_mesh(asked)
    try:
        accelerator = Accelerator(
            cpu=cpu,
            kwargs_handlers=[ddp, _group(InitProcessGroupKwargs, timedelta(seconds=cfg.ddp_timeout))],
            log_with=[name for name in cfg.report_to if name != "none"] or None,
            project_dir=cfg.output_dir,
        )
    except (ValueError, ImportError) as error:
        if dist.is_initialized():  # who ends first would be a lost connection to those that still set up theirs
            with suppress(RuntimeError):
                dist.barrier()
        raise UsageError(f"accelerate cannot start what its configuration asks for: {error}") from error
    accelerator.wait_for_everyone()  # who refuses below would end while others still connect to it
    for name in sharded:
        if accelerator.distributed_type.value != name:
            raise UsageError(
                f"{name} was asked for, but accelerate gave {accelerator.distributed_type.value}: it needs a GPU or NPU"
            )
    got = accelerator.num_processes
    if asked != got:
        raise UsageError(
            f"the launcher started {asked} processes, but accelerate made a group of {got}: each would train alone on all "
            "data and write to the same folder; set ACCELERATE_USE_CPU=true for CPU, or launch with torchrun"
        )
    if accelerator.mixed_precision not in (known := ("no", "bf16", "fp16", "fp8")):
        raise UsageError(
            f"mixed_precision is {accelerator.mixed_precision!r}: give one of {', '.join(known)} in the accelerate file"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UsageError(
            "mixed_precision is fp16, which a CPU would silently ignore: use 'no' or bf16 in the accelerate file"
        )
    if accelerator.mixed_precision != "no" and cfg.dtype == "float64":
        raise UsageError(
            f"dtype is float64, but the accelerate file asks for {accelerator.mixed_precision}: use mixed_precision: 'no'"
        )
    if accelerator.gradient_accumulation_steps != 1:
        warn(
            f"gradient accumulation of {accelerator.gradient_accumulation_steps} is set for accelerate and ignored here: it "
            "follows from global_batch_size and per_device_batch_size in the run file",
        )
        accelerator.gradient_accumulation_steps = 1  # or backward would divide the loss once more
    strategies.configure(accelerator, cfg)
    return accelerator


def _group(kind, timeout: timedelta):
    """Return accelerate's settings of the process group; after a restart with a store that forgets the attempt before.

    torchrun keeps one store over its restarts, in which ranks find the addresses of processes that are dead, and fail or
    not as the race goes (torch 2.13, pytorch#135712). Among several nodes the count of restarts is no common name for an
    attempt: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps, in the environment of the launchers."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    settings = kind(timeout=timeout)
    if not attempt or num_nodes() > 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return settings
    host, port, world = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"attempt_{attempt}", dist.TCPStore(host, port, world, False, timeout))

    passed = {"timeout": timeout, "store": store, "rank": int(os.environ["RANK"]), "world_size": world}
    settings.to_kwargs = lambda: passed  # it has no field for a store, but hands on what it returns
    return settings


def check_trackers(names: list[str]) -> None:
    """Raise UsageError for a tracker that accelerate does not know, or would leave out because its package is missing."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    own = set(LOGGER_TYPE_TO_CLASS) - {str(kind) for kind in LoggerType}  # registered by a fork
    known = [*LOGGER_TYPE_TO_CLASS, "all", "none"]
    ready = [*map(str, get_available_trackers()), *own, "all", "none"]
    for name in names:
        if name not in known:
            raise UsageError(
                f"report_to: unknown tracker {name!r}{did_you_mean(name, known)}; there is {', '.join(known)}"
            )
        if name not in ready:
            raise UsageError(f"report_to: the package of {name} is not installed: install it, or leave {name} out")


def num_nodes() -> int:
    return max(1, int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1) or 1))


def shutdown(accelerator) -> None:
    """End trackers and the process group; the caller holds no wrapped model any more.

    The wrapper of DDP must be gone before its group is: freed later, it waits for a thread that waits for the GIL.
    """
    accelerator.free_memory()
    gc.collect()
    run_exit_hooks()
    accelerator.trackers.clear()  # or it would close them once more
    accelerator.end_training()
