"""Rules between fields; checks of folders and URLs before a run starts.

engine/config/run_config.py declares the range of a single field. Each error here is one sentence, which names the fields, their
values and the fix. Tests: tests/engine/config/test_config.py, tests/engine/config/test_bad_input.py.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config.addon import Addon, overrides
from engine.config.errors import UsageError, list_errors, warn
from engine.config.find_addons import follows_evaluations
from engine.config.optimizer_class import optimizer_errors
from engine.config.paths import is_plain_name
from engine.config.redact import was_redacted
from engine.config.run_config import RunConfig, best_by, field_values

HUB_FIELDS = ("dataset_config_name", "dataset_revision", "dataset_split")  # only with dataset_name
TRY = "(try --config configs/stdlib_lm.yaml)"
# Words of the names of metrics.
LOWER_IS_BETTER = """
    loss losses error errors nll entropy perplexity ppl bits bpb bpc wer cer ter mer wil eer
    mse rmse mae mape smape mase brier distance divergence deviation ece fid
"""


def check(cfg: RunConfig, options: Any, training: bool = True) -> None:
    """Raise one UsageError that lists all violated rules, before any file is read or written."""
    errors = [*common_errors(cfg), *mixture_errors(cfg.mixture, cfg.validation_file)]
    errors += training_errors(cfg, options) if training else evaluation_errors(cfg)
    if hasattr(options, "check"):  # a task's rules between its own fields
        errors += options.check()
    for addon in cfg.addons:
        errors += addon.errors(cfg, training)
    for name, value in (field_values(cfg) | vars(options)).items():
        if was_redacted(value):
            errors.append(
                f"{name}: {value}: the query string was not saved with the run: give the full value by --{name}"
            )
    if errors:
        raise UsageError(list_errors(errors))
    if training:
        for text in ignored_requests(cfg):
            warn(text)


# ---- errors ----------------------------------------------------------------------------------------------------------


def common_errors(cfg: RunConfig) -> Iterator[str]:
    """Yield the errors of a training or an evaluation: sources of data, attention, schedule, folders."""
    name = cfg.attn_implementation
    if name and not is_plain_name(name) and not cfg.trust_remote_code:
        yield f"attn_implementation is {name}, code from the Hub: give --trust_remote_code true if you trust it"
    given = [name for name in ("mixture", "dataset_name", "train_file") if getattr(cfg, name)]
    if len(given) > 1:
        yield f"{given[0]} and {given[1]} are both given: keep one"
    for name in HUB_FIELDS:
        if getattr(cfg, name) and not cfg.dataset_name:
            fix = "give it to a source of the mixture" if cfg.mixture else "give both, or neither"
            yield f"{name} is given without dataset_name: {fix}"
    if cfg.warmup_start_lr and not cfg.warmup_steps:
        yield f"warmup_start_lr is {cfg.warmup_start_lr}, but there is no warmup: give warmup_steps, or remove it"
    if cfg.warmup_steps > 1 and cfg.warmup_steps % 1:
        yield f"warmup_steps is {cfg.warmup_steps}: give whole steps, or a fraction below 1"
    if follows_evaluations(cfg) and not cfg.eval_steps:
        yield f"lr_scheduler_type is {cfg.lr_scheduler_type}, which acts after evaluations: give --eval_steps"
    for name in ("output_dir", "cache_dir"):
        folder = getattr(cfg, name) or ""
        path = Path(folder).absolute()
        parent = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if "://" in folder:  # otherwise a local folder with this name would be created
            yield f"{name}: {folder} is a URL: give a local folder (or the folder where this storage is mounted)"
        elif name == "cache_dir" and path.is_dir():
            continue  # if it is complete, it may be read-only
        elif folder and not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            yield f"{name}: {folder} cannot be created: {parent} is not a writable folder"


def mixture_errors(mixture: dict | None, validation_file: list[str]) -> Iterator[str]:
    """Yield the errors of the names, weights and data of a mixture's sources."""
    if mixture is None:
        return
    if len(mixture) < 2:
        yield "mixture: give at least two sources, each as NAME: {train_file: …, weight: …}"
    if len({"weight" in source for source in mixture.values()}) > 1:
        yield "mixture: give all sources a weight, or none (then the size of a source is its weight)"
    for name, source in mixture.items():
        if not name or "/" in name:  # metrics are called NAME/loss
            yield f"mixture: {name!r}: source names must be non-empty, without '/'"
        if bool(source.get("train_file")) == bool(source.get("dataset_name")):
            yield f"mixture: {name}: give either train_file or dataset_name"
        if validation_file and source.get("validation_file"):
            yield (
                f"validation_file is {', '.join(validation_file)}, and mixture: {name} has one of its own: keep one "
                "(--validation_file none removes that of the run file)"
            )
        for field in HUB_FIELDS:
            if field in source and "dataset_name" not in source:
                yield f"mixture: {name}: {field} is given without dataset_name: give both, or neither"


def training_errors(cfg: RunConfig, options: Any) -> Iterator[str]:
    """Yield the errors of a training: model, data, micro-batch, profile, best metric, optimizer."""
    if cfg.model_name_or_path and cfg.model_config:
        yield "model_name_or_path and model_config are both given: keep the first to fine-tune, the second for random weights"
    if getattr(options, "needs_model", False) and not cfg.model_name_or_path and not cfg.model_config:
        yield f"no model: give --model_name_or_path, or --model_config for random weights {TRY}"
    if not cfg.dataset_name and not cfg.train_file and not cfg.mixture:
        yield f"no data: give --train_file or --dataset_name {TRY}"
    size = cfg.per_device_batch_size
    if size > cfg.global_batch_size:
        yield f"per_device_batch_size is {size}: give at most global_batch_size, which is {cfg.global_batch_size}"
    steps = cfg.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        yield f"profile_steps is {steps}: give the first and the last step, as [10, 13]"
    name, greater = best_by(cfg)
    if cfg.greater_is_better is None and greater and sounds_lower_is_better(name):
        yield (
            f"metric_for_best_model is {name}, and the GREATEST would be the best: give greater_is_better false, or true if "
            "that is right (only a name that ends in loss means that lower is better)"
        )
    yield from optimizer_errors(cfg)


def sounds_lower_is_better(name: str) -> bool:
    """Return whether a word in the name of a metric says that a lower value is better (of SOURCE/NAME: in NAME)."""
    known_words = LOWER_IS_BETTER.split()
    words = re.split(r"[^a-z]+", name.split("/")[-1].lower())
    return any(word in known_words or word.endswith("error") for word in words)


def evaluation_errors(cfg: RunConfig) -> Iterator[str]:
    """Yield the errors of an evaluation: a trained model, and data to evaluate it on."""
    if cfg.model_config:
        fix = f"give --checkpoint {cfg.output_dir} without --config, or --model_name_or_path"
        yield f"model_config is {cfg.model_config}, which means random weights: to evaluate a trained run, {fix}"
    elif not cfg.model_name_or_path:
        yield "no model: give --checkpoint or --model_name_or_path"
    # True: rows of the training data are evaluated.
    uses_training_data = any(overrides(addon, Addon.find_sources) for addon in cfg.addons)
    has_data = cfg.dataset_name or cfg.validation_file or cfg.mixture
    if not has_data and not (cfg.train_file and uses_training_data):
        yield f"no data: give --validation_file or --dataset_name {TRY}"
    if cfg.dataset_split and not uses_training_data:
        yield f"dataset_split is {cfg.dataset_split}, the split to train on: remove it, to evaluate the split validation"


# ---- warnings --------------------------------------------------------------------------------------------------------


def ignored_requests(cfg: RunConfig) -> Iterator[str]:
    """Yield a warning for each field without effect, and for early stopping that does not keep the best model."""
    if cfg.warmup_steps and not cfg.warmup_start_lr and cfg.lr_scheduler_type == "constant":
        yield f"warmup_steps {cfg.warmup_steps:g} is ignored by lr_scheduler_type constant: use constant_with_warmup"
    if cfg.model_revision != RunConfig.model_revision and not cfg.model_name_or_path:
        yield f"model_revision {cfg.model_revision} is ignored: it is that of model_name_or_path, which is not given"
    if cfg.ddp_comm_hook != "no" and os.environ.get("WORLD_SIZE", "1") == "1":
        yield f"ddp_comm_hook {cfg.ddp_comm_hook} is ignored on one process"
    for name in ("sync_each_batch", "ddp_find_unused_parameters"):
        if cfg.exact_sums and getattr(cfg, name):
            yield f"{name} is ignored with exact_sums, which takes the place of DDP"
    if cfg.early_stopping_patience and not cfg.eval_steps:
        yield "early_stopping_patience has no effect: without eval_steps the only evaluation is at the end"
    elif cfg.early_stopping_patience and not cfg.metric_for_best_model:
        yield (
            "early_stopping_patience without metric_for_best_model ends the run by its loss, and final/ is the last step, not "
            "the best one: give --metric_for_best_model loss to keep the best one"
        )
    of_hub = [name for name, source in (cfg.mixture or {}).items() if source.get("dataset_name")]
    if cfg.validation_file and of_hub:
        yield (
            f"validation_file is evaluated, not a validation split of {', '.join(of_hub)}: to evaluate the sources of the "
            "mixture, give --validation_file none"
        )
    compares_evaluations = cfg.metric_for_best_model or cfg.early_stopping_patience or follows_evaluations(cfg)
    if cfg.greater_is_better is not None and not compares_evaluations:
        yield "greater_is_better is ignored: give metric_for_best_model or early_stopping_patience, too"
