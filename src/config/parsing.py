"""Parser of flags and the run file (YAML) into a RunConfig and the task's options; writer of config.yaml.

Precedence: defaults < YAML < flags. Tests: tests/config/test_config.py.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from src.config import mixture_fields
from src.config.addons import (
    addon_names,
    addons_with_fields,
    config_type,
    functions_of_addons,
    missing_addon,
    missing_choice,
)
from src.config.errors import UsageError, did_you_mean, list_errors, nearest
from src.config.fields import OutOfBoundsError, declared_options, field_types, json_schema, read_value, read_words
from src.config.help_text import format_help
from src.config.other_trainers_names import NAMES_ELSEWHERE
from src.config.paths import locate
from src.config.redact import redact_all, url_error
from src.config.run_file_schema import own_schema, run_file_schema, to_json
from src.config.schema import RunConfig
from src.config.yaml_files import read_yaml

SAMPLE = "configs/stdlib_lm.yaml"
CHOOSE_A_RUN = {"config", "task", "model_name_or_path", "model_config", "init_from"}
CHOOSE_A_RUN |= {"dataset_name", "train_file", "validation_file", "mixture"}
NOTHING = (["none"], ["null"])  # words after a flag that clear a field of the run file, as null does in YAML
HUB_DATA = {"dataset_name", "dataset_config_name", "dataset_revision"}
TRAINING_DATA = {  # a flag that names training data -> fields of the run file that it replaces
    "dataset_name": {"train_file", "mixture"},
    "train_file": {"mixture", *HUB_DATA},
    "mixture": {"train_file", *HUB_DATA},
}

Tasks = Mapping[str, Callable[[], type]]  # name of a task -> function that returns its dataclass of options


class Given(NamedTuple):
    """A value that the user gave for a field, and the source of this value."""

    source: str  # stands before the name in errors: "" (a checkpoint), "FILE: " (YAML) or "--" (a flag)
    name: str
    value: Any  # from YAML, or the list of words after a flag


def flag_names(argv: list[str]) -> set[str]:
    """Return the names of the flags of a command line."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}


def with_default_config(argv: list[str]) -> list[str]:
    """Add --config with the sample run file if `argv` names no run file, task, model or data."""
    asks_for_help = "-h" in argv or flag_names(argv) & {"help", "schema"}
    begins_with_flag = not argv or argv[0].startswith("--")
    if asks_for_help or not begins_with_flag or flag_names(argv) & CHOOSE_A_RUN:
        return argv
    if os.environ.get("RANK", "0") == "0":
        print(f"No run file, model or data was given: training with --config {SAMPLE}", flush=True)
    return ["--config", SAMPLE, *argv]


def parse(
    argv: list[str], tasks: Tasks, base: dict | None = None, also: dict[str, str] | None = None
) -> tuple[RunConfig, Any]:
    """Parse flags and the run file of --config into (cfg, task options); both override the values in `base`.

    `also` holds flags that the caller has already removed from `argv`, with their help texts. With --help, print the
    help and exit; with --schema, the JSON schema. Raise one UsageError that lists all unknown names, wrong types and
    values out of range. src/config/validation.py checks the rules between fields."""
    flags, path, errors = split_flags(argv)
    given = [Given("", name, value) for name, value in (base or {}).items()]
    if path:
        given += [Given(f"{path}: ", name, value) for name, value in read_yaml(path).items()]
    given = [one for one in given if one.name not in _replaced_by(flags)]
    given += [Given("--", name, words) for name, words in flags]
    if refused := [f"{one.source}{one.name}: {error}" for one in given if (error := url_error(one.value))]:
        raise UsageError(list_errors(refused))
    given = [one for one in given if one.value is not None]  # null means the default
    task = _task(given, tasks)
    if "-h" in argv or "help" in flag_names(argv):
        print(format_help(task, own_schema(), json_schema(tasks[task]()), also or {}))
        sys.exit(0)
    if "schema" in flag_names(argv):
        print(to_json(run_file_schema(tasks)))
        sys.exit(0)

    options_type = tasks[task]()
    names = {one.name.removeprefix("no_") if one.value == [] else one.name for one in given}
    kinds = (config_type(names - field_types(options_type).keys()), options_type)
    types = field_types(kinds[0]) | field_types(kinds[1])
    values: dict[str, Any] = {}
    out_of_bounds: dict[str, str] = {}
    for one in given:
        source, name, value = _without_negation(one, types)
        if name not in types:
            of_addons = [field for addon in addons_with_fields() for field in field_types(addon.Fields)]
            errors.append(f"{source}{name}: {_explain_unknown(name, task, tasks, [*types, *of_addons, *(also or {})])}")
            continue
        out_of_bounds.pop(name, None)
        if value in NOTHING and type(None) in get_args(types[name]):
            values.pop(name, None)
            continue
        kind = kinds[name not in field_types(kinds[0])]
        try:
            values[name] = read_words(kind, name, value) if source == "--" else read_value(kind, name, value)
        except OutOfBoundsError as error:
            values[name], out_of_bounds[name] = error.value, f"{source}{error}"
        except ValueError as error:
            word = value[-1] if isinstance(value, list) and value else value
            errors.append(f"{source}{missing_choice(name, word) or error}")
    if errors:  # otherwise validation.check reports numbers out of bounds, together with the rules between fields
        raise UsageError(list_errors([*errors, *out_of_bounds.values()]))
    kinds = (
        config_type(values.keys() - field_types(options_type).keys()),
        options_type,
    )  # `--FIELD none` names nothing
    values["output_dir"] = values.get("output_dir") or f"runs/{Path(path).stem if path and not base else task}"
    cfg, options = (kind(**{name: values[name] for name in field_types(kind) if name in values}) for kind in kinds)
    for complete in functions_of_addons(cfg, "complete"):
        cfg = dataclasses.replace(cfg, **complete(cfg))
    return cfg, options


def _replaced_by(flags: list[tuple[str, list[str]]]) -> set[str]:
    """Return the fields of the run file that flags replace because they name other training data."""
    return set().union(*(TRAINING_DATA.get(name, set()) for name, words in flags if words not in NOTHING))


def _task(given: list[Given], tasks: Tasks) -> str:
    """Return the name of the task: the value given last, so a flag overrides YAML."""
    values = [one.value for one in given if one.name == "task"]
    value = values[-1] if values else RunConfig.task
    task = str(value[-1] if isinstance(value, list) and value else value)
    if task not in tasks and (missing := missing_choice("task", task)):
        raise UsageError(missing)
    if task not in tasks:
        raise UsageError(f"task: unknown value {task!r}{did_you_mean(task, tasks)}; choose from {', '.join(tasks)}")
    return task


def _without_negation(given: Given, types: dict[str, Any]) -> Given:
    """Rewrite `--no_NAME` of a bool field to `--NAME false`; return any other value unchanged."""
    name = given.name.removeprefix("no_")
    if given.value == [] and name != given.name and types.get(name) in (bool, bool | None):
        return given._replace(name=name, value=["false"])
    return given


def _explain_unknown(name: str, task: str, tasks: Tasks, known: list[str]) -> str:
    for other in tasks:
        if other != task and name in field_types(tasks[other]()):
            return f"it belongs to task {other}, but the task of this run is {task}{did_you_mean(name, known)}"
    if addon := missing_addon(name):
        return f"a field of the add-on {addon}, which is not here: restore it, or remove the field"
    if name in NAMES_ELSEWHERE:
        return f"unknown field; {NAMES_ELSEWHERE[name]}"
    if name in addon_names("techniques"):
        return f"unknown field; give techniques: {{{name}: {{OPTION: VALUE, …}}}}"
    return f"unknown field{did_you_mean(name, known)}"


# ---- the command line ------------------------------------------------------------------------------------------------


def split_flags(argv: list[str]) -> tuple[list[tuple[str, list[str]]], str | None, list[str]]:
    """Split a command line into (flags with the words after each, path of --config or None, errors)."""
    flags, paths, stray = [], [], []
    for word in argv:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        elif word != "-h":
            stray.append(word)
    paths = [words for name, words in flags if name == "config"]
    if len(paths) > 1 or (paths and len(paths[0]) != 1):
        raise UsageError("--config: give it once, with one run file (in YAML; with make: make train CONFIG=FILE)")
    errors = [f"{stray[0]!r}: expected a flag, --NAME VALUE{_suggest_flag(stray)}"] if stray else []
    flags = [(name, words) for name, words in flags if name not in ("config", "help")]
    return flags, paths[0][0] if paths else None, errors


def _suggest_flag(words: list[str]) -> str:
    """Return '; did you mean --NAME …?' for words that stand in place of a flag, or an empty string."""
    if words[0].endswith((".yaml", ".yml", ".json")):
        return f"; did you mean --config {words[0]}?"
    name, _, value = words[0].lstrip("-\u2013\u2014").partition("=")  # -name, a long dash, name=value
    flag = nearest(name, ["config", *declared_options(RunConfig)])
    if not flag:
        return ""
    return f"; did you mean {' '.join(word for word in [f'--{flag}', value, *words[1:]] if word)}?"


# ---- back to YAML ----------------------------------------------------------------------------------------------------


def to_yaml(cfg: RunConfig, options: Any) -> str:
    """Return config.yaml of a run: all fields as YAML for --config, with absolute paths and without query strings."""
    values = dataclasses.asdict(cfg) | dataclasses.asdict(options)
    del values["dry_run"], values["smoke"]
    rules = declared_options(type(cfg)) | declared_options(type(options))
    for name in [name for name in values if rules[name].is_path and values[name]]:
        value = values[name]
        values[name] = list(map(locate, value)) if isinstance(value, list) else locate(value)
    values["mixture"] = mixture_fields.with_absolute_paths(cfg.mixture)
    values = {name: redact_all(value) for name, value in values.items() if value != []}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
