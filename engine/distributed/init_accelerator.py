"""Creation and shutdown of the Accelerator, with a check that its process group is the requested one.

Tests: tests/engine/distributed/test_launch.py and test_accelerate_configs.py.
"""

import gc
import math
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from engine import startup
from engine.config.errors import UsageError, how_to_install, warn
from engine.config.find_addons import addon_names, load_addon
from engine.config.run_config import RunConfig
from engine.process import console, private_apis
from engine.process.exit_codes import run_exit_hooks

if TYPE_CHECKING:
    from accelerate import Accelerator, InitProcessGroupKwargs


def check_environment() -> None:
    """Raise UsageError if the launcher started one process instead of several, or if there is none for sharding."""
    for name in sharding_of_launch():
        if not startup.LAUNCHER_PID and "WORLD_SIZE" not in os.environ:
            raise UsageError(
                f"ACCELERATE_USE_{name} is true in the environment: unset it, or start by accelerate launch"
            )
    # accelerate launch sets this address only if several processes were requested. Then it must set a world size.
    several = startup.LAUNCHER_PID and os.environ.get("MASTER_ADDR") == "127.0.0.1"
    if several and "WORLD_SIZE" not in os.environ:
        raise UsageError(
            "several processes were requested, but accelerate launch started only one (as it does for --cpu, and for "
            "distributed_type: MULTI_CPU): use --config_file accelerate_configs/cpu_ddp.yaml, or torchrun"
        )


def sharding_of_launch() -> list[str]:
    """Return what shards the model in this launch, by accelerate's names, which are those of its variables."""
    names = ("FSDP", "DEEPSPEED")
    return [name for name in names if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"]


def init_accelerator(cfg: RunConfig) -> "Accelerator":
    """Return the Accelerator; raise UsageError if its process group or precision is not the requested one."""
    console.reroute()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    sharding = sharding_of_launch()
    if "FSDP" in sharding and os.environ.get("FSDP_VERSION") != "2":  # by default accelerate takes 1
        raise UsageError("fsdp_version is 1: give 2, as accelerate_configs/fsdp2.yaml does")
    if os.environ.get("FSDP_IGNORED_MODULES"):  # accelerate would not sum their gradients over the processes
        raise UsageError("fsdp_ignored_modules: each process would train these modules alone: remove it")
    strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "1")
    if strategy.upper() not in ("1", "FULL_SHARD"):
        warn(f"fsdp_sharding_strategy {strategy} is ignored: set fsdp_reshard_after_forward, or take hsdp.yaml")
    complete_mesh(world_size)
    _check_float8()
    _check_trackers(cfg.report_to)
    accelerator = _create(cfg, sharding)
    accelerator.wait_for_everyone()  # or a rank that raises below would end while others still connect to it
    _check_group(accelerator, world_size, sharding)
    precision = accelerator.mixed_precision
    if precision not in ("no", "bf16", "fp16", "fp8"):  # in the environment; accelerate would compute without it
        raise UsageError(f"ACCELERATE_MIXED_PRECISION is {precision}: give no, bf16, fp16 or fp8")
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise UsageError("mixed_precision is fp16, which is silently ignored on a CPU: use 'no' or bf16")
    if precision != "no" and cfg.dtype == "float64":
        raise UsageError(f"dtype is float64, but mixed_precision is {precision} in the accelerate file: set it to 'no'")
    if accelerator.gradient_accumulation_steps != 1:
        warn(
            f"gradient accumulation of {accelerator.gradient_accumulation_steps} in accelerate's config is ignored: "
            "set global_batch_size and per_device_batch_size in the run file (YAML) instead",
        )
        accelerator.gradient_accumulation_steps = 1  # or backward would divide the loss once more
    return accelerator


def complete_mesh(world: int) -> None:
    """Set dp_shard_size so that HSDP or tensor parallelism uses all `world` processes.

    The accelerate file then sets only dp_replicate_size and tp_size, and fits any number of processes."""
    names = [f"PARALLELISM_CONFIG_{name}_SIZE" for name in ("DP_SHARD", "DP_REPLICATE", "TP", "CP", "SP")]
    sizes = [int(os.environ.get(name, "1")) for name in names]
    is_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if is_fsdp and sizes[0] == 1 and math.prod(sizes) > 1:
        os.environ[names[0]] = str(world // math.prod(sizes))


def _check_float8() -> None:
    """Raise UsageError if mixed_precision is fp8 and what computes it is missing, or not known to work."""
    from accelerate.utils import is_torchao_available, is_transformer_engine_available

    if os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() != "fp8":
        return
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "NO").upper()  # NO: the first one that is installed
    if backend not in ("NO", "AO", "TE"):
        raise UsageError(
            f"mixed_precision is fp8 with the backend {backend or 'of no name'}: set fp8_config: {{backend: AO}}"
        )
    is_installed = {"AO": is_torchao_available(), "TE": is_transformer_engine_available()}
    if not is_installed.get(backend, any(is_installed.values())):
        raise UsageError(
            f"mixed_precision is fp8 in the accelerate file, which needs the package torchao: {how_to_install('torchao')}, "
            "or set mixed_precision to bf16 or 'no', as for a CPU"
        )


def _create(cfg: RunConfig, sharding: list[str]) -> "Accelerator":
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.utils import DDPCommunicationHookType

    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False,  # True: a collective per forward pass, but some ranks run more passes
        gradient_as_bucket_view=True,
        # With accumulation, too, it reduces what any micro-batch of the step has used, and leaves the rest without a gradient.
        find_unused_parameters=cfg.ddp_find_unused_parameters,
        # No static_graph: it would be a little faster, but torch fails an assertion if the first backward is in no_sync.
        comm_hook=DDPCommunicationHookType(cfg.ddp_comm_hook),
    )
    # The warning suggests another argument, which accelerate has no field for.
    warnings.filterwarnings("ignore", ".*broadcast_buffers. is deprecated", FutureWarning)
    # If a collective of NCCL times out, torch writes the last ones beside the stacks of host_group.py.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", os.path.abspath(f"{cfg.output_dir}/logs/nccl_rank_"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    group = _process_group_settings(InitProcessGroupKwargs, timedelta(seconds=cfg.ddp_timeout))
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if use_cpu and sharding and "LOCAL_RANK" in os.environ:
        private_apis.shard_over_gloo()
        use_cpu = False
    if not sharding:  # accelerate (1.15) would give each float8 weight a new parameter, which no optimizer would train
        os.environ["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] = "false"
    return Accelerator(
        cpu=use_cpu or not (torch.accelerator.is_available() or sharding),
        kwargs_handlers=[ddp, group],
        log_with=[name for name in cfg.report_to if name != "none"] or None,
        project_dir=cfg.output_dir,
    )


def _process_group_settings(settings_type: type, timeout: timedelta) -> "InitProcessGroupKwargs":
    """Return accelerate's process group settings; after a restart by torchrun, with a new key prefix in its TCPStore.

    accelerate (1.15) would drop 600 seconds, its default for NCCL, and gloo would wait for 1,800. torchrun keeps one
    store over all restarts. Ranks may find addresses of dead processes in it and fail (torch 2.13, pytorch#135712). A
    key prefix per attempt hides them. It works on one node only, because nodes count restarts differently. On several
    nodes, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for the launchers."""
    settings = settings_type()
    arguments = {"timeout": timeout}
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if attempt and num_nodes() == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        world_size = int(os.environ["WORLD_SIZE"])
        shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, False, timeout)
        store = dist.PrefixStore(f"attempt_{attempt}", shared)
        arguments |= {"store": store, "rank": int(os.environ["RANK"]), "world_size": world_size}
    private_apis.set_process_group_arguments(settings, arguments)
    return settings


def _check_group(accelerator: "Accelerator", world_size: int, sharding: list[str]) -> None:
    """Raise UsageError if accelerate silently created another type or size of process group than requested."""
    created = accelerator.distributed_type.value
    size = accelerator.num_processes
    for name in sharding:
        if created != name:
            raise UsageError(
                f"{name} was requested, but accelerate created {created}: {name} needs a GPU or NPU; to try it on CPUs, set "
                "ACCELERATE_USE_CPU=true and start it by accelerate launch"
            )
    if size != world_size:
        raise UsageError(
            f"the launcher started {world_size} processes, but accelerate created a group of {size}: each would train "
            "alone and write to the same folder. Set ACCELERATE_USE_CPU=true for CPU training, or launch with torchrun"
        )


def _check_trackers(names: list[str]) -> None:
    """Raise UsageError for an unknown tracker, and for one that accelerate skips silently: its package is missing."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    for name in {*names} & {*addon_names("trackers")}:
        LOGGER_TYPE_TO_CLASS[name] = load_addon("trackers", name).Tracker
    known = {*LoggerType.list(), *map(str, LOGGER_TYPE_TO_CLASS)}  # and those that a copy has registered
    if unknown := {*names} - known - {"none"}:
        choices = ", ".join(sorted(known))
        raise UsageError(f"report_to: {min(unknown)} is no tracker of accelerate: choose from {choices}")
    missing = ({*names} & {*LoggerType.list()}) - {"all", *map(str, get_available_trackers())}
    if missing:
        raise UsageError(f"report_to: the package of {min(missing)} is not installed: {how_to_install(min(missing))}")


def num_nodes() -> int:
    """Return the number of machines of this launch."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) or 1
    return max(1, int(os.environ.get("WORLD_SIZE", 1)) // per_node)


def shutdown(accelerator: "Accelerator") -> None:
    """Close the trackers and the process group. The caller must hold no reference to a wrapped model.

    DDP's wrapper must be freed before its process group. Freed later, it waits for a thread that waits for the GIL."""
    accelerator.free_memory()
    gc.collect()
    run_exit_hooks()
    accelerator.trackers.clear()  # or end_training would close them again
    accelerator.end_training()
