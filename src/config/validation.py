"""Rules between fields, one function each; checks of folders and URLs before a run starts.

src/config/schema.py declares the range of a single field. Each rule here yields one sentence per error, which names the
fields, their values and the fix. Tests: tests/config/test_config.py, tests/config/test_bad_input.py.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.config.addons import follows_evaluations, functions_of_addons
from src.config.best_metric import metric_warnings
from src.config.errors import UsageError, list_errors, warn
from src.config.fields import range_errors
from src.config.mixture_fields import mixture_errors
from src.config.optimizer_class import optimizer_errors
from src.config.redact import was_redacted
from src.config.schema import RunConfig
from src.config.untrusted_values import plain_name

TRY = "(try --config configs/stdlib_lm.yaml)"


def check(cfg: RunConfig, options: Any, training: bool = True) -> None:
    """Raise one UsageError that lists all invalid fields, before any file is read or written."""
    errors = range_errors(cfg) + range_errors(options)
    rules = RULES + (TRAINING_RULES if training else EVALUATION_RULES)
    if training and getattr(options, "needs_model", False):
        rules = [given_model, *rules]
    for rule in rules:
        errors += rule(cfg)
    if hasattr(options, "check"):  # a task's rules between its own fields
        errors += options.check()
    for rule in functions_of_addons(cfg, "errors"):
        errors += rule(cfg, training)
    errors += _redacted_values(vars(cfg) | vars(options))
    if errors:
        raise UsageError(list_errors(errors))
    for text in [*metric_warnings(cfg), *ignored_warmup(cfg)] if training else []:
        warn(text)


# ---- model -----------------------------------------------------------------------------------------------------------


def one_model(cfg: RunConfig) -> Iterator[str]:
    if cfg.model_name_or_path and cfg.model_config:
        yield "model_name_or_path and model_config are both given: keep the first to fine-tune, the second for random weights"


def given_model(cfg: RunConfig) -> Iterator[str]:
    """Yield an error without a model; only for tasks with `Options.needs_model` true."""
    if not cfg.model_name_or_path and not cfg.model_config:
        yield f"no model: give --model_name_or_path, or --model_config for random weights {TRY}"


def trained_model(cfg: RunConfig) -> Iterator[str]:
    if cfg.model_config:
        yield (
            f"model_config is {cfg.model_config}, which means random weights: to evaluate a trained run, give --checkpoint "
            f"{cfg.output_dir} without --config (it has its own config); for other models give --model_name_or_path"
        )
    elif not cfg.model_name_or_path:
        yield "no model: give --checkpoint or --model_name_or_path"


def trusted_attention(cfg: RunConfig) -> Iterator[str]:
    name = cfg.attn_implementation
    if name and not plain_name(name) and not cfg.trust_remote_code:
        yield f"attn_implementation is {name}, code from the Hub: give --trust_remote_code true if you trust it"


# ---- data ------------------------------------------------------------------------------------------------------------


def training_data(cfg: RunConfig) -> Iterator[str]:
    if not cfg.dataset_name and not cfg.train_file and not cfg.mixture:
        yield f"no data: give --train_file or --dataset_name {TRY}"


def evaluation_data(cfg: RunConfig) -> Iterator[str]:
    held_out = cfg.train_file and functions_of_addons(cfg, "find_sources")  # training rows are evaluated
    if not cfg.dataset_name and not cfg.validation_file and not cfg.mixture and not held_out:
        yield f"no data: give --validation_file or --dataset_name {TRY}"


def one_source(cfg: RunConfig) -> Iterator[str]:
    if cfg.dataset_name and cfg.train_file:
        yield (
            f"dataset_name ({cfg.dataset_name}) and train_file ({' '.join(cfg.train_file)}) are both given: keep one"
        )


def named_subset(cfg: RunConfig) -> Iterator[str]:
    for name in ("dataset_config_name", "dataset_split"):
        if getattr(cfg, name) and not cfg.dataset_name:
            fix = "give it to a source of the mixture" if cfg.mixture else "give both, or neither"
            yield f"{name} is given without dataset_name: {fix}"


def evaluated_split(cfg: RunConfig) -> Iterator[str]:
    if cfg.dataset_split and not functions_of_addons(cfg, "find_sources"):
        yield (
            f"dataset_split is {cfg.dataset_split}, the split to train on: an evaluation reads the split validation, or "
            "test if there is none: remove dataset_split"
        )


# ---- training --------------------------------------------------------------------------------------------------------


def micro_batch_within_global_batch(cfg: RunConfig) -> Iterator[str]:
    size = cfg.per_device_batch_size
    if size != "auto" and size > cfg.global_batch_size > 0:
        yield (
            f"per_device_batch_size is {size}: more than global_batch_size, which is {cfg.global_batch_size}; a forward pass "
            "cannot hold more than one optimizer step"
        )


def whole_warmup_steps(cfg: RunConfig) -> Iterator[str]:
    if cfg.warmup_start_lr and not cfg.warmup_steps:
        yield f"warmup_start_lr is {cfg.warmup_start_lr}, but there is no warmup: give warmup_steps, or remove it"
    if 1 < cfg.warmup_steps < math.inf and cfg.warmup_steps % 1:
        yield f"warmup_steps is {cfg.warmup_steps}: give whole steps, or a fraction below 1"


def ignored_warmup(cfg: RunConfig) -> Iterator[str]:
    """Yield a warning if the schedule has no warmup; only a warning, so that runs that have begun can resume."""
    if cfg.warmup_steps and not cfg.warmup_start_lr and cfg.lr_scheduler_type == "constant":
        yield f"warmup_steps {cfg.warmup_steps:g} is ignored by lr_scheduler_type constant: use constant_with_warmup"


def schedule_needs_evaluations(cfg: RunConfig) -> Iterator[str]:
    if follows_evaluations(cfg) and not cfg.eval_steps:
        yield f"lr_scheduler_type is {cfg.lr_scheduler_type}, which acts after evaluations: give --eval_steps"


def group_fields(cfg: RunConfig) -> Iterator[str]:
    """Yield the errors of `parameter_groups`."""
    for pattern, fields in (cfg.parameter_groups or {}).items():
        if not isinstance(fields, dict) or not fields or fields.keys() - {"lr_factor", "weight_decay"}:
            yield f"parameter_groups: {pattern}: give lr_factor, weight_decay or both as {{NAME: VALUE}}, not {fields!r}"
            continue
        for name, value in fields.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                yield f"parameter_groups: {pattern}: {name} is {value!r}: give a number of 0 or more"


# ---- folders and credentials -----------------------------------------------------------------------------------------


def writable_folders(cfg: RunConfig) -> Iterator[str]:
    for name in ("output_dir", "cache_dir"):
        folder = getattr(cfg, name) or ""
        if "://" in folder:  # otherwise a local folder with this name would be created
            yield f"{name}: {folder} is a URL: give a local folder (or the folder where this storage is mounted)"
        elif folder and (reason := _not_writable(Path(folder).absolute())):
            yield f"{name}: {folder} cannot be created: {reason}; give another folder"


def _not_writable(folder: Path) -> str | None:
    """Return the reason why nothing can be written to `folder`, or None. The folder need not exist yet."""
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"


def _redacted_values(values: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {value}: the query string was not saved with the run: give the full value by --{name}"
        for name, value in values.items()
        if was_redacted(value)
    ]


RULES = [
    trusted_attention,
    one_source,
    named_subset,
    mixture_errors,
    whole_warmup_steps,
    writable_folders,
]
TRAINING_RULES = [
    optimizer_errors,
    group_fields,
    schedule_needs_evaluations,
    one_model,
    training_data,
    micro_batch_within_global_batch,
]
EVALUATION_RULES = [trained_model, evaluation_data, evaluated_split]
