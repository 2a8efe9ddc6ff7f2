"""Run identity: configuration, contents of data and model, precision. Refuses to resume a different run.

Tests: tests/checkpointing/test_run_identity.py.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from src.checkpointing.checkpoint_list import read_state
from src.config.errors import UsageError
from src.config.parsing import to_yaml
from src.config.schema import RunConfig, changeable_fields
from src.config.yaml_files import read_yaml
from src.models.model_files import pretrained_source
from src.storage import atomic_folder
from src.training.schedules import PLATEAU, make_schedule, total_steps
from src.training.technique_options import differences

if TYPE_CHECKING:
    from accelerate import Accelerator

SAVED_BY = ("transformers_version", "_name_or_path")  # in config.json: about the program that wrote it, not the model
DATA = ("examples", "rows", "files", "tokenizer", "sample", "labels", "tokenizer_files")

# ---- what a checkpoint records ---------------------------------------------------------------------------------------


def identity(accelerator: "Accelerator", cfg: RunConfig, splits: dict) -> dict:
    """Return a run's identity besides its fields: contents of data and model, precision, number of processes."""
    return {
        "data": data_identity(splits["train"].stats),
        "validation": data_identity(splits["validation"].stats) if "validation" in splits else None,
        "mixed_precision": accelerator.mixed_precision,
        "processes": accelerator.num_processes,
    } | model_identity(cfg)


def data_identity(stats: dict) -> dict:
    """Return the statistics of a split that identify its contents."""
    return {name: stats[name] for name in DATA if name in stats}


def model_identity(cfg: RunConfig) -> dict:
    """Return the values of the model's configuration; if pretrained, also its commit and hashes of its remote code."""
    if cfg.model_config:
        return {"model": read_yaml(cfg.model_config), "model_commit": None}
    if not cfg.model_name_or_path:
        return {"model": {}, "model_commit": None}
    folder, commit = pretrained_source(cfg)
    values = read_yaml(folder / "config.json") if (folder / "config.json").exists() else {}
    values = {name: value for name, value in values.items() if name not in SAVED_BY}
    code = sorted(folder.glob("*.py")) if cfg.trust_remote_code else []
    hashes = {path.name: atomic_folder.hash_file(path)["xxh3_128"] for path in code}
    return {"model": values | hashes, "model_commit": commit}


# ---- what has changed since ------------------------------------------------------------------------------------------


@dataclass
class Changes:
    """Differences between this run and the run that saved a checkpoint, each as "name: old → new"."""

    refused: list[str] = field(default_factory=list)  # would change the training result
    remarks: list[str] = field(default_factory=list)  # harmless, but reported to the user


def check_same_run(checkpoint: Path, cfg: RunConfig, options, known: dict) -> list[str]:
    """Return remarks on harmless changes since the checkpoint. Raise UsageError if a change would alter the result.

    `known` is the identity of this run. A changed field is refused unless it is declared may_change_on_resume."""
    state, changes = read_state(checkpoint), Changes()
    if missing := known.keys() - state["identity"].keys():
        raise UsageError(
            f"resume: {checkpoint} does not record {', '.join(sorted(missing))}: another version of this code saved it; start "
            f"a new run from its weights with --init_from {checkpoint}"
        )
    _compare_fields(changes, state, yaml.safe_load(to_yaml(cfg, options)), cfg, options, known)
    _compare_contents(changes, state["identity"], known)
    _compare_schedules(changes, cfg, state, known["data"]["examples"])
    if changes.refused:
        raise UsageError(
            f"{checkpoint.parent.parent} holds another run ({'; '.join(changes.refused)}): to train a new run, give another "
            "--output_dir (and --init_from to begin with its weights); to start over in this folder, give --resume never "
            "once, which renames the outputs of the old run and deletes nothing"
        )
    _compare_processes(changes, cfg, state["identity"], known)
    return [f"changed since {checkpoint.name}: {text}" for text in changes.remarks]


def _compare_fields(changes: Changes, state: dict, new: dict, cfg: RunConfig, options, known: dict) -> None:
    old, defaults = state["config"], dataclasses.asdict(RunConfig()) | dataclasses.asdict(type(options)())
    may_change = changeable_fields(type(options)) | _checked_by_content(state, new, known)
    refused, remarks = differences(old.get("techniques"), new.get("techniques"))
    changes.refused += refused
    changes.remarks += remarks
    fixed = _fixed_fields(cfg)
    for name, default in defaults.items():
        before, after = old.get(name, default), new.get(name, default)
        # The first pattern that matches a parameter decides.
        same_order = name != "parameter_groups" or list(before or ()) == list(after or ())
        if (before == after and same_order) or name == "techniques":
            continue
        if name in fixed:
            changes.refused.append(f"{name}: {before} → {after}, which {fixed[name]} depends on")
        elif name not in may_change:
            changes.refused.append(f"{name}: {before} → {after}")
        elif name not in ("output_dir", "resume", "dry_run") and after != "auto":
            changes.remarks.append(f"{name}: {before} → {after}")


def _fixed_fields(cfg: RunConfig) -> dict[str, str]:
    """Return {field: what depends on it} for fields that usually may change, but not in this run."""
    if cfg.lr_scheduler_type != PLATEAU:
        return {}
    return dict.fromkeys(("eval_steps", "metric_for_best_model", "greater_is_better"), PLATEAU)


def _checked_by_content(state: dict, new: dict, known: dict) -> set[str]:
    """Return the fields about the model's location that may differ, because its contents are compared."""
    names = set()
    if known["model_commit"] and known["model_commit"] == state["identity"]["model_commit"]:
        names.add("model_revision")
    folders = [values.get("model_name_or_path") or "" for values in (state["config"], new)]
    if all(os.path.isabs(folder) for folder in folders) and state["identity"]["model"]:
        names.add("model_name_or_path")  # the folder may have been moved
    return names


def _compare_contents(changes: Changes, old: dict, new: dict) -> None:
    """Add the differences of data, model and precision to `changes`."""
    _compare_rows(changes, "training data", old["data"], new["data"])
    _compare_labels_and_tokenizer(changes, old["data"], new["data"])
    if old["validation"] and new["validation"]:
        _compare_rows(changes, "validation data", old["validation"], new["validation"])
    elif old["validation"] or new["validation"]:
        counts = [_count(each["validation"]) if each["validation"] else "none" for each in (old, new)]
        changes.remarks.append(f"validation data: {counts[0]} → {counts[1]}")
    before, after = old["model"], new["model"]
    changes.refused += [
        f"model configuration: {name}: {before.get(name)} → {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    if old["model_commit"] != new["model_commit"]:
        commits = f"commit {old['model_commit']} → {new['model_commit']}"
        changes.remarks.append(f"model_name_or_path: {commits}, with the same config.json")
    if old["mixed_precision"] != new["mixed_precision"]:
        changes.refused.append(
            f"mixed_precision: {old['mixed_precision']} → {new['mixed_precision']}: to resume this run, launch with "
            f"mixed_precision {old['mixed_precision']} in the accelerate file"
        )


def _compare_rows(changes: Changes, kind: str, old: dict, new: dict) -> None:
    if (old["examples"], old["rows"]) == (new["examples"], new["rows"]):
        samples = {stats["sample"] for stats in (old, new) if stats.get("sample")}
        if len(samples) > 1:  # only streams have samples: their rows are not read in advance
            changes.refused.append(f"{kind}: files with the same names and sizes have different contents")
        return
    files = [
        f"{name}: {old['files'].get(name, 'absent')} → {new['files'].get(name, 'absent')} bytes"
        for name in sorted(old["files"].keys() | new["files"].keys())
        if old["files"].get(name) != new["files"].get(name)
    ]
    if files:
        reason = ", ".join(files[:5])
    elif old["tokenizer"] == new["tokenizer"]:
        reason = "same file sizes, different contents"
    else:
        reason = "different tokenizer or preprocessing options"
    changes.refused.append(f"{kind}: {_count(old)} → {_count(new)} ({reason})")


def _count(stats: dict) -> str:
    return "a stream" if stats["examples"] is None else f"{stats['examples']} rows"


def _compare_labels_and_tokenizer(changes: Changes, old: dict, new: dict) -> None:
    before, after = old.get("labels"), new.get("labels")
    if before and after and before != after:
        changes.refused.append(f"labels: {_first_ten(before)} → {_first_ten(after)}")
    before, after = old.get("tokenizer_files"), new.get("tokenizer_files")
    if before and after and before != after and new["examples"] is None:
        changes.refused.append(
            "tokenizer: its special tokens or chat template have changed, and a stream reads with them"
        )
    elif before and after and before != after:
        changes.remarks.append("tokenizer: its files or the chat template have changed, but they produce the same rows")


def _first_ten(labels: list[str]) -> str:
    more = f" and {len(labels) - 10} more" if len(labels) > 10 else ""
    return ", ".join(labels[:10]) + more


def _compare_schedules(changes: Changes, cfg: RunConfig, state: dict, examples: int) -> None:
    """Refuse a new run length that would have changed the learning rates of the updates so far."""
    old = state["config"]
    before = dataclasses.replace(cfg, max_steps=old.get("max_steps"), num_train_epochs=old["num_train_epochs"])
    old_length, new_length = total_steps(before, examples), total_steps(cfg, examples)
    if old_length == new_length:
        return
    evaluated = state["progress"].get("evaluated", 0)
    if cfg.lr_scheduler_type == PLATEAU and cfg.eval_steps and evaluated % cfg.eval_steps:
        changes.refused.append(
            f"length: {old_length} → {new_length} steps: {PLATEAU} has counted the evaluation at the end, step {evaluated}, "
            f"which is not a multiple of eval_steps ({cfg.eval_steps}): the longer run would not have had it"
        )
    old_rate, new_rate = make_schedule(before, old_length), make_schedule(cfg, new_length)
    done = state["progress"]["updates"]
    sampled = {*range(min(done, 1000)), *range(max(0, done - 1000), done)}  # of a long run, the first and last 1,000
    if any(old_rate(update) != new_rate(update) for update in sampled):
        changes.refused.append(
            f"length: {old_length} → {new_length} steps: with it, {cfg.lr_scheduler_type} would have had other "
            f"learning rates in the {done} updates so far (constant, constant_with_warmup, inverse_sqrt can be extended)"
        )


def _compare_processes(changes: Changes, cfg: RunConfig, old: dict, new: dict) -> None:
    if old["processes"] == new["processes"]:
        return
    more = ": with ddp_comm_hook the training result depends on it" if cfg.ddp_comm_hook != "no" else ""
    changes.remarks.append(f"number of processes: {old['processes']} → {new['processes']}{more}")
