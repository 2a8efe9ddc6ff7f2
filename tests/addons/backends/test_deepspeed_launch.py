"""What the DeepSpeed add-on does without the package deepspeed: memory, parameters of a loss, a missing add-on."""

from types import SimpleNamespace
from typing import Any

import pytest

from addons.backends import deepspeed
from src.config import addons
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed import backend_checks
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
