"""Resolve `init_from` and `--checkpoint` to a weights folder and its configuration.

Tests: tests/checkpointing/test_resume.py, tests/training/test_evaluation.py.
"""

import dataclasses
import os
import re
import shlex
from pathlib import Path

from src.checkpointing.checkpoint_list import list_checkpoints, newest_intact, read_state
from src.checkpointing.model_folder import RUN_CONFIG
from src.config.errors import UsageError, warn
from src.config.paths import REPOSITORY, locate
from src.config.schema import ASK, RunConfig
from src.config.yaml_files import read_yaml
from src.storage import atomic_folder
from src.tasks import OPTIONS


def init_weights(cfg: RunConfig) -> Path | None:
    """Return the folder whose weights a new run begins with, by `init_from`; None: those of its model."""
    return locate_weights(cfg.init_from, "init_from") if cfg.init_from else None


def locate_weights(name: str, field: str) -> Path:
    """Return the intact folder with weights that `name` means: a checkpoint, a final model, or those of a run.

    A run stands for its final model, or for its newest intact checkpoint while it has none."""
    folder = Path(locate(name))
    found = next((f for f in (folder, folder / "final") if (f / "config.json").exists()), None)
    if not name:
        raise UsageError(
            f"{field}: nothing is given: give the folder of a run or a checkpoint, or for other models --model_name_or_path"
        )
    if found is None and (found := newest_intact(folder)) is None:
        damaged = f" with an intact one (of {len(list_checkpoints(folder))})" if list_checkpoints(folder) else ""
        raise UsageError(
            f"{field}: {name} is neither a checkpoint nor a run{damaged}: give the folder of one, or for other models "
            "--model_name_or_path"
        )
    ours = (found / atomic_folder.MANIFEST).exists() or (found / "state.json").exists()
    if ours and (faults := atomic_folder.verify(found)):
        raise UsageError(f"{field}: {found} is damaged: {'; '.join(faults)}")
    return found


def evaluation_args(argv: list[str]) -> tuple[list[str], dict | None, int | None]:
    """Return (flags without --checkpoint, what its configuration says of the evaluation, the step of its weights).

    A checkpoint is data, from anywhere: only its own configuration is read, none of a folder above, and of that only fields
    that declare themselves harmless (`from_checkpoint`). Where eval.json is written follows from the path that was typed."""
    argv, name = list(argv), None
    for i, word in enumerate(argv):
        if word == "--checkpoint" or word.startswith("--checkpoint="):
            _, _, name = word.partition("=")
            del argv[i]
            if not name:
                name = argv.pop(i) if i < len(argv) else ""
            break
    if name is None:
        return argv, None, None
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    if both := given & {"model_name_or_path", "model_config"}:
        raise UsageError(f"checkpoint and {both.pop()} are both given: keep one")
    weights = locate_weights(name, "checkpoint")
    base = _harmless(_config_of(Path(locate(name)), weights, name), given)
    dropped = {"train_file", "validation_file"} if "dataset_name" in given else set()
    dropped |= {"dataset_name", "dataset_config_name"} if given & {"train_file", "validation_file"} else set()
    # Training data is not read where there is validation data; it may be a URL whose credentials were removed.
    dropped |= {"train_file"} if "validation_file" in given | base.keys() else set()
    state = (weights / "state.json").exists()
    step = read_state(weights)["progress"]["step"] if state else atomic_folder.read_metadata(weights).get("step")
    base = {k: v for k, v in base.items() if k not in dropped}
    return argv, base | {"model_name_or_path": str(weights), "output_dir": str(_output_dir(name))}, step


def _config_of(folder: Path, weights: Path, name: str) -> dict:
    """Return the configuration that a run, a checkpoint or a final model holds itself."""
    if folder != weights and (folder / "config.yaml").exists():
        return read_yaml(folder / "config.yaml")
    if (weights / "state.json").exists():
        config = read_state(weights).get("config")
        if not isinstance(config, dict):
            raise UsageError(f"checkpoint: {weights / 'state.json'} holds no configuration: was it saved by train.py?")
        return config
    if (weights / RUN_CONFIG).exists():
        return read_yaml(weights / RUN_CONFIG)
    raise UsageError(
        f"checkpoint: {name} does not hold the configuration of its run ({RUN_CONFIG}): give the folder of the run, or "
        "--model_name_or_path with --validation_file or --dataset_name"
    )


def _harmless(config: dict, given: set[str]) -> dict:
    """Return the values that an evaluation takes from a checkpoint; say which it does not take, and how to give them."""
    task, taken = config.get("task", RunConfig.task), {}
    if not isinstance(task, str) or task not in OPTIONS:
        raise UsageError(f"checkpoint: task: unknown value {task!r}; there is {', '.join(OPTIONS)}")
    for kind, default_rule in ((RunConfig, False), (OPTIONS[task](), ASK)):
        for field in dataclasses.fields(kind):
            value, rule = config.get(field.name), field.metadata["option"].from_checkpoint
            rule = default_rule if rule is None else rule
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if field.name in given or value is None or value == default:
                continue
            if rule is True or (callable(rule) and rule(value)):
                taken[field.name] = value
            elif rule is not False:
                warn(f"{field.name} of the run is not taken from a checkpoint: give --{field.name} {_shown(value)}")
    return taken


def _shown(value) -> str:
    values = value if isinstance(value, list) else [value]
    return " ".join(shlex.quote(str(v).lower() if isinstance(v, bool) else str(v)) for v in values)


def _output_dir(name: str) -> Path:
    """Return the folder of the run by the path that was typed, whatever is in it; the named folder where it is no part of one."""
    here = Path(name) if Path(name).exists() else REPOSITORY / name
    folder = Path(os.path.abspath(here))
    if folder.name == "final":
        return folder.parent
    inside = folder.parent.name == "checkpoints" and re.fullmatch(r"step_\d+", folder.name)
    return folder.parent.parent if inside else folder
