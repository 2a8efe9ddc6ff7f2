"""The recipe and the comparisons that tests of checkpoints, FSDP2, tensor parallelism and DeepSpeed share."""

from pathlib import Path

import pytest

from engine.checkpointing import checkpoint_folder
from engine.storage import verify_hashes
from tests.helpers import kit


def recipe(files, model: str = "llama.yaml", **fields) -> list[str]:
    """Return the flags of a short run; a field that is None is left to its default."""
    values = {f"{split}_file": files / f"{split}.jsonl" for split in ("train", "validation")}
    values |= {"model_config": files / model, "per_device_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1}
    values |= {"save_total_limit": 99} | fields
    return kit.flags(**{name: value for name, value in values.items() if value is not None})


def where(name: str, world: int, **keys) -> dict[str, str]:
    """Return the environment of a launch by accelerate_configs/NAME.yaml, in float32 unless `keys` say otherwise."""
    return kit.where(name, world, **{"mixed_precision": "no"} | keys)


def check_same_lines(one: list[dict], other: list[dict], rel: float = 1e-6) -> None:
    for a, b in zip(one, other, strict=True):
        names = [name for name in ("step", "loss", "grad_norm", "weight", "examples") if name in a]
        assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=rel)


def check_same_numbers(one: kit.Run, other: kit.Run, rel: float = 1e-6) -> None:
    """Assert the same examples in every step, and the same lines within the last digits of float32."""
    assert kit.ledger_text(one.folder) == kit.ledger_text(other.folder)
    check_same_lines(one.kind("train"), other.kind("train"), rel)
    check_same_lines(one.kind("eval"), other.kind("eval"))


def check_same_run(one: kit.Run, other: kit.Run, rel: float = 1e-6) -> None:
    """Assert the same examples, lines and final weights."""
    check_same_numbers(one, other, rel)
    assert kit.distance(one.weights, other.weights) <= 1e-5


def check_same_checkpoint(one: kit.Run, other: kit.Run, step: int, bound: float) -> None:
    """Assert that the weights and moments of two checkpoints differ by at most `bound`."""
    for part in ("model", "optimizer"):
        saved = [kit.load_weights(run.folder / "checkpoints" / f"step_{step:08d}", part) for run in (one, other)]
        assert kit.distance(*saved) <= bound


# ---- the run of the FSDP2 tests ----------------------------------------------------------------------------------------

STEPS = 20  # each of 32 examples in micro-batches of 4: three ranks have 3, 3 and 2 of them


def fsdp2_recipe(files, model: str = "llama.yaml", **fields) -> list[str]:
    # A constant rate, so that the first part of a run does not depend on its length.
    values = {"max_steps": STEPS, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}
    return recipe(files, model, **values | {"eval_steps": 5, "save_steps": 5} | fields)


def at_step(run: kit.Run | Path, number: int) -> Path:
    return getattr(run, "folder", run) / "checkpoints" / f"step_{number:08d}"


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints of a run; all must be intact, with nothing half-written anywhere."""
    found = checkpoint_folder.list_checkpoints(folder)
    assert [verify_hashes.verify(path) for path in found] == [[]] * len(found)
    assert not [path for path in folder.rglob(".*") if path.suffix in (".tmp", ".parts", ".old")]
    return [checkpoint_folder.step_of(path) for path in found]


def same_state(one: Path, other: Path) -> bool:
    """Return whether two checkpoints hold the same weights and moments, to the last bit."""
    return all(kit.same(kit.load_weights(one, part), kit.load_weights(other, part)) for part in ("model", "optimizer"))
