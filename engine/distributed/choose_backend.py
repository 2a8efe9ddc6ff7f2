"""Choice of the backend of a launch: only this asks accelerate which one a run uses.

Tests: tests/engine/distributed/test_launch.py.
"""

from typing import TYPE_CHECKING

from engine.config.errors import UsageError, may_be_removed
from engine.config.find_addons import addon_names, first_answer, load_addon
from engine.config.run_config import RunConfig
from engine.distributed import backend_checks
from engine.distributed.backends import Backend

if TYPE_CHECKING:
    from accelerate import Accelerator

WITHOUT_SHARDS = ("NO", "XLA")  # accelerate's names of launches with a whole model in each process, besides MULTI_…


def make_backend(accelerator: "Accelerator", cfg: RunConfig) -> Backend:
    """Return the backend of this launch; raise UsageError on every rank for settings that it does not support."""
    launch = accelerator.distributed_type.value
    mesh = accelerator.parallelism_config
    splits_layers = mesh is not None and mesh.tp_size > 1
    if launch == "FSDP" and not splits_layers:
        with may_be_removed("FSDP2"):
            from engine.distributed.fsdp2 import FSDP2 as chosen  # pyrefly: ignore
    elif (launch in WITHOUT_SHARDS or launch.startswith("MULTI_")) and not splits_layers:
        chosen = Backend
    else:
        chosen = _backend_of_addon(accelerator)
    backend = chosen(accelerator, cfg)
    backend_checks.check_settings(backend, cfg)
    return backend


def _backend_of_addon(accelerator: "Accelerator") -> type[Backend]:
    """Return the class of the add-on that runs this launch; raise UsageError if none does."""
    names = addon_names("backends")
    chosen = first_answer(load_addon("backends", name).backend_type(accelerator) for name in names)
    if chosen is None:
        mesh = accelerator.parallelism_config
        launch = accelerator.distributed_type.value
        if mesh:
            launch += f" with tp_size {mesh.tp_size}"
        raise UsageError(
            f"distributed_type is {launch}, which no file of addons/backends/ runs (here: {', '.join(names) or 'none'}): "
            "restore the one that does, or use DDP or FSDP2 (accelerate_configs/ddp.yaml, fsdp2.yaml)"
        )
    return chosen
