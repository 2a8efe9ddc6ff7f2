"""Resolve `init_from` and `--checkpoint` to a weights folder and its configuration.

Tests: tests/engine/checkpointing/test_resume.py, tests/src/training/test_evaluation.py, tests/engine/config/test_foreign_code.py.
"""

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import Any

from engine.checkpointing.checkpoint_folder import newest_intact, read_state
from engine.checkpointing.model_folder import RUN_CONFIG
from engine.config.addon import Addon, overrides
from engine.config.addresses import path_of_flag
from engine.config.errors import UsageError, warn
from engine.config.find_addons import addons_declaring
from engine.config.option import declared_options, is_from_checkpoint
from engine.config.parsing import flag_names
from engine.config.paths import REPOSITORY, locate, plain_data, read_yaml
from engine.config.run_config import RunConfig, config_class
from engine.find_tasks import OPTIONS
from engine.models.config_and_tokenizer import ADAPTER_CONFIG, config_file, refuse_adapter
from engine.process.run_status import newest_run
from engine.storage import verify_hashes
from engine.storage.git_lfs import refuse_pointers_of_model

# Fields of RunConfig that an evaluation may need, but that a checkpoint must not choose.
ONLY_BY_FLAG = ("trust_remote_code", "cache_dir")
MODEL = ("config.json", verify_hashes.MANIFEST)  # a folder with one of these files holds a model, perhaps a damaged one


def init_weights(cfg: RunConfig, task: Any = None) -> Path | None:
    """Return the weights folder that `init_from` names, or None if it is not set.

    Raise UsageError if its classes are those of `task` in another order; warn if classes or tokens are others."""
    if not cfg.init_from:
        return None
    folder = Path(locate(cfg.init_from))
    # An adapter that another program wrote is neither a model nor a checkpoint.
    is_adapter = (folder / ADAPTER_CONFIG).exists() and not _holds_model(folder)
    takes_adapters = any(overrides(addon, Addon.build) for addon in cfg.addons)
    weights = folder if is_adapter and takes_adapters else locate_weights(cfg.init_from, "init_from")
    _check_classes(weights, getattr(task, "labels", None))
    _check_tokens(weights, getattr(task, "tokenizer", None))
    return weights


def _check_classes(weights: Path, labels: list[str] | None) -> None:
    """Raise UsageError if the model has the classes of the data in another order; warn if it has as many others."""
    file = config_file(weights)
    names = (read_yaml(file).get("id2label") if file.exists() else None) or {}
    of_model = [names[i] for i in sorted(names, key=int)]
    if not labels or len(of_model) != len(labels) or of_model == labels:
        return
    text = f"init_from: {weights} has the classes {', '.join(of_model)}, but the data {', '.join(labels)}: "
    if {*of_model} & {*labels}:
        raise UsageError(f"{text}give the data these classes in this order, as ClassLabels")
    warn(f"{text}the output of each class begins with the weights of the class at its place")


def _check_tokens(weights: Path, tokenizer: Any) -> None:
    """Warn if the model was trained with other tokens than those of `tokenizer`."""
    file = weights / "tokenizer.json"
    if not tokenizer or not file.exists():
        return
    from tokenizers import Tokenizer

    if Tokenizer.from_file(str(file)).get_vocab() != tokenizer.get_vocab():
        warn(
            f"init_from: {weights} was trained with other tokens than those of this run: give --tokenizer_name {weights}"
        )


def locate_weights(name: str, field: str) -> Path:
    """Return the weights folder of `name`, which is a checkpoint, a final model or a run folder.

    In a run folder, use final/, else the newest intact checkpoint. Raise UsageError if the folder is damaged."""
    folder = Path(locate(name))
    if _holds_model(folder):
        weights = folder
    elif _holds_model(folder / "final"):
        weights = folder / "final"
    else:
        weights = newest_intact(folder)
    if weights is None:
        refuse_adapter(f"{field}: {name}", folder)
        raise UsageError(
            f"{field}: {name} is neither a checkpoint nor a run with an intact checkpoint: give the folder of one; for "
            "other models give --model_name_or_path"
        )
    refuse_pointers_of_model(weights, field, weights=True)
    is_ours = (weights / verify_hashes.MANIFEST).exists() or (weights / "state.json").exists()
    errors = verify_hashes.verify(weights) if is_ours else []
    if errors:
        raise UsageError(f"{field}: {weights} is damaged: {'; '.join(errors)}")
    return weights


def _holds_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in MODEL)


def warn_of_precision(cfg: RunConfig, precision: str) -> None:
    """Warn if a checkpoint or final model is evaluated in another mixed precision (`precision`) than it was trained in."""
    trained = verify_hashes.read_metadata(Path(locate(cfg.model_name_or_path or ""))).get("mixed_precision")
    if trained and trained != precision:
        warn(
            f"this model was trained with mixed_precision {trained} and is evaluated with {precision}: the metrics differ "
            f"from those of train.py; launch with mixed_precision {trained} to get the same metrics"
        )


# ---- eval.py --checkpoint --------------------------------------------------------------------------------------------


def evaluation_args(argv: list[str]) -> tuple[list[str], dict | None, int | None]:
    """Return (flags without --checkpoint, values from the checkpoint's configuration, step of its weights).

    Without a flag that names a checkpoint, run file or model, it is the newest run in runs/.
    A checkpoint may come from an untrusted source. Read only its own configuration, not that of a parent folder, and
    take only what `is_from_checkpoint` allows. The typed path alone decides the folder of eval.json."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint")
    parsed, argv = parser.parse_known_args(_or_newest_run(argv))
    if parsed.checkpoint is None:
        return argv, None, None
    given = set(flag_names(argv))
    models = given & {"model_name_or_path", "model_config"}
    if models:
        raise UsageError(f"checkpoint and {models.pop()} are both given: keep one")
    name = path_of_flag(parsed.checkpoint, "--checkpoint")
    weights = locate_weights(name, "checkpoint")
    if (weights / "state.json").exists():
        state = read_state(weights)
        config = state["config"]
        step = state["progress"]["step"]
    elif (weights / RUN_CONFIG).exists():
        config = read_yaml(weights / RUN_CONFIG)
        step = verify_hashes.read_metadata(weights).get("step")
    else:
        raise UsageError(
            f"checkpoint: {weights} does not hold the configuration of its run ({RUN_CONFIG}): give --model_name_or_path with "
            "--validation_file or --dataset_name"
        )
    values = _without_replaced_data(_values_to_take(config, given), given)
    return argv, values | {"model_name_or_path": str(weights), "output_dir": str(_output_dir(name))}, step


def _or_newest_run(argv: list[str]) -> list[str]:
    """Return `argv`; add the newest run in runs/ as --checkpoint if it names no checkpoint, run file or model."""
    if {"checkpoint", "config", "model_name_or_path", "model_config"}.intersection(flag_names(argv)):
        return argv
    if argv and not argv[0].startswith("--"):
        raise UsageError(f"{argv[0]!r}: a flag was expected; did you mean --checkpoint {argv[0]}?")
    newest = newest_run(Path("runs"))
    if newest is None:
        raise UsageError("checkpoint: there is no run in runs/ yet: train one first, or give --checkpoint FOLDER")
    if os.environ.get("RANK", "0") == "0":
        print(f"No checkpoint or model is given: evaluating the newest run, {newest}", flush=True)
    return ["--checkpoint", str(newest), *argv]


def _values_to_take(config: dict, given: set[str]) -> dict:
    """Return the values that an evaluation takes from a checkpoint; name the flag of each other one that it may need."""
    task = config.get("task", RunConfig.task)
    if not isinstance(task, str) or task not in OPTIONS:
        raise UsageError(f"checkpoint: task: unknown value {task!r}; known tasks: {', '.join(OPTIONS)}")
    options = OPTIONS[task]()
    taken = {}
    for cls in (config_class(), *addons_declaring(config), options):
        for name, rules in declared_options(cls).items():
            value = config.get(name)
            if name in given or value is None or value == rules.default:
                continue
            if is_from_checkpoint(rules):
                names_data = rules.is_path or name == "mixture"
                needs_flag = names_data and not plain_data(value)  # of a store that may run code
                if not needs_flag:
                    taken[name] = value
            else:
                needs_flag = name in ONLY_BY_FLAG or (cls is options and rules.from_checkpoint is None)
            if needs_flag:
                warn(f"{name} is not taken from a checkpoint; to use it, give --{name} {_as_flag(value)}")
    return taken


def _as_flag(value) -> str:
    words = []
    for item in value if isinstance(value, list) else [value]:
        words.append(str(item).lower() if isinstance(item, bool) else str(item))
    return shlex.join(words)


def _without_replaced_data(values: dict, given: set[str]) -> dict:
    """Return the values without the data of the run if flags name other data.

    train_file is used only for the rows held out of it: it may be a URL without its credentials."""
    dropped = {"train_file"} if "validation_file" in values else set()
    holding_out = set()  # fields of add-ons that hold rows out
    for addon in addons_declaring({*given, *values}):
        if overrides(addon, Addon.find_sources):
            holding_out |= {*declared_options(addon)}
    if not holding_out & {*given, *values}:
        dropped.add("dataset_split")  # it names training data
    if given & {"dataset_name", "train_file", "validation_file"}:
        dropped = {
            "dataset_name",
            "dataset_config_name",
            "dataset_revision",
            "dataset_split",
            "train_file",
            "validation_file",
        }
        if "train_file" not in given:  # rows are held out of the given training data as in the run
            dropped |= holding_out
    return {name: value for name, value in values.items() if name not in dropped}


def _output_dir(name: str) -> Path:
    """Return the run folder of the typed path, from the path alone; if it is no checkpoint, the folder itself."""
    path = Path(name) if Path(name).exists() else REPOSITORY / name
    folder = Path(os.path.abspath(path))
    if folder.name == "final":
        return folder.parent
    is_checkpoint = folder.parent.name == "checkpoints" and re.fullmatch(r"step_\d+", folder.name)
    return folder.parent.parent if is_checkpoint else folder
