"""The strategy of a launch that does not happen: a dry run checks its settings without a process group.

Only what the launcher's environment variables say is known. Tests: tests/config/test_dry_run.py.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch

from src.config.schema import RunConfig
from src.distributed import strategy_checks
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy


def planned_strategy(cfg: RunConfig) -> Strategy:
    """Return the strategy of this launch, for checks only: this process is alone, and its model is on the CPU.

    Raise UsageError for settings that it does not support, with the sentence of the run."""
    kind = next((kind for kind in ("FSDP", "DEEPSPEED") if _env(f"ACCELERATE_USE_{kind}") == "true"), "")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if kind == "FSDP":
        strategy_checks.check_fsdp_version()
    strategy_checks.complete_mesh(world)
    precision = _env("ACCELERATE_MIXED_PRECISION", "no")
    strategy_checks.check_precision(precision, cfg)
    if kind == "FSDP":
        strategy_checks.check_precision_of_fsdp2(precision, cfg)
    plugin = SimpleNamespace(zero_stage=int(_env("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")), deepspeed_config={})
    accelerator: Any = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind or ("MULTI_GPU" if world > 1 else "NO")),
        num_processes=world,
        process_index=0,
        mixed_precision=precision,
        device=torch.device("meta"),  # unknown here
        parallelism_config=_mesh(),
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )
    strategy = _Planned(accelerator, cfg)
    strategy.hosts = HostGroup(SimpleNamespace(num_processes=1, parallelism_config=None), 0)  # type: ignore
    if kind == "DEEPSPEED":
        from src.distributed.deepspeed import check_fields

        check_fields(plugin, cfg)
    strategy_checks.check_settings(strategy, cfg)
    return strategy


class _Planned(Strategy):
    def __init__(self, accelerator: Any, cfg: RunConfig):
        super().__init__(accelerator, cfg)
        kind = accelerator.distributed_type.value
        self.is_sharded = self.is_sharded or kind in ("FSDP", "DEEPSPEED")
        loads_once = kind == "FSDP" and _env("FSDP_CPU_RAM_EFFICIENT_LOADING") == "true"
        self.allows_tensor_parallel = kind != "DEEPSPEED" and not loads_once
        self.planned_kind = kind

    @property
    def name(self) -> str:
        """Return the strategy in words, as the run does where the environment tells it."""
        mesh = self.accelerator.parallelism_config
        if self.planned_kind == "DEEPSPEED":
            return f"DeepSpeed ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        if self.tp_size > 1 or self.accelerator.num_processes == 1:
            return super().name
        if self.planned_kind == "FSDP" and mesh and mesh.dp_replicate_enabled:
            return f"HSDP: {mesh.dp_replicate_size} copies, each over {mesh.dp_shard_size} processes"
        return "FSDP2" if self.planned_kind == "FSDP" else "DDP"


def _env(name: str, default: str = "") -> str:
    return os.environ.get(name, default).lower()


def _mesh() -> SimpleNamespace | None:
    """Return the sizes of the device mesh, if the accelerate file sets them."""
    if _env("ACCELERATE_USE_PARALLELISM_CONFIG") != "true":
        return None
    names = (*strategy_checks.MESH, "cp", "sp")
    sizes = {f"{name}_size": int(_env(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in names}
    return SimpleNamespace(**sizes, dp_replicate_enabled=sizes["dp_replicate_size"] > 1)
