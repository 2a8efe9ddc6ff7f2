"""The run that most tests of checkpoints train, what they look at in its folder, and how it is damaged."""

import os
from pathlib import Path

from src.checkpointing import resume, run_identity
from src.config import parsing, validation
from src.data import dataset
from src.tasks import OPTIONS, make_task
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, same_state

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


def command(argv: list, folder: Path, world: int = 1) -> tuple[list, list[str]]:
    """Return (exit codes, what each rank printed) of train.py in `folder`/run."""
    return kit.run_command("train.py", *argv, "--output_dir", "run", folder=folder, world=world)


def identity_of(argv: list) -> dict:
    """Return the identity of the run that these flags describe, on one process."""
    cfg, options = parsing.parse([str(word) for word in argv], OPTIONS)
    validation.check(cfg, options)
    splits = dataset.prepare_datasets(cfg, make_task(cfg, options))
    return run_identity.identity("no", 1, cfg, splits)


def find(folder: Path, argv: list, known: dict | None = None) -> tuple[Path | None, list[str]]:
    """Return what the main process would resume from, and its messages about that."""
    cfg, options = parsing.parse([*map(str, argv), "--output_dir", str(folder)], OPTIONS)
    return resume.find_checkpoint(cfg, options, known or identity_of(argv))


def same_run(one: kit.Run, other: kit.Run) -> bool:
    """Return whether two runs ended with the same state and wrote the same lines, but for times."""
    return (
        kit.same(one.weights, other.weights)
        and same_state(at_step(one, STEPS), at_step(other, STEPS))
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
    "middle bit flipped": lambda path: flip(path, 4 * path.stat().st_size + 3),
    "last byte cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "removed": lambda path: path.unlink(),
}
