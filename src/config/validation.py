"""Range errors and contradictions between the fields of a run, all reported at once."""

import math
import os
from pathlib import Path

from src.config import mixture_fields, validation
from src.config.best_metric import doubts
from src.config.errors import UsageError, warn
from src.config.redact import was_redacted
from src.config.schema import RunConfig, plain_name


def push_errors(cfg: RunConfig) -> list[str]:
    """Return why nothing could be pushed at the end of the run, so that it is known before its beginning."""
    if not cfg.push_to_hub:
        return ["hub_model_id is given without push_to_hub: give both, or neither"] if cfg.hub_model_id else []
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return ["push_to_hub is true, but HF_HUB_OFFLINE is set: unset one"]
    return [] if get_token() else ["push_to_hub is true, but there is no token: set HF_TOKEN, or run `hf auth login`"]


Fault = str


def check_run(cfg: RunConfig, training: bool = True) -> list[Fault]:
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
    numbers = {name: value for name, value in vars(cfg).items() if value != "auto"}
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
        if getattr(cfg, name) >= 1:
            faults.append(f"{name} is {getattr(cfg, name)}: it must be below 1")
    if cfg.warmup_steps > 1 and cfg.warmup_steps != int(cfg.warmup_steps):
        faults.append(f"warmup_steps is {cfg.warmup_steps}: give whole steps, or a fraction below 1")
    if training and numbers.get("per_device_batch_size", 0) > cfg.global_batch_size > 0:
        faults.append(
            f"per_device_batch_size is {cfg.per_device_batch_size}: more than global_batch_size, which is "
            f"{cfg.global_batch_size}; a forward pass cannot hold more than one optimizer step"
        )
    if cfg.model_config and not training:
        faults.append(
            f"model_config is {cfg.model_config}, which means random weights: to evaluate a trained run, give --checkpoint "
            f"{cfg.output_dir} without --config (it brings its own configuration); for other models give --model_name_or_path"
        )
    elif cfg.model_name_or_path and cfg.model_config:
        faults.append(
            "model_name_or_path and model_config are both given: keep the first to fine-tune, the second for random weights"
        )
    if not cfg.model_name_or_path and not cfg.model_config:
        faults.append(
            "no model: give --model_name_or_path, or --model_config for random weights (try --config configs/stdlib_lm.yaml)"
        )
    if cfg.attn_implementation and not plain_name(cfg.attn_implementation) and not cfg.trust_remote_code:
        faults.append(
            f"attn_implementation is {cfg.attn_implementation}, code from the Hub: give --trust_remote_code true if you trust it"
        )
    if cfg.dataset_name and cfg.train_file:
        faults.append(
            f"dataset_name ({cfg.dataset_name}) and train_file ({' '.join(cfg.train_file)}) are both given: keep one; if the run "
            "file has the other, copy it and delete that line"
        )
    field = "train_file" if training else "validation_file"
    faults += mixture_fields.mixture_errors(cfg) + (validation.push_errors(cfg) if training else [])
    if cfg.streaming and training:
        if not cfg.max_steps:
            faults.append("streaming is true: a stream has no length, so give --max_steps")
        if cfg.per_device_batch_size == "auto":
            faults.append("per_device_batch_size is auto, but a stream does not know its longest rows: give a number")
        if cfg.mixture:
            faults.append("mixture and streaming are both given: a mixture needs data with a length")
        if (cfg.stream_lanes or 0) > cfg.global_batch_size > 0:
            faults.append(
                f"stream_lanes is {cfg.stream_lanes}: more than global_batch_size, which is {cfg.global_batch_size}"
            )
    elif cfg.stream_lanes and training:
        faults.append("stream_lanes is given without streaming: give both, or neither")
    if not cfg.dataset_name and not getattr(cfg, field) and not cfg.mixture:
        faults.append(f"no data: give --{field} or --dataset_name (try --config configs/stdlib_lm.yaml)")
    if cfg.dataset_config_name and not cfg.dataset_name:
        faults.append("dataset_config_name is given without dataset_name: give both, or neither")
    if training and (every := cfg.local_sgd_steps or 0) > 0:
        faults += [
            f"{name} is {value}, no multiple of local_sgd_steps, which is {every}: between two averages each process has "
            "weights of its own"
            for name in ("save_steps", "eval_steps", "drift_check_steps")
            if (value := getattr(cfg, name) or 0) % every
        ]
        if cfg.ddp_comm_hook != "no":
            faults.append("local_sgd_steps and ddp_comm_hook are both given: then no gradient is sent, keep one")
    for name in ("output_dir", "cache_dir"):
        if "://" in (folder := getattr(cfg, name) or ""):  # else a local folder of this odd name, credentials included
            faults.append(f"{name}: {folder} is a URL: give a local folder (or one where the store is mounted)")
        elif folder and (reason := _unwritable(Path(folder).absolute())):
            faults.append(f"{name}: {folder} cannot be made: {reason}; give another folder")
    return faults


def _unwritable(folder: Path) -> str | None:
    """Return why nothing can be written to `folder`, which need not exist yet, or None."""
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written"


def check(cfg: RunConfig, options, training: bool = True) -> None:
    """Raise UsageError with every fault that the values have by themselves, before anything is read or written."""
    faults = check_run(cfg, training) + options.check()
    faults += [
        f"{name}: {value}: its credentials were removed when the run was saved: give it again, --{name} …"
        for name, value in (vars(cfg) | vars(options)).items()
        if was_redacted(value)
    ]
    if faults:
        raise UsageError(list_errors(faults))
    for doubt in doubts(cfg) if training else []:
        warn(doubt)


def list_errors(faults: list[Fault]) -> str:
    return faults[0] if len(faults) == 1 else f"{len(faults)} faults:\n" + "\n".join(f"  {fault}" for fault in faults)
