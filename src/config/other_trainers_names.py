"""Names of other trainers, each with the field to give here, for errors about unknown fields and techniques.

Tests: tests/config/test_config.py.
"""

import re
from functools import cache

from src.config.paths import REPOSITORY

_BATCH_SIZES = "give global_batch_size (per optimizer step) and per_device_batch_size (per forward pass)"
_ACCUMULATION = "it is derived: global_batch_size / per_device_batch_size / processes"
_AUTO_BATCH_SIZE = "give per_device_batch_size auto"
_BEST = "give metric_for_best_model: final/ is then the best evaluated checkpoint"
_ADAPTER = "give peft: {type: lora, r: 8, target: [q_proj, v_proj]}"
_CLIPPING = "give max_grad_norm (by norm), or techniques: {clip_by_value: {limit: X}}"
_LOCAL_SGD = "it was removed: to average the weights of processes now and then, use accelerate.local_sgd.LocalSGD"
_LAUNCH = "set it in the accelerate file: accelerate launch --config_file accelerate_configs/FILE.yaml train.py"

NAMES_ELSEWHERE = {
    "lr": "give learning_rate",
    "epochs": "give num_train_epochs",
    "steps": "give max_steps",
    "output": "give output_dir",
    "model": "give model_name_or_path",
    "model_name": "give model_name_or_path",
    "dataset": "give dataset_name or train_file",
    "data": "give dataset_name or train_file",
    "split": "give dataset_split",
    "train_split": "give dataset_split",
    "dataset_train_split": "give dataset_split",
    "val_set_size": "give validation_split",
    "test_size": "give validation_split",
    "validation_split_percentage": "give validation_split, a fraction below 1",
    "batch_size": _BATCH_SIZES,
    "train_batch_size": _BATCH_SIZES,
    "per_device_train_batch_size": "give per_device_batch_size, and global_batch_size for the optimizer step",
    "gradient_accumulation_steps": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "auto_scale_batch_size": _AUTO_BATCH_SIZE,
    "auto_find_batch_size": _AUTO_BATCH_SIZE,
    "device_train_microbatch_size": "give per_device_batch_size",
    "group_by_length": "not needed: the rows of a step are sorted by length before they are cut into micro-batches",
    "dataloader_drop_last": "not needed: the last, smaller global batch of an epoch is trained exactly",
    "max_epochs": "give num_train_epochs",
    "max_duration": "give max_steps or num_train_epochs",
    "data_seed": "give seed, the only one",
    "optimizer": "give optim",
    "momentum": "give adam_beta1, the momentum of sgd",
    "nesterov": "give optim_args {nesterov: true}",
    "layer_decay": "give lr_layer_decay",
    "freeze_layers": "give freeze",
    "lr_scheduler": "give lr_scheduler_type",
    "num_warmup_steps": "give warmup_steps",
    "auto_lr_find": "run make find-lr",
    "gradient_clip_val": _CLIPPING,
    "gradient_clip_algorithm": _CLIPPING,
    "neftune_noise_alpha": "give techniques: {neftune: {alpha: X}}",
    "algorithms": "give techniques",
    "lora": _ADAPTER,
    "use_lora": _ADAPTER,
    "lora_r": _ADAPTER,
    "lora_rank": _ADAPTER,
    "lora_alpha": _ADAPTER,
    "lora_target_modules": _ADAPTER,
    "lora_target": _ADAPTER,
    "use_peft": _ADAPTER,
    "peft_config": _ADAPTER,
    "adapter": _ADAPTER,
    "qlora": "give peft: {type: lora, r: 8}; quantized base models are not supported",
    "load_in_4bit": "not supported: give dtype bfloat16 for the smallest weights",
    "callbacks": "there are none: edit the loop in train.py, or write a technique (docs/techniques.md)",
    "sam": "give techniques: {sam: {rho: X}}",
    "ema": "give techniques: {ema: {decay: X}}",
    "ema_decay": "give techniques: {ema: {decay: X}}",
    "swa": "give techniques: {swa: {start: X}}",
    "swa_lr": "give techniques: {swa: {start: X}}, and the rate by lr_scheduler_type",
    "swa_epoch_start": "give techniques: {swa: {start: X}}",
    "lookahead": "give techniques: {lookahead: {k: N}}",
    "load_best_model_at_end": _BEST,
    "monitor": _BEST,
    "patience": "give early_stopping_patience",
    "eval_strategy": "give eval_steps",
    "val_check_interval": "give eval_steps",
    "eval_interval": "give eval_steps",
    "save_strategy": "give save_steps",
    "save_interval": "give save_steps",
    "log_every_n_steps": "give logging_steps",
    "torch_compile": "give compile",
    "local_sgd_steps": _LOCAL_SGD,
    "fsdp": _LAUNCH,
    "deepspeed": _LAUNCH,
    "strategy": _LAUNCH,
    "devices": _LAUNCH,
    "precision": _LAUNCH,
    "warmup_ratio": "give warmup_steps as a fraction below 1",
    "resume_from_checkpoint": "give resume",
    "bf16": "set mixed_precision in the accelerate file, or accelerate launch --mixed_precision bf16",
    "fp16": "set mixed_precision in the accelerate file, or accelerate launch --mixed_precision fp16",
    "mixed_precision": "give it before train.py: accelerate launch --mixed_precision bf16 train.py",
    "check_save": "it was removed: run make smoke, or train.py --smoke, before a long run",
    "num_processes": "give it before train.py: accelerate launch --num_processes 2 train.py, or make train NPROC=2",
    "config_file": "give the accelerate file before train.py (accelerate launch --config_file FILE)",
}

# What one might look for in `techniques`, by other names than the fields and options that have the effect.
NOT_TECHNIQUES = {
    "label_smoothing": "give label_smoothing_factor, an option of the tasks with a cross-entropy",
    "focal_loss": "give focal_gamma, an option of the tasks with a cross-entropy",
    "r_drop": "give r_drop_alpha, an option of text_classification and image_classification",
    "curriculum": "give curriculum_column and curriculum_steps, fields of the run file",
    "sequence_length_warmup": "give sequence_length_warmup_steps, a field of the run file",
    "batch_size_warmup": "give batch_size_warmup_steps, a field of the run file",
    "local_sgd": _LOCAL_SGD,
    "lora": _ADAPTER + ", a field of the run file",
    "early_stopping": "give early_stopping_patience, a field of the run file",
    "one_cycle": "give lr_scheduler_type one_cycle, a field of the run file",
    "muon": "give optim muon, a field of the run file",
    "gradient_clipping": _CLIPPING,
    "gradient_accumulation": _ACCUMULATION,
}


def hint(name: str, names: dict[str, str] = NAMES_ELSEWHERE) -> str | None:
    """Return what to give here instead of `name`, without techniques that a fork has deleted; None if there is nothing."""
    parts = names[name].split(", or ") if name in names else []
    return ", or ".join(part for part in parts if set(re.findall(r"techniques: {(\w+)", part)) <= _techniques()) or None


@cache
def _techniques() -> set[str]:
    """Return the names in the registry of techniques, read as text: this room may not import it."""
    registry = REPOSITORY / "src" / "training" / "techniques" / "__init__.py"
    return set(re.findall(r'^    "(\w+)": ', registry.read_text(), re.MULTILINE))
