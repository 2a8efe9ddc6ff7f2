"""Field names of other trainers, each with the field to give here, for errors about unknown fields."""

_BATCH_SIZES = "give global_batch_size (per optimizer step) and per_device_batch_size (per forward pass)"

NAMES_ELSEWHERE = {
    "lr": "give learning_rate",
    "epochs": "give num_train_epochs",
    "steps": "give max_steps",
    "output": "give output_dir",
    "model": "give model_name_or_path",
    "model_name": "give model_name_or_path",
    "dataset": "give dataset_name or train_file",
    "data": "give dataset_name or train_file",
    "batch_size": _BATCH_SIZES,
    "train_batch_size": _BATCH_SIZES,
    "per_device_train_batch_size": "give per_device_batch_size, and global_batch_size for the optimizer step",
    "gradient_accumulation_steps": "it is derived: global_batch_size / per_device_batch_size / processes",
    "warmup_ratio": "give warmup_steps as a fraction below 1",
    "resume_from_checkpoint": "give resume",
    "bf16": "set mixed_precision in the accelerate file, or accelerate launch --mixed_precision bf16",
    "fp16": "set mixed_precision in the accelerate file, or accelerate launch --mixed_precision fp16",
    "mixed_precision": "give it before train.py: accelerate launch --mixed_precision bf16 train.py",
    "num_processes": "give it before train.py: accelerate launch --num_processes 2 train.py, or make train NPROC=2",
    "config_file": "give the accelerate file before train.py (accelerate launch --config_file FILE)",
}
