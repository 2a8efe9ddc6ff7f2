"""The run that most tests of checkpoints train, what they look at in its folder, and how it is damaged."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

from src.checkpointing import checkpoint_folder, resume, run_identity
from src.config import parsing, validation
from src.data import dataset
from src.storage import atomic_folder
from src.tasks import OPTIONS, make_task
from tests.helpers import kit

STEPS = 12
FIELDS = {
    "global_batch_size": 8,
    "per_device_batch_size": 4,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 4,
    "save_total_limit": 10,
}


def flags(tiny: dict, **fields) -> list[str]:
    """Return the flags of the run, other `fields` on top; None removes one."""
    values = tiny | FIELDS | fields
    return kit.flags(**{name: value for name, value in values.items() if value is not None})


def command(argv: list, folder: Path, world: int = 1, env=None) -> tuple[list, list[str]]:
    """Return (exit codes, what each rank printed) of train.py, by default in `folder`/run."""
    folder.mkdir(exist_ok=True)
    argv = argv if "--output_dir" in argv else [*argv, "--output_dir", "run"]
    return kit.run_command("train.py", *argv, folder=folder, world=world, env=env)


def identity_of(argv: list, **changes) -> dict:
    """Return the identity of the run that these flags describe, on one process."""
    cfg, options = parsing.parse([str(word) for word in argv], OPTIONS)
    validation.check(cfg, options)
    splits = dataset.prepare_datasets(cfg, make_task(cfg, options))
    launch = SimpleNamespace(mixed_precision="no", num_processes=1)
    return run_identity.identity(launch, cfg, splits) | changes


def find(folder: Path, argv: list, known: dict | None = None) -> tuple[Path | None, list[str]]:
    """Return what the main process would resume from, and its messages about that."""
    cfg, options = parsing.parse([*map(str, argv), "--output_dir", str(folder)], OPTIONS)
    return resume.find_checkpoint(cfg, options, known or identity_of(argv))


def at_step(number: int) -> Path:
    return Path("checkpoints", f"step_{number:08d}")


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints of a run; all must be intact, with nothing half-written beside them."""
    found = checkpoint_folder.list_checkpoints(folder)
    assert [atomic_folder.verify(path) for path in found] == [[]] * len(found)
    assert not list((folder / "checkpoints").glob(".*"))
    return [checkpoint_folder.step_of(path) for path in found]


def same_state(one: Path, other: Path) -> bool:
    """Return whether two checkpoints hold the same weights, moments and progress, to the last bit."""
    states = [json.loads((folder / "state.json").read_text()) for folder in (one, other)]
    for state in states:
        state["meter"] = {k: v for k, v in state["meter"].items() if k not in ("seconds", "waited")}
    names = ("progress", "meter", "numbers", "scaler")
    same_tensors = all(
        kit.same(kit.load_weights(one, part), kit.load_weights(other, part)) for part in ("model", "optimizer")
    )
    return same_tensors and all(states[0][name] == states[1][name] for name in names)


def same_run(one: kit.Run, other: kit.Run) -> bool:
    """Return whether two runs ended with the same state and wrote the same lines, but for times."""
    return (
        kit.same(one.weights, other.weights)
        and same_state(one.folder / at_step(STEPS), other.folder / at_step(STEPS))
        and kit.timeless(one.folder) == kit.timeless(other.folder)
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a run folder but its logs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGE = {
    "first bit flipped": lambda path: flip(path, 0),
    "middle bit flipped": lambda path: flip(path, 4 * path.stat().st_size + 3),
    "last bit flipped": lambda path: flip(path, 8 * path.stat().st_size - 1),
    "last byte cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
}
