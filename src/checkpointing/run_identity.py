"""What defines a run besides its fields: contents of data and model, precision, lineage.

Tests: tests/checkpointing/test_run_identity.py, tests/checkpointing/test_resume.py.
"""

import json
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

import yaml

from src.checkpointing.checkpoint_list import is_inside, list_checkpoints, read_state, step_of
from src.config.errors import UsageError, warn
from src.config.paths import locate
from src.config.schema import RunConfig
from src.config.yaml_files import read_yaml
from src.models.model_files import pretrained_source
from src.storage import atomic_folder

SAVED_BY = ("transformers_version", "_name_or_path")  # in config.json: who wrote it, not what the model is


def identity(cfg: RunConfig, stats: dict, also: dict | None = None) -> dict:
    """Return what a run is besides its fields: the contents of its data and of its model configuration, and what `of_launch`
    knows of this start."""
    return {"data": _contents(stats)} | model(cfg) | (also or {})


def of_launch(accelerator, splits: dict) -> dict:
    """Return what only a launch knows of a run: the evaluation data it has, and its computing precision."""
    validation = _contents(splits["validation"].stats) if "validation" in splits else None
    return {
        "validation": validation,
        "mixed_precision": accelerator.mixed_precision,
        "processes": accelerator.num_processes,
    }


def _contents(stats: dict) -> dict:
    names = ("examples", "rows", "files", "tokenizer", "sample", "labels", "tokenizer_files")
    return {name: stats[name] for name in names if name in stats}


def model(cfg: RunConfig) -> dict:
    """Return the values of the model's configuration; of a pretrained model also its commit, and its code where that is run."""
    if cfg.model_config or not cfg.model_name_or_path:
        return {"model": read_yaml(cfg.model_config) if cfg.model_config else None}
    folder, commit = pretrained_source(cfg)
    values = read_yaml(folder / "config.json") if (folder / "config.json").exists() else {}
    code = sorted(folder.glob("*.py")) if cfg.trust_remote_code else []
    values = {name: value for name, value in values.items() if name not in SAVED_BY}
    return {
        "model": values | {path.name: atomic_folder.hash_file(path)["xxh3_128"] for path in code},
        "model_commit": commit,
    }


def differences(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """Return (how data, model and precision differ, old → new; remarks about what could not be compared or does no harm)."""
    faults, remarks = _rows("training data", old["data"], new["data"]), []
    one, two = (each["data"].get("labels") for each in (old, new))
    if one and two and one != two:
        faults.append(f"labels: {_few(one)} → {_few(two)}")
    one, two = (each["data"].get("tokenizer_files") for each in (old, new))
    if one and two and one != two:
        remarks.append("tokenizer: its files or the chat template have other contents, which make the same rows")
    unknown = [name for name in ("validation", "mixed_precision") if name in new and name not in old]
    if old.get("validation") and new.get("validation"):
        faults += _rows("validation data", old["validation"], new["validation"])
    elif old.get("validation") and "validation" in new:
        remarks.append(f"validation data: {old['validation']['examples']} rows → none: nothing is evaluated any more")
    elif new.get("validation") and "validation" in old:
        remarks.append(f"validation data: none → {new['validation']['examples']} rows")
    before, after = old["model"], new["model"] or {}
    if before is None and after:
        unknown.append("model configuration")
    else:
        faults += [
            f"model configuration: {name}: {(before or {}).get(name)} → {after.get(name)}"
            for name in sorted((before or {}).keys() | after.keys())
            if (before or {}).get(name) != after.get(name)
        ]
    if old.get("model_commit") != new.get("model_commit") and "model_commit" in old:
        remarks.append(
            f"model_name_or_path: commit {old['model_commit']} → {new.get('model_commit')}, with the same config.json"
        )
    one, two = (each.get("mixed_precision") for each in (old, new))
    if one and two and one != two:
        faults.append(
            f"mixed_precision: {one} → {two}: to resume this run, launch with mixed_precision {one} in the accelerate file"
        )
    if unknown:
        remarks.append(f"saved by a version that did not record {', '.join(unknown)}: not compared")
    return faults, remarks


def _rows(kind: str, then: dict, now: dict) -> list[str]:
    """Return how data differs in content."""
    if (then["examples"], then["rows"]) == (now["examples"], now["rows"]):
        samples = {stats["sample"] for stats in (then, now) if stats.get("sample")}
        return [f"{kind}: files of the same names and sizes have other contents"] if len(samples) == 2 else []
    files = [
        f"{name}: {then['files'].get(name, 'absent')} → {now['files'].get(name, 'absent')} bytes"
        for name in sorted(then["files"].keys() | now["files"].keys())
        if then["files"].get(name) != now["files"].get(name)
    ]
    same = "same sizes, other contents" if then["tokenizer"] == now["tokenizer"] else "another tokenizer or options"
    if not then["examples"] and not now["examples"]:
        return [f"{kind}: {', '.join(files[:5]) or same}"]
    one, two = ("a stream" if stats["examples"] is None else stats["examples"] for stats in (then, now))
    return [f"{kind}: {one} rows → {two} ({', '.join(files[:5]) or same})".replace("a stream rows", "a stream")]


def _few(labels: list[str]) -> str:
    return ", ".join(labels[:10]) + f" and {len(labels) - 10} more" * (len(labels) > 10)


def warn_of_precision(cfg: RunConfig, accelerator) -> None:
    """Warn if a checkpoint or final model of ours is evaluated in another precision than it was trained in."""
    trained = atomic_folder.read_metadata(Path(locate(cfg.model_name_or_path or ""))).get("mixed_precision")
    if trained and trained != (now := accelerator.mixed_precision):
        warn(
            f"this model was trained with mixed_precision {trained} and is evaluated with {now}: the numbers differ from those "
            f"that train.py reported; launch with mixed_precision {trained} to get the same ones"
        )


# ---- which run a folder holds ------------------------------------------------------------------------------------------


def lineage(cfg: RunConfig, start: Path | None) -> dict:
    """Return the id of the run, which stays the same in its folder, and the checkpoint of another run that it began from."""
    if start and belongs(start, Path(cfg.output_dir)):
        known = read_state(start).get("lineage", {})
        return {"run_id": known.get("run_id") or uuid.uuid4().hex, "began_from": known.get("began_from")}
    began = None
    if start:
        began = {"checkpoint": str(start.resolve()), "manifest": _digest(start), "step": step_of(start)}
    return {"run_id": uuid.uuid4().hex, "began_from": began}


def belongs(start: Path, output_dir: Path) -> bool:
    """Return whether a checkpoint is of the run that `output_dir` holds, wherever the checkpoint is now."""
    own = _id(start)
    return is_inside(start, output_dir) or bool(own and own in map(_id, list_checkpoints(output_dir)))


def began_from(output_dir: Path, asked: Path) -> bool:
    """Return whether the run in `output_dir` began from the checkpoint (or a checkpoint of the run) `asked`."""
    for path in reversed(list_checkpoints(output_dir)):
        if known := _lineage(path).get("began_from"):
            there = Path(known["checkpoint"])
            return asked.resolve() in (there, there.parent.parent) or known["manifest"] == _digest(asked)
    if list_checkpoints(output_dir) or (output_dir / "final").exists():
        return False
    try:  # killed before its first checkpoint
        resumed = yaml.safe_load((output_dir / "config.yaml").read_text())["resume"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return False
    return Path(str(resumed)).resolve() == asked.resolve()


def check_alone(output_dir: Path, asked: Path) -> None:
    """Raise UsageError if `output_dir` holds a run that resuming from `asked`, a checkpoint of another, would mix with it."""
    held = [path.name for path in (output_dir / "metrics.jsonl", output_dir / "final") if path.exists()]
    if held := [*(path.name for path in list_checkpoints(output_dir)), *held]:
        raise UsageError(
            f"resume: {asked} is a checkpoint of another run than the one in output_dir {output_dir} ({', '.join(held[:3])}): "
            "give another --output_dir, or leave --resume out to go on with the run that is there"
        )


def has_trained(output_dir: Path) -> bool:
    """Return whether the run in `output_dir`, which began from a checkpoint of another, has one of its own."""
    found = list_checkpoints(output_dir)
    began = _lineage(found[-1]).get("began_from") if found else None
    return bool(found) and (not began or step_of(found[-1]) > began.get("step", -1))


def bring_best(start: Path, output_dir: Path, lineage: dict) -> None:
    """Put the best checkpoint so far of the run that a new one begins from into the new one's folder, as one of its own."""
    best_step = read_state(start)["progress"].get("best_step")
    candidates = [start, *sorted(start.resolve().parent.iterdir())]
    found = [path for path in candidates if best_step and path.is_dir() and step_of(path) == best_step]
    found = next((path for path in found if not atomic_folder.verify(path)), None)
    if found is None:
        return
    files = json.loads((found / atomic_folder.MANIFEST).read_bytes())["files"]

    def write(temporary: Path) -> dict:
        for name in files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            _link(found / name, temporary / name, temporary.stat().st_mode & 0o666)
        (temporary / "state.json").unlink()  # or the other run's would be written to
        (temporary / "state.json").write_text(json.dumps(read_state(found) | {"lineage": lineage}, indent=1))
        return {name: entry for name, entry in files.items() if name != "state.json"}

    folder = output_dir / "checkpoints" / f"step_{best_step:08d}"
    try:
        atomic_folder.publish(folder, write, **atomic_folder.read_metadata(found))
    except (OSError, shutil.Error) as error:
        warn(f"the best checkpoint so far, {found}, cannot be copied to {folder}: {error}", alone=True)


def _link(source: Path, target: Path, mode: int) -> None:
    """Link a file, or copy it where that is not possible, or where the link would change the mode of `source`."""
    with suppress(OSError):
        if source.stat().st_mode & 0o777 == mode:
            return os.link(source, target)
    shutil.copy2(source, target)


def _lineage(checkpoint: Path) -> dict:
    try:
        return read_state(checkpoint).get("lineage") or {}
    except (OSError, ValueError):
        return {}


def _id(checkpoint: Path) -> str | None:
    return _lineage(checkpoint).get("run_id")


def _digest(checkpoint: Path) -> str | None:
    """Return the hash that stands for all of a checkpoint's contents, wherever it is."""
    try:
        return json.loads((checkpoint / atomic_folder.MANIFEST).read_bytes())["manifest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
