"""Run identity: everything that decides a run's numbers; refuses to resume another run, or chooses it a new folder.

Tests: tests/engine/checkpointing/test_run_identity.py.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from engine.checkpointing.checkpoint_folder import list_checkpoints, read_state
from engine.config.errors import UsageError
from engine.config.find_addons import addons_declaring, follows_evaluations
from engine.config.option import declared_options
from engine.config.parsing import gives_folder, to_yaml
from engine.config.paths import REPOSITORY, read_yaml
from engine.config.run_config import RunConfig, changeable_fields, config_class, field_values
from engine.models.config_and_tokenizer import config_file, pretrained_source
from engine.process.library_errors import keep_tracebacks_in
from engine.storage import jsonl, run_store, verify_hashes

VERSION = (REPOSITORY / "engine" / "VERSION").read_text().strip()  # in state.json: runs end with their major version
SAVED_BY = ("transformers_version", "_name_or_path")  # in config.json: about the program that wrote it, not the model
DATA = ("examples", "rows", "sample", "labels", "tokenizer_files")  # statistics of a split that identify its contents
SILENT = ("output_dir", "resume", "dry_run")
LENGTH = {"max_steps", "num_train_epochs"}
# schedules.has_same_rates: (earlier configuration, this one, examples, progress in the checkpoint) -> bool
SameRates = Callable[[Any, Any, int, dict], bool]
NAMES_OF_DATA = {"dataset_name", "dataset_config_name", "dataset_revision", "dataset_split", "train_file", "mixture"}


def identity(precision: str, processes: int, cfg: RunConfig, splits: dict) -> dict[str, Any]:
    """Return what decides a run's numbers besides its fields: contents of data and model, precision, processes."""
    values = {"mixed_precision": precision, "processes": processes}
    for part, split in (("data", "train"), ("validation", "validation")):
        stats = splits[split].stats if split in splits else {}
        values |= {f"{part}.{name}": stats[name] for name in DATA if name in stats}
    return values | {f"model.{name}": value for name, value in _model_contents(cfg).items()}


def _model_contents(cfg: RunConfig) -> dict[str, Any]:
    """Return the values of the model's configuration; if pretrained, also its commit and hashes of its remote code."""
    if cfg.model_config:
        return read_yaml(cfg.model_config)
    if not cfg.model_name_or_path:
        return {}
    folder, commit = pretrained_source(cfg)
    values = read_yaml(config_file(folder)) if config_file(folder).exists() else {}
    values = {name: value for name, value in values.items() if name not in SAVED_BY}
    if cfg.trust_remote_code:
        for path in sorted(folder.glob("*.py")):
            values[path.name] = verify_hashes.hash_file(path)["xxh3_128"]
    return values | {"commit": commit}


def check_same_run(
    checkpoint: Path, cfg: RunConfig, options: Any, current: dict[str, Any], has_same_rates: SameRates
) -> list[str]:
    """Return the harmless changes since the checkpoint. Raise UsageError if a change would alter the result.

    `current` is the identity of this run; `has_same_rates` decides whether its length may change. A changed field is
    refused unless it is declared may_change_on_resume."""
    refused, allowed = changes_since(read_state(checkpoint), cfg, options, current, has_same_rates)
    if "engine" in refused:
        raise UsageError(
            f"{checkpoint} is of another version ({refused['engine']}): resume the run with that version, or begin a new one "
            f"with its weights: --init_from {checkpoint} and another --output_dir"
        )
    if refused:
        raise UsageError(
            f"{checkpoint.parent.parent} holds another run ({'; '.join(refused.values())}): to resume it, give the old "
            "values; to train a new run, give another --output_dir (and --init_from to begin with its weights); to start "
            "over in this folder, give --resume never once, which renames the outputs of the old run and deletes nothing"
        )
    return [f"changed since {checkpoint.name}: {text}" for text in allowed.values()]


def choose_folder(argv: list[str], cfg: RunConfig, options: Any, has_same_rates: SameRates) -> Any:
    """Return `cfg` with the first of the folders NAME, NAME_2, NAME_3, … that holds no run with other fields.

    The folder is unchanged if `argv` or the run file names it. Only fields are compared; `check_same_run` compares the
    contents of data and model, too."""
    if not gives_folder(argv):
        cfg = _with_free_folder(cfg, options, has_same_rates)
    cfg = run_store.open_run(cfg)
    if not cfg.dry_run:
        keep_tracebacks_in(cfg.output_dir)
    return cfg


def _with_free_folder(cfg: RunConfig, options: Any, has_same_rates: SameRates) -> RunConfig:
    """Return `cfg` with the first folder that holds no run with other fields; say so if it is not the one of `cfg`."""
    if cfg.resume != "auto":
        return cfg
    folder = cfg.output_dir
    changes = first_changes = _changes_of_fields(folder, cfg, options, has_same_rates)
    number = 1
    while changes:
        number += 1
        folder = f"{cfg.output_dir}_{number}"
        changes = _changes_of_fields(folder, cfg, options, has_same_rates)
    if first_changes and os.environ.get("RANK", "0") == "0":
        print(f"{cfg.output_dir} holds another run ({first_changes}): this one is in {folder}", flush=True)
    return dataclasses.replace(cfg, output_dir=folder)


def _changes_of_fields(folder: str, cfg: RunConfig, options: Any, has_same_rates: SameRates) -> str:
    """Return which fields of the run in `folder` make it another run, or an empty text if it is this one, or none."""
    states = [jsonl.read_json(path / "state.json") for path in list_checkpoints(folder)]
    state = next((state for state in reversed(states) if "identity" in state), None)
    if state is None:
        return ""
    refused, allowed = changes_since(state, cfg, options, state["identity"], has_same_rates)
    other_data = {name: text for name, text in allowed.items() if name in NAMES_OF_DATA}
    return "; ".join((refused | other_data).values())


def changes_since(
    state: dict, cfg: RunConfig, options: Any, current: dict, has_same_rates: SameRates
) -> tuple[dict[str, str], dict[str, str]]:
    """Return ({name: NAME: was → is} of changes that alter the result, the same of harmless ones) since a checkpoint."""
    version = state.get("engine", "1.x")  # which did not record it
    if version.split(".")[0] != VERSION.split(".")[0]:  # its fields may have had other meanings
        return {"engine": f"engine: {version} → {VERSION}"}, {}
    # The fields of an add-on that only one of the two runs names count, too.
    names = [name for name, value in state["config"].items() if value is not None]
    schemas = (config_class(), *addons_declaring([*names, *field_values(cfg)]), type(options))
    was = _fields(state["config"], schemas) | state["identity"]
    now = _fields(yaml.safe_load(to_yaml(cfg, options)), schemas) | current
    changed = [name for name in was | now if was.get(name) != now.get(name) and name not in SILENT]
    may_change = _may_change(cfg, schemas, was, now)
    length = {name: state["config"].get(name) for name in LENGTH}
    before = dataclasses.replace(cfg, **length)
    if "data.rows" not in changed and has_same_rates(before, cfg, current["data.examples"], state["progress"]):
        may_change |= LENGTH
    if "data.rows" in changed:
        may_change.discard("training_template")  # the reason of other rows
    diff = {name: f"{name}: {str(was.get(name))[:200]} → {str(now.get(name))[:200]}" for name in changed}
    refused = {name: text for name, text in diff.items() if name not in may_change}
    allowed = {name: text for name, text in diff.items() if name in may_change}
    return refused, allowed


def _fields(config: dict[str, Any], schemas: tuple[type, ...]) -> dict[str, Any]:
    """Return a saved configuration for the comparison; a field that it lacks had its default."""
    values = {name: rules.default for schema in schemas for name, rules in declared_options(schema).items()}
    values |= config
    values["parameter_groups"] = str(values["parameter_groups"])  # in its order: the first pattern that matches decides
    for addon in schemas[1:-1]:
        values = addon.identity(values)
    return values


def _may_change(cfg: RunConfig, schemas: tuple[type, ...], was: dict, now: dict) -> set[str]:
    """Return the names that may differ: the result does not depend on them, or on what one of the runs lacks."""
    names = changeable_fields(*schemas) - LENGTH | {"model.commit", "processes"}
    for addon in schemas[1:-1]:
        names |= addon.may_change()
    if follows_evaluations(cfg):
        names -= {"eval_steps", "metric_for_best_model", "greater_is_better"}
    for name in was | now:
        is_of_data = name.startswith(("data.", "validation."))
        if is_of_data and (was.get(name) is None or now.get(name) is None):
            names.add(name)
    if now["data.examples"] is not None:  # not a stream, which reads with the tokenizer's files
        names.add("data.tokenizer_files")
    if os.path.isabs(was["model_name_or_path"] or "") and os.path.isabs(now["model_name_or_path"] or ""):
        names.add("model_name_or_path")  # the folder may have been moved; its configuration is compared
    return names
