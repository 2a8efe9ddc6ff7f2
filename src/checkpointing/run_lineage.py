"""Run lineage: the id of the run in a folder, the checkpoint it began from, and whether a new run may use it.

Tests: tests/checkpointing/test_run_lineage.py.
"""

import json
import shutil
import uuid
from pathlib import Path

import yaml

from src.checkpointing.checkpoint_list import is_inside, list_checkpoints, read_state, step_of
from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.storage import atomic_folder


def lineage(cfg: RunConfig, start: Path | None) -> dict:
    """Return the run's id, which never changes in its folder, and the checkpoint of another run it began from."""
    if start and belongs(start, Path(cfg.output_dir)):
        return read_state(start)["lineage"]
    began = None
    if start:
        began = {
            "checkpoint": str(start.resolve()),
            "manifest": atomic_folder.read_manifest(start).get("manifest"),
            "step": step_of(start),
        }
    return {"run_id": uuid.uuid4().hex, "began_from": began}


def belongs(path: Path, output_dir: Path) -> bool:
    """Return True if `path` is `output_dir`, or a checkpoint that its run saved, even if it was moved since."""
    if path.resolve() == output_dir.resolve() or is_inside(path, output_dir):
        return True
    own = run_id(path)
    return own is not None and own in map(run_id, list_checkpoints(output_dir))


def began_from(output_dir: Path, asked: Path) -> bool:
    """Return True if the run in `output_dir` began from `asked`, which is a checkpoint or the folder of a run."""
    checkpoints = list_checkpoints(output_dir)
    for path in reversed(checkpoints):
        if known := _read_lineage(path).get("began_from"):
            source = Path(known["checkpoint"])
            same_path = asked.resolve() in (source, source.parent.parent)
            return same_path or known["manifest"] == atomic_folder.read_manifest(asked).get("manifest")
    if checkpoints or (output_dir / "final").exists():
        return False
    try:  # killed before its first checkpoint
        resumed = yaml.safe_load((output_dir / "config.yaml").read_text())["resume"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return False
    return Path(str(resumed)).resolve() == asked.resolve()


def check_no_other_run(output_dir: Path, asked: Path) -> None:
    """Raise UsageError if `output_dir` already holds a run; a new run from `asked` would mix with it."""
    held = [path.name for path in list_checkpoints(output_dir)]
    held += [name for name in ("metrics.jsonl", "final") if (output_dir / name).exists()]
    if held:
        raise UsageError(
            f"resume: {asked} is a checkpoint of another run than the one in output_dir {output_dir} ({', '.join(held[:3])}): "
            "give another --output_dir, or remove --resume to resume the run in output_dir"
        )


def has_trained(output_dir: Path) -> bool:
    """Return True if the run in `output_dir` has saved a later checkpoint than the one it began from."""
    found = list_checkpoints(output_dir)
    if not found:
        return False
    began = _read_lineage(found[-1]).get("began_from")
    return not began or step_of(found[-1]) > began["step"]


def copy_best_checkpoint(start: Path, output_dir: Path, lineage: dict) -> None:
    """Copy the best checkpoint of the run that saved `start` to `output_dir`, with `lineage` as its lineage.

    It is beside `start`, where a user may also keep checkpoints of other runs."""
    best_step = read_state(start)["progress"]["best_step"]
    candidates = [start, *sorted(start.resolve().parent.iterdir())]
    found = [path for path in candidates if best_step and path.is_dir() and step_of(path) == best_step]
    same_run = [path for path in found if run_id(path) == run_id(start)]
    best = next((path for path in same_run if not atomic_folder.verify(path)), None)
    if best is None:
        return

    def write(temporary: Path) -> None:
        for name in atomic_folder.read_manifest(best)["files"]:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(best / name, temporary / name)  # not the file mode: the source may be read-only
        (temporary / "state.json").write_text(json.dumps(read_state(best) | {"lineage": lineage}, indent=1))

    folder = output_dir / "checkpoints" / f"step_{best_step:08d}"
    try:
        atomic_folder.publish(folder, write, **atomic_folder.read_metadata(best))
    except (OSError, shutil.Error) as error:
        warn(f"the best checkpoint so far, {best}, cannot be copied to {folder}: {error}", any_rank=True)


def run_id(checkpoint: Path) -> str | None:
    """Return the id of the run that saved a checkpoint, None for other folders."""
    return _read_lineage(checkpoint).get("run_id")


def _read_lineage(checkpoint: Path) -> dict:
    return atomic_folder.read_json(checkpoint / "state.json").get("lineage", {})
