"""The usual names of other trainers and the fields that were removed, for the errors about unknown fields.

Tests: tests/config/test_config.py.
"""

_BATCH_SIZES = "give global_batch_size (per optimizer step) and per_device_batch_size (per forward pass)"
_LAUNCH = "set it in the accelerate file: accelerate launch --config_file accelerate_configs/FILE.yaml train.py"

NAMES_ELSEWHERE = {
    "lr": "give learning_rate",
    "epochs": "give num_train_epochs",
    "model": "give model_name_or_path",
    "dataset": "give dataset_name or train_file",
    "batch_size": _BATCH_SIZES,
    "train_batch_size": _BATCH_SIZES,
    "per_device_train_batch_size": _BATCH_SIZES,
    "gradient_accumulation_steps": "it is derived: global_batch_size / per_device_batch_size / processes",
    "auto_find_batch_size": "give per_device_batch_size auto",
    "optimizer": "give optim",
    "lr_scheduler": "give lr_scheduler_type",
    "warmup_ratio": "give warmup_steps as a fraction below 1",
    "load_best_model_at_end": "give metric_for_best_model: final/ is then the best evaluated checkpoint",
    "eval_strategy": "give eval_steps",
    "save_strategy": "give save_steps",
    "resume_from_checkpoint": "give resume",
    "torch_compile": "give compile",
    "lora_r": "give peft: {type: lora, r: 8, target: [q_proj, v_proj]}",
    "bf16": "set mixed_precision in the accelerate file, or accelerate launch --mixed_precision bf16",
    "fp16": "set mixed_precision in the accelerate file, or accelerate launch --mixed_precision fp16",
    "fsdp": _LAUNCH,
    "deepspeed": _LAUNCH,
    # Removed fields.
    "check_save": "it was removed: run make smoke, or train.py --smoke, before a long run",
    "local_sgd_steps": "it was removed: to average weights now and then, use accelerate.local_sgd.LocalSGD",
}
