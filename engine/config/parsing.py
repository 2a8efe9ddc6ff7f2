"""Parser of flags and the run file (YAML) into a RunConfig and the task's options; writer of config.yaml.

Precedence: defaults < YAML < flags. Tests: tests/engine/config/test_config.py.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml

from engine.config.addresses import address_of, local_copy, path_of_flag
from engine.config.errors import UsageError, did_you_mean, list_errors, warn
from engine.config.find_addons import addons_declaring, addons_with_fields, missing_addon, run_config
from engine.config.option import Option, declared_options, read_values, value_of_words
from engine.config.paths import locate, read_yaml
from engine.config.redact import redact_all, url_error
from engine.config.run_config import RunConfig, config_class, field_values

SAMPLE = "configs/stdlib_lm.yaml"
CHOOSE_A_RUN = {
    "config",
    "task",
    "model_name_or_path",
    "model_config",
    "init_from",
    "dataset_name",
    "train_file",
    "validation_file",
    "mixture",
}
HUB_DATA = {"dataset_name", "dataset_config_name", "dataset_revision"}
TRAINING_DATA = {  # a flag that names training data -> fields of the run file that it replaces
    "dataset_name": {"train_file", "mixture"},
    "train_file": {"mixture", *HUB_DATA},
    "mixture": {"train_file", *HUB_DATA},
}
_BATCH_SIZES = "give global_batch_size (per optimizer step) and per_device_batch_size (per forward pass)"
_LAUNCH = "set it in the accelerate file: accelerate launch --config_file accelerate_configs/FILE.yaml train.py"
_PRECISION = "set mixed_precision in the accelerate file, or accelerate launch --mixed_precision bf16"
_ANSWERS = "the loss is on answers (messages, prompt and completion); of rows with a text it is on all tokens"
NAMES_ELSEWHERE = {  # names of other trainers -> what to give instead; add-ons have more
    "lr": "give learning_rate",
    "epochs": "give num_train_epochs",
    "model": "give model_name_or_path",
    "dataset": "give dataset_name or train_file",
    "datasets": "give dataset_name, train_file or mixture",
    "eval_strategy": "give eval_steps",
    "evaluation_strategy": "give eval_steps",
    "batch_size": _BATCH_SIZES,
    "train_batch_size": _BATCH_SIZES,
    "per_device_train_batch_size": _BATCH_SIZES,
    "micro_batch_size": "give per_device_batch_size (examples per forward pass)",
    "base_model": "give model_name_or_path",
    "num_epochs": "give num_train_epochs",
    "sample_packing": "give packing",
    "sequence_len": "give max_length (tokens of a row)",
    "max_seq_length": "give max_length (tokens of a row)",
    "max_seq_len": "give max_length (tokens of a row)",
    "cutoff_len": "give max_length (tokens of a row)",
    "max_prompt_length": "give max_length (tokens of prompt and completion)",
    "max_completion_length": "give max_length (tokens of prompt and completion)",
    "template": "give chat_template, or leave the choice to the run (docs/data.md, Which template)",
    "assistant_only_loss": _ANSWERS,
    "completion_only_loss": _ANSWERS,
    "train_on_inputs": _ANSWERS,
    "gradient_accumulation_steps": "it is derived: global_batch_size / per_device_batch_size / processes",
    "optimizer": "give optim",
    "lr_scheduler": "give lr_scheduler_type",
    "warmup_ratio": "give warmup_steps as a fraction below 1",
    "load_best_model_at_end": "give metric_for_best_model: final/ is then the best evaluated checkpoint",
    "resume_from_checkpoint": "give resume",
    "torch_compile": "give compile",
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "fsdp": _LAUNCH,
    "deepspeed": _LAUNCH,
}

Tasks = Mapping[str, Callable[[], type]]  # name of a task -> function that returns its dataclass of options


class Given(NamedTuple):
    """A value that the user gave for a field, and the source of this value."""

    source: str  # stands before the name in errors: "" (a checkpoint), "FILE: " (YAML) or "--" (a flag)
    value: Any  # from YAML, or the list of words after a flag


def flag_names(argv: list[str]) -> list[str]:
    """Return the names of the flags of a command line."""
    return [word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")]


def with_default_config(argv: list[str]) -> list[str]:
    """Add --config with the sample run file if `argv` names no run file, task, model or data."""
    begins_with_flag = not argv or argv[0].startswith("--")
    if not begins_with_flag or CHOOSE_A_RUN.intersection(flag_names(argv)):
        return argv
    if os.environ.get("RANK", "0") == "0":
        print(f"No run file, model or data was given: training with --config {SAMPLE}", flush=True)
    return ["--config", SAMPLE, *argv]


def gives_folder(argv: list[str]) -> bool:
    """Return whether the command line, or its run file, names an output_dir."""
    flags, path = split_flags(argv)
    given = _given_values(flags, path, {})
    return "output_dir" in given and not _is_nothing(given["output_dir"].value)


def parse(argv: list[str], tasks: Tasks, base: dict | None = None) -> tuple[Any, Any]:
    """Parse flags and the run file of --config into (RunConfig, task options); both override the values in `base`.

    Raise one UsageError that lists all unknown names, wrong types and values out of range. engine/config/validation.py
    checks the rules between fields."""
    flags, path = split_flags(argv)
    given = _given_values(flags, path, base or {})
    task = _task(given, tasks)
    options_type = tasks[task]()
    own = declared_options(options_type)
    fields = dict(own)
    for cls in (*addons_declaring(given.keys() - own.keys()), config_class()):
        fields |= declared_options(cls)
    errors = {}
    values: dict[bool, dict[str, Any]] = {True: {}, False: {}}  # of the user, of a checkpoint
    for name, each in given.items():
        if name not in fields:
            errors[name] = _explain_unknown(name, task, tasks, fields)
        elif not (_is_nothing(each.value) and fields[name].default in (None, "", [], {})):
            value = value_of_words(fields[name].type, each.value) if each.source == "--" else each.value
            values[each.source != ""][name] = value
    read: dict[str, Any] = {}
    for is_from_user, part in values.items():
        of_part, wrong = read_values(part, fields, is_from_user)
        read |= of_part
        errors |= {name: missing_addon(name, part[name]) or sentence for name, sentence in wrong.items()}
    if errors:
        raise UsageError(list_errors([f"{given[name].source}{errors[name]}" for name in given if name in errors]))
    for name in flags:
        if get_origin(fields[name].type) is list and flag_names(argv).count(name) > 1:
            warn(
                f"--{name} is given twice, and only the last one counts: give all its values at once: --{name} ONE TWO"
            )
    read.setdefault("output_dir", f"runs/{Path(path).stem if path and not base else task}")
    options = options_type(**{name: read.pop(name) for name in own if name in read})
    cfg = run_config(**read)
    for addon in cfg.addons:
        cfg = run_config(**field_values(cfg) | addon.complete(cfg))
    return _with_local_copies(cfg, cfg), _with_local_copies(options, cfg)


def _with_local_copies(values: Any, cfg: RunConfig) -> Any:
    """Return fields with the local copies of files and folders that they name in a store."""
    copies = {}
    for name, rules in declared_options(type(values)).items():
        value = getattr(values, name)
        if rules.is_path and isinstance(value, str) and "://" in value and name not in ("output_dir", "cache_dir"):
            copies[name] = local_copy(value, name, cfg)
    return dataclasses.replace(values, **copies)


def _is_nothing(value: Any) -> bool:
    """Return whether the words after a flag clear a field, if its default is empty, as null does in YAML."""
    return isinstance(value, list) and [*map(str.lower, map(str, value))] in (["none"], ["null"])


def _given_values(flags: dict[str, list[str]], path: str | None, base: dict) -> dict[str, Given]:
    """Return the last value for each field; null in YAML means the default. Refuse URLs with a password."""
    given = {name: Given("", value) for name, value in base.items()}
    if path:
        given |= {name: Given(f"{path}: ", value) for name, value in read_yaml(path).items()}
    for name, words in flags.items():
        if not _is_nothing(words):
            for replaced in TRAINING_DATA.get(name, ()):
                given.pop(replaced, None)
    given |= {name: Given("--", words) for name, words in flags.items()}
    errors = []
    for name, each in given.items():
        error = url_error(each.value)
        if error:
            errors.append(f"{each.source}{name}: {error}")
    if errors:
        raise UsageError(list_errors(errors))
    return {name: each for name, each in given.items() if each.value is not None}


def _task(given: dict[str, Given], tasks: Tasks) -> str:
    """Return the name of the task."""
    value = given["task"].value if "task" in given else RunConfig.task
    task = str(value[-1] if isinstance(value, list) and value else value)
    if task not in tasks:
        choices = f"task: unknown value {task!r}{did_you_mean(task, tasks)}; choose from {', '.join(tasks)}"
        raise UsageError(missing_addon("task", task) or choices)
    return task


def _explain_unknown(name: str, task: str, tasks: Tasks, names: Iterable[str]) -> str:
    """Return why `name` is no field of this run, and what to give instead."""
    for other in tasks:
        if other != task and name in declared_options(tasks[other]()):
            return f"{name}: it belongs to task {other}, but the task of this run is {task}"
    sentence = missing_addon(name)
    if sentence:
        return sentence
    elsewhere = dict(NAMES_ELSEWHERE)
    names = [*names]
    for addon in addons_with_fields():
        elsewhere |= addon.names_elsewhere()
        names += declared_options(addon)
    fix = f"; {elsewhere[name]}" if name in elsewhere else did_you_mean(name, names)
    return f"{name}: unknown field{fix}"


def split_flags(argv: list[str]) -> tuple[dict[str, list[str]], str | None]:
    """Split a command line into ({name of a flag: words after it}, path of --config or None)."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name == "config" and name in flags:
                raise UsageError("--config: give it once (with make: make train CONFIG=FILE)")
            flags[name] = [value] if equals else []
        elif flags:
            flags[name].append(word)
        else:
            raise UsageError(f"{word!r}: expected a flag: --NAME VALUE, as in --config configs/stdlib_lm.yaml")
    for name, words in list(flags.items()):
        if name.startswith("no_") and not words:
            flags[name.removeprefix("no_")] = ["false"]
            del flags[name]
    paths = flags.pop("config", [""])
    if len(paths) != 1:
        raise UsageError(f"--config: expected one run file, found {' '.join(paths) or 'none'}")
    return flags, path_of_flag(paths[0], "--config") or None


# ---- back to YAML ----------------------------------------------------------------------------------------------------


def to_yaml(cfg: RunConfig, options: Any) -> str:
    """Return config.yaml of a run: all fields as YAML for --config, with absolute paths and without query strings."""
    values = field_values(cfg) | dataclasses.asdict(options)
    del values["dry_run"]
    rules: dict[str, Option] = {}
    for each in (cfg, *cfg.addons, options):
        rules |= declared_options(type(each))
    for source in (values, *(values["mixture"] or {}).values()):
        for name, value in source.items():
            if name in rules and rules[name].is_path is True and value:
                source[name] = [locate(each) for each in value] if isinstance(value, list) else locate(value)
    values = {name: address_of.get(str(value), value) for name, value in values.items() if value != []}
    values = {name: redact_all(value) for name, value in values.items()}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
