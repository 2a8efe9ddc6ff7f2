"""Flags and YAML become a run and its task's options, with every fault at once; and back into YAML.

Leave alone (src/fields.py has the fields). Guarded by tests/test_config.py. Precedence: defaults < YAML < flags.
"""

import dataclasses
import json
import math
import os
import re
import sys
from pathlib import Path

import yaml

from src import mixture, push
from src.best import doubts
from src.fields import NAMES_ELSEWHERE, RunConfig, plain_name
from src.inputs import UsageError, locate, nearest, read_yaml, warn
from src.redact import redact_all, was_redacted

Fault = str


def check_run(run: RunConfig, training: bool = True) -> list[Fault]:
    """Return every range error and contradiction between the fields of `run`."""
    faults = []
    positive = [
        "global_batch_size",
        "per_device_batch_size",
        "per_device_batch_tokens",
        "per_device_eval_batch_size",
        "max_steps",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "save_total_limit",
        "save_keep_every",
        "early_stopping_patience",
        "max_skipped_steps",
        "max_failed_saves",
        "drift_check_steps",
        "time_limit",
        "local_sgd_steps",
        "ddp_timeout",
        "max_eval_examples",
        "num_train_epochs",
        "adam_epsilon",
        "dataloader_timeout",
        "stream_lanes",
        "preprocessing_num_workers",
        "pad_to_multiple_of",
    ]
    at_least_zero = [
        "seed",
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "warmup_steps",
        "adam_beta1",
        "adam_beta2",
        "dataloader_num_workers",
    ]
    at_most = {
        "max_steps": 10**12,
        "num_train_epochs": 10**9,
        "seed": 2**63 - 1,
        "ddp_timeout": 10**7,
        "dataloader_num_workers": 256,
        "preprocessing_num_workers": 256,
    }
    numbers = {name: value for name, value in vars(run).items() if value != "auto"}
    for name, value in numbers.items():
        if isinstance(value, float) and not math.isfinite(value):
            faults.append(f"{name} is {value}: give a finite number")
        elif name in positive and value is not None and value <= 0:
            faults.append(f"{name} is {value}: it must be above zero")
        elif name in at_least_zero and value < 0:
            faults.append(f"{name} is {value}: it must not be negative")
        elif name in at_most and value is not None and value > at_most[name]:
            faults.append(f"{name} is {value}: give at most {at_most[name]}")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(run, name) >= 1:
            faults.append(f"{name} is {getattr(run, name)}: it must be below 1")
    if run.warmup_steps > 1 and run.warmup_steps != int(run.warmup_steps):
        faults.append(f"warmup_steps is {run.warmup_steps}: give whole steps, or a fraction below 1")
    if training and numbers.get("per_device_batch_size", 0) > run.global_batch_size > 0:
        faults.append(
            f"per_device_batch_size is {run.per_device_batch_size}: more than global_batch_size, which is "
            f"{run.global_batch_size}; a forward pass cannot hold more than one optimizer step"
        )
    if run.model_name_or_path and run.model_config:
        faults.append(
            "model_name_or_path and model_config are both given: keep the first to fine-tune, the second for random weights"
        )
    if not run.model_name_or_path and not run.model_config:
        faults.append(
            "no model: give --model_name_or_path, or --model_config for random weights (try --config configs/stdlib_lm.yaml)"
        )
    if run.attn_implementation and not plain_name(run.attn_implementation) and not run.trust_remote_code:
        faults.append(
            f"attn_implementation is {run.attn_implementation}, code from the Hub: give --trust_remote_code true if you trust it"
        )
    if run.dataset_name and run.train_file:
        faults.append("dataset_name and train_file are both given: keep one")
    field = "train_file" if training else "validation_file"
    faults += mixture.faults(run) + (push.fault(run) if training else [])
    if run.streaming and training:
        if not run.max_steps:
            faults.append("streaming is true: a stream has no length, so give --max_steps")
        if run.per_device_batch_size == "auto":
            faults.append("per_device_batch_size is auto, but a stream does not know its longest rows: give a number")
        if run.mixture:
            faults.append("mixture and streaming are both given: a mixture needs data with a length")
        if (run.stream_lanes or 0) > run.global_batch_size > 0:
            faults.append(
                f"stream_lanes is {run.stream_lanes}: more than global_batch_size, which is {run.global_batch_size}"
            )
    elif run.stream_lanes and training:
        faults.append("stream_lanes is given without streaming: give both, or neither")
    if not run.dataset_name and not getattr(run, field) and not run.mixture:
        faults.append(f"no data: give --{field} or --dataset_name (try --config configs/stdlib_lm.yaml)")
    if run.dataset_config_name and not run.dataset_name:
        faults.append("dataset_config_name is given without dataset_name: give both, or neither")
    if training and (every := run.local_sgd_steps or 0) > 0:
        faults += [
            f"{name} is {value}, no multiple of local_sgd_steps, which is {every}: between two averages each process has "
            "weights of its own"
            for name in ("save_steps", "eval_steps", "drift_check_steps")
            if (value := getattr(run, name) or 0) % every
        ]
        if run.ddp_comm_hook != "no":
            faults.append("local_sgd_steps and ddp_comm_hook are both given: then no gradient is sent, keep one")
    for name in ("output_dir", "cache_dir"):
        if (folder := getattr(run, name)) and (reason := _unwritable(Path(folder).absolute())):
            faults.append(f"{name}: {folder} cannot be made: {reason}; give another folder")
    return faults


def _unwritable(folder: Path) -> str | None:
    """Return why nothing can be written to `folder`, which need not exist yet, or None."""
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written"


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


def parse(argv: list[str], base: dict | None = None, also: dict[str, str] | None = None):
    """Return (run, options) from flags and the YAML file that `--config` names; `base` holds values below both.

    `also` names flags that the caller has taken out of `argv`, with their help.

    Raises UsageError with every unknown name, wrong type, range error and contradiction at once.
    """
    from transformers import HfArgumentParser

    from src.tasks import OPTIONS

    faults, items = [], []
    flags, path = flags_of(argv, faults)
    items += [("", name, value) for name, value in (base or {}).items() if value is not None]
    if path:
        items += [(f"{path}: ", name, value) for name, value in read_yaml(path).items() if value is not None]
    items += [("--", name, value) for name, value in flags]
    task = str(next((_last(v) for _, name, v in reversed(items) if name == "task"), RunConfig.task))
    if task not in OPTIONS:
        raise UsageError(f"task: unknown value {task!r}{nearest(task, OPTIONS)}; there is {', '.join(OPTIONS)}")
    options = OPTIONS[task]()

    class Parser(HfArgumentParser):
        def error(self, message):
            message = re.sub(r"^argument \S+: ", "", message)
            message = re.sub(r"^invalid int value: (.*)", r"\1 is no whole number", message)
            message = re.sub(r"^invalid float value: (.*)", r"\1 is no number", message)
            message = re.sub(r"^invalid (?=\w+ value)", "", message)
            raise ValueError(re.sub(r"^unrecognized arguments: ", "expected one value, found also ", message))

    parser = Parser([RunConfig, options], prog=Path(sys.argv[0]).name, allow_abbrev=False, description=_DESCRIPTION)
    for name, text in {"config": "YAML file with these fields; flags win over it", **(also or {})}.items():
        parser.add_argument(f"--{name}", help=text)
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        sys.exit(0)
    fields = {f.name: f.metadata["help"] for kind in (RunConfig, options) for f in dataclasses.fields(kind)}
    others = {f.name: other for other in OPTIONS if other != task for f in dataclasses.fields(OPTIONS[other]())}
    good = []
    for source, name, value in items:
        negated = name.removeprefix("no_") if name.startswith("no_") else None
        if name not in fields and negated not in fields:
            hint = (
                f"it belongs to task {others[name]}, this is {task}"
                if name in others
                else f"unknown field; {NAMES_ELSEWHERE[name]}"
                if name in NAMES_ELSEWHERE
                else f"unknown field{nearest(name, fields)}"
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
        raise UsageError(_listed(faults))
    run, chosen = parser.parse_args_into_dataclasses(good, look_for_args_file=False)[:2]
    stem = Path(path).stem if path and not base else run.task
    run.output_dir = run.output_dir or f"runs/{stem}"
    return run, chosen


_DESCRIPTION = (
    "Precedence: defaults < the YAML of --config < flags. Docs: README.md. The task's options follow the run's. "
    "Without a run file, model or data, train.py trains configs/stdlib_lm.yaml, and eval.py evaluates the newest run."
)


def check(run: RunConfig, options, training: bool = True) -> None:
    """Raise UsageError with every fault that the values have by themselves, before anything is read or written."""
    faults = check_run(run, training) + options.check()
    faults += [
        f"{name}: {value}: its credentials were removed when the run was saved: give it again, --{name} …"
        for name, value in (vars(run) | vars(options)).items()
        if was_redacted(value)
    ]
    if faults:
        raise UsageError(_listed(faults))
    for doubt in doubts(run) if training else []:
        warn(doubt)


def _listed(faults: list[Fault]) -> str:
    return faults[0] if len(faults) == 1 else f"{len(faults)} faults:\n" + "\n".join(f"  {fault}" for fault in faults)


def flags_of(argv: list[str], faults: list[Fault]) -> tuple[list[tuple[str, list[str]]], str | None]:
    """Split a command line into (name, values) pairs and the path that --config names."""
    flags, path = [], None
    for token in argv:
        if re.match(r"--[A-Za-z]", token):
            name, equals, value = token[2:].partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(token)
        elif token != "-h":
            run_file = f"; did you mean --config {token}?" if token.endswith((".yaml", ".yml", ".json")) else ""
            faults.append(f"{token!r}: a flag was expected, --NAME VALUE{run_file}")
    for _, values in [item for item in flags if item[0] == "config"]:
        if path is not None or len(values) != 1:
            raise UsageError("--config: give it once, with one YAML file")
        path = values[0]
    return [item for item in flags if item[0] not in ("config", "help")], path


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


def to_yaml(run: RunConfig, options) -> str:
    """Return the resolved configuration, without credentials, as YAML that is itself a valid --config."""
    values = dataclasses.asdict(run) | dataclasses.asdict(options)
    values.pop("dry_run")
    for name in ("model_name_or_path", "model_config", "tokenizer_name", "dataset_name", "init_from"):
        values[name] = values[name] and locate(values[name])
    for name in ("train_file", "validation_file"):
        values[name] = [locate(file) for file in values[name]]
    values["mixture"] = mixture.resolved(run.mixture)
    values = {name: redact_all(value) for name, value in values.items() if value != []}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
