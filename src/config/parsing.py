"""Flags and YAML become a RunConfig and the task's options, and back into YAML.

Tests: tests/config/test_config.py. Precedence: defaults < YAML < flags.
"""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import yaml

from src.config import mixture_fields
from src.config.errors import UsageError, did_you_mean
from src.config.paths import locate
from src.config.redact import learn, redact_all
from src.config.schema import NAMES_ELSEWHERE, RunConfig
from src.config.validation import Fault, list_errors
from src.config.yaml_files import read_yaml

SAMPLE = "configs/stdlib_lm.yaml"
MAY_BE_EMPTY = ("sample_prompt",)  # no sample, also where the run file has a prompt
WHAT = {"config", "task", "model_name_or_path", "model_config", "init_from"}
WHAT |= {"dataset_name", "train_file", "validation_file", "mixture"}


def given(argv: list[str]) -> set[str]:
    """Return the names of the flags of a command line."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}


def or_sample(argv: list[str]) -> list[str]:
    """Return `argv` with the run file of the sample, if it names no run file, model or data."""
    names = given(argv)
    if names & (WHAT | {"help"}) or "-h" in argv or not all(word.startswith("--") for word in argv[:1]):
        return argv
    if os.environ.get("RANK", "0") == "0":
        print(f"No run file, model or data is given: training {SAMPLE}", flush=True)
    return ["--config", SAMPLE, *argv]


def parse(argv: list[str], tasks: dict, base: dict | None = None, also: dict[str, str] | None = None):
    """Return (run, options) from flags and the YAML file that `--config` names; `base` holds values below both.

    `tasks` maps the name of each task to its dataclass of options (src/tasks/__init__.py). `also` names flags that the
    caller has taken out of `argv`, with their help.

    Raises UsageError with every unknown name, wrong type, range error and contradiction at once.
    """
    from transformers import HfArgumentParser

    faults, items = [], []
    flags, path = flags_of(argv, faults)
    items += [("", name, value) for name, value in (base or {}).items() if value is not None]
    if path:
        learn(values := read_yaml(path))
        items += [(f"{path}: ", name, value) for name, value in values.items() if value is not None]
    items += [("--", name, value) for name, value in flags]
    task = str(next((_last(v) for _, name, v in reversed(items) if name == "task"), RunConfig.task))
    if task not in tasks:
        raise UsageError(f"task: unknown value {task!r}{did_you_mean(task, tasks)}; there is {', '.join(tasks)}")
    options = tasks[task]()

    class Parser(HfArgumentParser):
        def error(self, message):
            message = re.sub(r"^argument \S+: ", "", message)
            message = re.sub(r"^invalid int value: (.*)", r"\1 is no whole number", message)
            message = re.sub(r"^invalid float value: (.*)", r"\1 is no number", message)
            message = re.sub(r"^invalid (?=\w+ value)", "", message)
            message = re.sub(r"^json_object value: ", "expected a JSON object, found ", message)
            message = re.sub(
                r"^Truthy value expected: got (.*?) but expected .*", r"expected true or false, found \1", message
            )
            raise ValueError(re.sub(r"^unrecognized arguments: ", "expected one value, found also ", message))

    parser = Parser([RunConfig, options], prog=Path(sys.argv[0]).name, allow_abbrev=False, description=_DESCRIPTION)
    for name, text in {"config": "YAML file with these fields; flags win over it", **(also or {})}.items():
        parser.add_argument(f"--{name}", help=text)
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        sys.exit(0)
    fields = {f.name: f.metadata["help"] for kind in (RunConfig, options) for f in dataclasses.fields(kind)}
    others = {f.name: other for other in tasks if other != task for f in dataclasses.fields(tasks[other]())}
    good = []
    for source, name, value in items:
        negated = name.removeprefix("no_") if name.startswith("no_") else None
        if name not in fields and negated not in fields:
            hint = (
                f"it belongs to task {others[name]}, this is {task}"
                if name in others
                else f"unknown field; {NAMES_ELSEWHERE[name]}"
                if name in NAMES_ELSEWHERE
                else f"unknown field{did_you_mean(name, [*fields, *(also or {})])}"
            )
            faults.append(f"{source}{name}: {hint}")
            continue
        try:
            argument = _argument(name, value)
            if _last(value) == "" and name not in MAY_BE_EMPTY:
                raise ValueError("nothing is given: leave it out, or give a value")
            parser.parse_args(argument)
            good += argument
        except (ValueError, TypeError) as error:
            faults.append(f"{source}{name}: {error} ({fields[name] if name in fields else fields[negated]})")
    if faults:
        raise UsageError(list_errors(faults))
    cfg, chosen = parser.parse_args_into_dataclasses(good, look_for_args_file=False)[:2]
    stem = Path(path).stem if path and not base else cfg.task
    cfg.output_dir = cfg.output_dir or f"runs/{stem}"
    return cfg, chosen


_DESCRIPTION = (
    "Precedence: defaults < the YAML of --config < flags. Docs: README.md. The task's options follow the run's. "
    "Without a run file, model or data, train.py trains configs/stdlib_lm.yaml, and eval.py evaluates the newest run."
)


def flags_of(argv: list[str], faults: list[Fault]) -> tuple[list[tuple[str, list[str]]], str | None]:
    """Split a command line into (name, values) pairs and the path that --config names."""
    flags, path, stray = [], None, []
    for token in argv:
        if re.match(r"--[A-Za-z]", token):
            name, equals, value = token[2:].partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(token)
        elif token != "-h":
            stray.append(token)
    for _, values in [item for item in flags if item[0] == "config"]:
        if path is not None or len(values) != 1:
            raise UsageError(
                "--config: give it once, with one YAML file (make gives it: say make train CONFIG=FILE there)"
            )
        path = values[0]
    if stray:
        faults.append(f"{stray[0]!r}: a flag was expected, --NAME VALUE{_meant(stray)}")
    return [item for item in flags if item[0] not in ("config", "help")], path


def _meant(words: list[str]) -> str:
    """Return '; did you mean X?' for words where a flag was expected, or nothing."""
    if words[0].endswith((".yaml", ".yml", ".json")):
        return f"; did you mean --config {words[0]}?"
    name, value = re.match(r"[-\u2013\u2014]*(\w*)=?(.*)", words[0]).groups()  # -name, a typesetter's dash, name=value
    near = did_you_mean(name, ["config", *RunConfig.__dataclass_fields__])
    flag = near.rstrip("?").replace("mean ", "mean --")
    return " ".join(filter(None, [flag, value, *words[1:]])) + "?" if near else ""


def _last(value):
    return value[-1] if isinstance(value, list) and value else value


def _argument(name: str, value) -> list[str]:
    """Return the command-line words of one field."""
    if isinstance(value, dict):
        return [f"--{name}={json.dumps(value, default=str)}"]
    values = [_word(v) for v in (value if isinstance(value, list) else [value])]
    if len(values) > 1 and (flag := next((v for v in values if re.match(r"-\D", v)), None)):
        raise ValueError(f"{flag!r} would be read as a flag: write ./{flag} if it is a file")
    return [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]


def _word(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def to_yaml(cfg: RunConfig, options) -> str:
    """Return the resolved configuration, without credentials, as YAML that is itself a valid --config."""
    values = dataclasses.asdict(cfg) | dataclasses.asdict(options)
    values.pop("dry_run")
    for name in ("model_name_or_path", "model_config", "tokenizer_name", "dataset_name", "init_from"):
        values[name] = values[name] and locate(values[name])
    for name in ("train_file", "validation_file"):
        values[name] = [locate(file) for file in values[name]]
    values["mixture"] = mixture_fields.with_absolute_paths(cfg.mixture)
    values = {name: redact_all(value) for name, value in values.items() if value != []}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
