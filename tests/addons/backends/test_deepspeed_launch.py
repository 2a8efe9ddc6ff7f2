"""What the DeepSpeed add-on does without the package deepspeed: memory, parameters of a loss, a missing add-on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from addons.backends import deepspeed
from engine.config import find_addons as addons
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.distributed import backend_checks, choose_backend
from engine.run import memory
from tests.helpers import kit


def test_zero_keeps_master_weights_in_float32(monkeypatch):
    """docs/scaling.md has the formulas; with DeepSpeed they were compared with the tensors of two ranks."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = {1: (2000 + 200, 400), 2: (2000 + 200, 200), 3: (1000 + 200, 200)}
    for stage, (weights, gradients) in expected.items():
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
        _, found, _ = deepspeed.memory_of_launch(RunConfig(), 1000, 100, 0)
        assert found == {"weights": weights, "gradients": gradients, "optimizer": 400}


@pytest.mark.parametrize("fields", [{"peft": {"type": "lora"}}, {"ddp_find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("addon, name", [("deepspeed", "DeepSpeed"), ("tensor_parallel", "TensorParallel")])
def test_fields_that_an_add_on_does_not_support_are_refused(addon, name, fields):
    kind = getattr(pytest.importorskip(f"addons.backends.{addon}", reason="this fork has removed it"), name)
    if "peft" in fields:
        kit.need_addon("adapters/peft")
    accelerator = SimpleNamespace(parallelism_config=None)
    backend: Any = SimpleNamespace(accelerator=accelerator, unsupported=kind.unsupported, name="other backend")
    with pytest.raises(UsageError, match=f"{next(iter(fields))} is .* other backend does not support.*fsdp2"):
        backend_checks.check_settings(backend, addons.run_config(**fields))


def launch(kind: str, tp_size: int) -> Any:
    """Return what `make_backend` reads of an accelerator; accelerate would need the packages and devices of the launch."""
    mesh = SimpleNamespace(tp_size=tp_size, cp_size=1, sp_size=1) if tp_size > 1 else None
    return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), parallelism_config=mesh)


@pytest.mark.parametrize(
    ("kind", "tp_size", "expected"),
    [
        ("DEEPSPEED", 1, "DeepSpeed"),
        ("FSDP", 2, "TensorParallelFSDP2"),
        ("MULTI_CPU", 2, "TensorParallel"),
        ("DEEPSPEED", 2, "tp_size is 2: tensor parallelism needs"),
        ("MEGATRON_LM", 1, "distributed_type is MEGATRON_LM, which no file of addons/backends/ runs"),
    ],
)
def test_add_on_that_runs_a_launch(kind, tp_size, expected):
    for name in ("deepspeed", "tensor_parallel"):
        kit.need_addon(f"backends/{name}")
    try:
        found = choose_backend._backend_of_addon(launch(kind, tp_size)).__name__
    except UsageError as error:
        found = str(error)
    assert found.startswith(expected)


def test_launch_of_a_removed_add_on_is_refused(monkeypatch):
    """Also its plan in a dry run, which asks by the variable of the launcher."""
    monkeypatch.setattr(choose_backend, "addon_names", lambda room: [])
    with pytest.raises(UsageError, match=r"distributed_type is DEEPSPEED, which .* \(here: none\): restore"):
        choose_backend._backend_of_addon(launch("DEEPSPEED", 1))
    monkeypatch.setattr(addons, "addon_names", lambda room: [])
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UsageError, match="deepspeed is an add-on that is not here: restore addons/backends/deepspeed"):
        memory.describe_memory(RunConfig(), torch.nn.Linear(2, 2), str)
