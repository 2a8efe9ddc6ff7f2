"""Run identity: everything that decides a run's numbers; refuses to resume another run, with a list of what differs.

Tests: tests/checkpointing/test_run_identity.py.
"""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from src.checkpointing.checkpoint_list import read_state
from src.config.addons import config_type, follows_evaluations, missing_addon
from src.config.errors import UsageError
from src.config.parsing import to_yaml
from src.config.paths import read_yaml
from src.config.schema import RunConfig, changeable_fields
from src.models.load_config import pretrained_source
from src.storage import atomic_folder
from src.training.schedules import make_schedule, total_steps

if TYPE_CHECKING:
    from accelerate import Accelerator

SAVED_BY = ("transformers_version", "_name_or_path")  # in config.json: about the program that wrote it, not the model
DATA = ("examples", "rows", "sample", "labels", "tokenizer_files")
SILENT = ("output_dir", "resume", "dry_run", "smoke")


def identity(accelerator: "Accelerator", cfg: RunConfig, splits: dict) -> dict:
    """Return a run's identity besides its fields: contents of data and model, precision, number of processes."""
    return {
        "data": data_identity(splits["train"].stats),
        "validation": data_identity(splits["validation"].stats) if "validation" in splits else {},
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


def check_same_run(checkpoint: Path, cfg: RunConfig, options, current: dict) -> list[str]:
    """Return the harmless changes since the checkpoint. Raise UsageError if a change would alter the result.

    `current` is the identity of this run. A changed field is refused unless it is declared may_change_on_resume."""
    state = read_state(checkpoint)
    if missing := [addon for name, value in state["config"].items() if value and (addon := missing_addon(name))]:
        raise UsageError(
            f"resume: {checkpoint} was trained with the add-on {missing[0]}, which is not here: restore it"
        )
    # The fields of an add-on that only one of the two runs names count, too.
    names = [*(name for name, value in state["config"].items() if value is not None), *vars(cfg)]
    schemas = config_type(names), type(options)
    was = _values(state["config"], state["identity"], schemas)
    now = _values(yaml.safe_load(to_yaml(cfg, options)), current, schemas)
    changed = [name for name in was | now if was.get(name) != now.get(name) and name not in SILENT]
    may_change = _may_change(cfg, schemas, was, now)
    if "data.rows" not in changed and _has_same_rates(cfg, state, current["data"]["examples"]):
        may_change |= {"max_steps", "num_train_epochs"}
    diff = {name: f"{name}: {str(was.get(name))[:200]} → {str(now.get(name))[:200]}" for name in changed}
    if refused := [text for name, text in diff.items() if name not in may_change]:
        raise UsageError(
            f"{checkpoint.parent.parent} holds another run ({'; '.join(refused)}): to resume it, give the old values; to "
            "train a new run, give another --output_dir (and --init_from to begin with its weights); to start over in this "
            "folder, give --resume never once, which renames the outputs of the old run and deletes nothing"
        )
    return [f"changed since {checkpoint.name}: {text}" for name, text in diff.items() if now.get(name) != "auto"]


def _values(config: dict, content: dict, schemas: tuple[type, type]) -> dict:
    """Return all that a checkpoint records about its run as {name: value}; a field that it lacks had its default."""
    defaults = dataclasses.asdict(schemas[0]()) | dataclasses.asdict(schemas[1]())
    values = {name: config.get(name, default) for name, default in defaults.items()}
    values["parameter_groups"] = str(
        values["parameter_groups"]
    )  # with its order: the first pattern that matches decides
    for addon in schemas[0].addons:
        values = addon.identity(values) if hasattr(addon, "identity") else values
    for part in ("data", "validation", "model"):
        values |= {f"{part}.{name}": value for name, value in content[part].items()}
    return values | {name: content[name] for name in ("model_commit", "mixed_precision", "processes")}


def _may_change(cfg: RunConfig, schemas: tuple[type, type], was: dict, now: dict) -> set[str]:
    """Return the names that may differ: the result does not depend on them, or on what one of the runs lacks."""
    names = changeable_fields(*schemas) - {"max_steps", "num_train_epochs"} | {"model_commit", "processes"}
    for addon in schemas[0].addons:
        names |= addon.may_change() if hasattr(addon, "may_change") else set()
    if follows_evaluations(cfg):
        names -= {"eval_steps", "metric_for_best_model", "greater_is_better"}
    optional = {name for name in was | now if name.startswith(("data.", "validation."))}
    names |= {name for name in optional if was.get(name) is None or now.get(name) is None}
    if now["data.examples"] is not None:  # not a stream, which reads with the tokenizer's files
        names.add("data.tokenizer_files")
    if was["model_commit"] and was["model_commit"] == now["model_commit"]:
        names.add("model_revision")
    has_config = any(name.startswith("model.") for name in was)
    if has_config and all(os.path.isabs(each["model_name_or_path"] or "") for each in (was, now)):
        names.add("model_name_or_path")  # the folder may have been moved
    return names


def _has_same_rates(cfg: RunConfig, state: dict, examples: int) -> bool:
    """Return True if a run of this length would have had the same learning rates in the updates so far."""
    old, progress = state["config"], state["progress"]
    before = dataclasses.replace(cfg, max_steps=old.get("max_steps"), num_train_epochs=old["num_train_epochs"])
    old_length, new_length = total_steps(before, examples), total_steps(cfg, examples)
    if old_length == new_length:
        return True
    if follows_evaluations(cfg) and cfg.eval_steps and progress.get("evaluated", 0) % cfg.eval_steps:
        return False  # it has counted the evaluation at the end, which the longer run would not have had
    old_rate, new_rate = make_schedule(before, old_length), make_schedule(cfg, new_length)
    done = progress["updates"]
    sampled = {*range(min(done, 1000)), *range(max(0, done - 1000), done)}  # of a long run, the first and last 1,000
    return all(old_rate(update) == new_rate(update) for update in sampled)
