"""The fields of a run file: one dataclass, with help, choices, and what may change on resume.

A fork adds fields here; src/config/parsing.py parses and checks them. Tests: tests/config/test_config.py, tests/checkpointing/test_resume.py.
"""

import dataclasses
import json
from dataclasses import dataclass, field


def int_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def json_object(text: str | dict) -> dict:
    value = json.loads(text) if isinstance(text, str) else text
    if not isinstance(value, dict):
        raise ValueError
    return value


class Help(str):
    """The help text of a field, and what else is declared of it: argparse takes no other metadata."""

    from_checkpoint = None


class MayChangeOnResume(Help):
    """The help text of a field that is free."""


STORES = ("http", "https", "s3", "gs", "gcs", "hf", "az", "abfs", "abfss", "adl")  # others of fsspec may run code


def plain_data(value) -> bool:
    """Return whether names of data, in lists and dicts, are of files, folders, the Hub or a plain store."""
    if isinstance(value, dict | list):
        return all(map(plain_data, value.values() if isinstance(value, dict) else value))
    scheme, separator, _ = str(value).partition("://")
    return "::" not in str(value) and (not separator or scheme.lower() in STORES)


def plain_name(value) -> bool:
    """Return whether an attention implementation is one of transformers, not a repository of the Hub, which is code."""
    return isinstance(value, str) and value.replace("_", "").isalnum()


ASK = "ask"


def option(text: str, default=None, choices=None, may_change_on_resume: bool = False, from_checkpoint=None):
    """Return a dataclass field with its help text; a list as default is copied for each instance.

    `from_checkpoint` says whether `eval.py --checkpoint` uses the value that the checkpoint records: True, or a function that
    accepts the value. A checkpoint is data from anywhere, so never for what runs code or chooses where files are written.
    With ASK it is not used, and eval.py names the flag that gives it. By default it is not used: an option of a task is asked
    for, a field of the run has to do with training only.

    A run that goes on may change a field that is free, because the numbers do not depend on it (or are checked for
    themselves: data and model by content, the length by its schedule); any other change is refused."""
    metadata = {"help": (MayChangeOnResume if may_change_on_resume else Help)(text)} | (
        {"choices": choices} if choices else {}
    )
    metadata["help"].from_checkpoint = from_checkpoint
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


OPTIMIZERS = ("adamw", "adamw_torch", "sgd")
SCHEDULES = [
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]
# What other programs call a field, and where to find it here: an unknown flag of that name is answered with it.
NAMES_ELSEWHERE = {
    "lr": "give learning_rate",
    "epochs": "give num_train_epochs",
    "steps": "give max_steps",
    "output": "give output_dir",
    "model": "give model_name_or_path",
    "model_name": "give model_name_or_path",
    "dataset": "give dataset_name or train_file",
    "data": "give dataset_name or train_file",
    "batch_size": "give global_batch_size (per optimizer step) and per_device_batch_size (per forward pass)",
    "train_batch_size": "give global_batch_size (per optimizer step) and per_device_batch_size (per forward pass)",
    "per_device_train_batch_size": "give per_device_batch_size, and global_batch_size for the optimizer step",
    "gradient_accumulation_steps": "it follows from global_batch_size / per_device_batch_size / processes",
    "warmup_ratio": "give warmup_steps as a fraction below 1",
    "resume_from_checkpoint": "give resume",
    "bf16": "mixed_precision is set in the accelerate file, or by accelerate launch --mixed_precision bf16",
    "fp16": "mixed_precision is set in the accelerate file, or by accelerate launch --mixed_precision fp16",
    "mixed_precision": "it belongs before train.py: accelerate launch --mixed_precision bf16 train.py",
    "num_processes": "it belongs before train.py: accelerate launch --num_processes 2 train.py, or make train NPROC=2",
    "config_file": "before train.py it is the accelerate file, after it give config",
}
COMM_HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")  # accelerate's names


@dataclass
class RunConfig:
    """Everything that decides the numbers, and nothing that says where they are computed."""

    _argument_group_name = "the run"

    task: str = option("what kind of model is trained: a file of src/tasks/", "causal_lm", from_checkpoint=True)
    output_dir: str | None = option("where the run lives (default: runs/NAME_OF_THE_YAML)", may_change_on_resume=True)
    seed: int = option("the one seed: weights, data order, dropout, augmentation", 42, from_checkpoint=True)
    resume: str = option(
        "auto (newest intact checkpoint of output_dir, else start), never, or a checkpoint folder",
        "auto",
        may_change_on_resume=True,
    )
    dry_run: bool = option("print the plan and stop", False, may_change_on_resume=True)

    model_name_or_path: str | None = option("Hub id or folder of a pretrained model")
    model_revision: str = option("branch, tag or commit of the Hub model", "main")
    model_config: str | None = option(
        "YAML or JSON file with a transformers config (model_type: llama, …) for random weights",
        may_change_on_resume=True,
    )
    tokenizer_name: str | None = option(
        "Hub id or folder of the tokenizer (default: the model's)", may_change_on_resume=True
    )
    init_from: str | None = option("run, checkpoint or final folder whose weights a new run begins with")
    dtype: str = option("dtype of the weights", "float32", ["float32", "float64", "bfloat16"], from_checkpoint=True)
    attn_implementation: str | None = option(
        "sdpa, eager, flash_attention_2, … (default: transformers' choice)",
        may_change_on_resume=True,
        from_checkpoint=plain_name,
    )
    trust_remote_code: bool = option(
        "run code that a model, tokenizer, metric or attention kernel brings",
        False,
        may_change_on_resume=True,
        from_checkpoint=ASK,
    )

    dataset_name: str | None = option(
        "Hub name or folder of a dataset, or a sample that is made here: stdlib_code, stdlib_functions",
        may_change_on_resume=True,
        from_checkpoint=plain_data,
    )
    dataset_config_name: str | None = option(
        "configuration of the Hub dataset", may_change_on_resume=True, from_checkpoint=True
    )
    dataset_revision: str | None = option(
        "branch, tag or commit of the Hub dataset", may_change_on_resume=True, from_checkpoint=True
    )
    train_file: list[str] = option(
        "local paths, globs or URLs: jsonl, json, csv, parquet, txt, arrow",
        [],
        may_change_on_resume=True,
        from_checkpoint=plain_data,
    )
    validation_file: list[str] = option(
        "the same for evaluation: paths, globs or URLs", [], may_change_on_resume=True, from_checkpoint=plain_data
    )
    mixture: json_object = option(
        "several sources of data by name, each with train_file or dataset_name and, if you like, validation_file, and the "
        "weight of its share of the examples (default: its size); evaluation is by source, too",
        None,
        may_change_on_resume=True,
        from_checkpoint=plain_data,
    )
    max_eval_examples: int | None = option(
        "evaluate on the first so many rows only (of each source of a mixture)", from_checkpoint=True
    )
    streaming: bool = option(
        "read training data as it is needed, without preparing it first; needs max_steps", False, from_checkpoint=True
    )
    stream_lanes: int | None = option(
        "shards of a stream that are read side by side, by at most as many processes (default: 8, or as many as there are)"
    )
    dataloader_num_workers: int = option(
        "loader processes per rank; 0 reads in the training process", 0, may_change_on_resume=True
    )
    dataloader_timeout: int = option(
        "seconds that a loader process may take for one micro-batch", 600, may_change_on_resume=True
    )
    preprocessing_num_workers: int = option("processes per rank that prepare data", 1, may_change_on_resume=True)
    cache_dir: str | None = option(
        "where downloads and prepared data are kept (default: beside the datasets cache)",
        may_change_on_resume=True,
        from_checkpoint=ASK,
    )
    cache_per_node: bool = option(
        "a folder of its own in there for each node (default: nodes that see the same folder share the work)",
        False,
        may_change_on_resume=True,
    )

    global_batch_size: int = option("examples per optimizer step over everything: part of the what", 32)
    per_device_batch_size: int_or_auto = option(
        "examples per forward pass, or auto: the largest that fits; accumulation is derived and printed (with dropout, "
        "another size draws other masks)",
        8,
        may_change_on_resume=True,
    )
    per_device_batch_tokens: int | None = option(
        "tokens per forward pass, padding included, instead of per_device_batch_size: short rows share one",
        may_change_on_resume=True,
    )
    per_device_eval_batch_size: int = option(
        "examples per forward pass in evaluation", 8, may_change_on_resume=True, from_checkpoint=True
    )
    sync_each_batch: bool | None = option(
        "add gradients up over processes after every micro-batch: more traffic, but gradients stay sharded (default: only "
        "under FSDP; DeepSpeed's ZeRO-2 and 3 always do)",
        may_change_on_resume=True,
    )
    gradient_checkpointing: bool = option(
        "compute the activations of each layer again in backward: far less memory, a third slower",
        False,
        may_change_on_resume=True,
    )
    compile: bool = option("compile the layers of the model with torch.compile", False, may_change_on_resume=True)
    pad_to_multiple_of: int | None = option(
        "pad micro-batches to a multiple of so many tokens, for compile; another padding draws other dropout masks",
        from_checkpoint=True,
    )
    tf32: bool = option(
        "matrix products of float32 in TF32 on GPUs that have it: faster, 10 bits of mantissa",
        False,
        may_change_on_resume=True,
        from_checkpoint=True,
    )

    max_steps: int | None = option(
        "optimizer steps of the whole run; wins over num_train_epochs", may_change_on_resume=True
    )
    num_train_epochs: float = option("passes over the training data", 1.0, may_change_on_resume=True)
    optim: str = option("optimizer; adamw and adamw_torch are the same", "adamw", OPTIMIZERS)
    learning_rate: float = option("peak learning rate", 5e-5)
    weight_decay: float = option("on parameters with two dimensions or more", 0.01)
    adam_beta1: float = option("decay of the first moment (momentum of sgd)", 0.9)
    adam_beta2: float = option("decay of the second moment", 0.999)
    adam_epsilon: float = option("added to the root of the second moment", 1e-8)
    local_sgd_steps: int | None = option(
        "steps in which each process updates by its own gradient before weights and moments are averaged (default: "
        "gradients are added up in every step)"
    )
    max_grad_norm: float = option("largest norm of the gradient; 0 does not clip", 1.0)
    lr_scheduler_type: str = option(
        "a schedule of transformers, evaluated at the number of completed updates", "linear", SCHEDULES
    )
    lr_scheduler_kwargs: json_object = option('its further arguments as JSON, e.g. {"min_lr": 1e-5}', None)
    warmup_steps: float = option("steps of warmup, or a fraction of all steps if below 1", 0.0)

    logging_steps: int = option("steps between train lines", 10, may_change_on_resume=True)
    eval_steps: int | None = option("steps between evaluations (default: at the end only)", may_change_on_resume=True)
    save_steps: int = option(
        "steps between checkpoints; one is always saved at the end", 500, may_change_on_resume=True
    )
    save_total_limit: int = option("newest checkpoints to keep", 2, may_change_on_resume=True)
    save_keep_every: int | None = option(
        "keep for ever the checkpoints of every so many steps", may_change_on_resume=True
    )
    metric_for_best_model: str | None = option(
        "number of an eval line; each new best is saved and kept, and final/ is the best one (default: the last step)",
        may_change_on_resume=True,
    )
    greater_is_better: bool | None = option(
        "whether a greater value of that metric is better (default: true unless its name ends in loss)",
        may_change_on_resume=True,
    )
    early_stopping_patience: int | None = option(
        "end after so many evaluations in a row that are no better by that metric (default metric: loss)",
        may_change_on_resume=True,
    )
    max_skipped_steps: int = option(
        "end after so many updates in a row whose loss or gradient is not finite", 20, may_change_on_resume=True
    )
    max_failed_saves: int = option("end after so many failed saves in a row", 3, may_change_on_resume=True)
    drift_check_steps: int | None = option(
        "steps between comparisons of the replicas (default: with each save)", may_change_on_resume=True
    )
    time_limit: float | None = option(
        "minutes after which to have saved and stopped, with exit code 75", may_change_on_resume=True
    )
    report_to: list[str] = option(
        "trackers besides metrics.jsonl: tensorboard, wandb, … (each needs its package)", [], may_change_on_resume=True
    )
    project: str | None = option(
        "project of the trackers (default: WANDB_PROJECT, else the name of the repository folder)",
        may_change_on_resume=True,
    )
    run_name: str | None = option(
        "name of the run in the trackers (default: the run folder's)", may_change_on_resume=True
    )
    push_to_hub: bool = option(
        "put the final model into a Hub repository, a private one if it is new", False, may_change_on_resume=True
    )
    hub_model_id: str | None = option(
        "that repository (default: the name of the run folder, under your account)", may_change_on_resume=True
    )
    ddp_comm_hook: str = option(
        "what DDP sends of a gradient: all of it, rounded to 16 bits, or a low rank of it (then numbers depend on where)",
        "no",
        COMM_HOOKS,
        may_change_on_resume=True,
    )
    ddp_timeout: int = option("seconds a collective may wait", 600, may_change_on_resume=True)


def changeable_fields(options: type) -> set[str]:
    """Return the names of the fields that a run may change when it goes on."""
    return {
        f.name
        for kind in (RunConfig, options)
        for f in dataclasses.fields(kind)
        if isinstance(f.metadata.get("help"), MayChangeOnResume)
    }
