"""The fields of the run file (YAML): help, default, bounds, and whether a resumed run may change the field.

The fields of a copy are in src/fields.py: `config_class` finds them as tasks are found, by their place.
Tests: tests/engine/config/test_config.py, tests/engine/checkpointing/test_run_identity.py, tests/src/test_fields.py.
"""

import dataclasses
import inspect
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

from engine.config.addon import Addon
from engine.config.errors import UsageError
from engine.config.option import AS_GIVEN, GroupFields, MixtureSource, Recomputation, declared_options, option
from engine.config.paths import REPOSITORY

SCHEDULES = (
    "linear",
    "cosine",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "warmup_stable_decay",
    *sorted(path.stem for path in (REPOSITORY / "addons" / "schedules").glob("[a-z]*.py")),
)
COMM_HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")  # accelerate's names

changeable = partial(option, may_change_on_resume=True)  # the numbers do not depend on the field


@dataclass(frozen=True)
class RunConfig:
    """All fields that say what is trained; parsed once, and nothing writes to it.

    The accelerate file says where: processes, devices, mixed precision."""

    # The add-ons that the run file uses, each with its fields: one of them is not its default. `run_config` of
    # engine/config/find_addons.py makes them.
    addons: tuple[Addon, ...] = ()

    task: str = option(
        "kind of model: causal_lm, text_classification, … (docs/tasks.md)",
        "causal_lm",
        group="run",
        from_checkpoint=True,
    )
    output_dir: str = changeable(  # the parser replaces None
        "run folder, or an address such as s3://bucket/run (default: runs/ and the name of the run file; a new one for another "
        "configuration)",
        is_path=AS_GIVEN,
    )
    seed: int = option("the only seed: weights, data order, dropout, augmentation", 42, min=0, max=2**63 - 1)
    resume: str = changeable(
        "auto (newest checkpoint of output_dir, if any), never, or a checkpoint folder", "auto", is_path=AS_GIVEN
    )
    time_limit: float | None = changeable(
        "minutes until the run saves and exits with code 75 (default: no limit)", above=0
    )
    dry_run: bool = changeable("print the plan (steps, tokens, learning rate, memory, disk) and exit", False)

    model_name_or_path: str | None = option("Hub id or folder of a pretrained model", group="model", is_path=True)
    model_revision: str = option("branch, tag or commit of the Hub model", "main", is_rare=True)
    model_config: str | None = changeable(
        "YAML or JSON file with a transformers config, for random weights", is_path=True
    )
    init_from: str | None = option(
        "folder of a run, checkpoint or final model: the initial weights of this run", is_path=True
    )
    tokenizer_name: str | None = changeable(
        "Hub id or folder of the tokenizer (default: the model's)", is_path=True, is_rare=True
    )
    add_tokens: list[str] = option(
        "tokens to add to the tokenizer, with rows of their own in embedding and head, which are trained",
        [],
        from_checkpoint=True,
        is_rare=True,
    )
    dtype: str = option("dtype of the weights", "float32", choices=("float32", "float64", "bfloat16"))
    attn_implementation: str | None = changeable(
        "sdpa, eager, flex_attention, varlen, … (default: chosen by transformers; varlen for packed rows on a GPU in 16 bits)",
        from_checkpoint=True,
        is_rare=True,
    )
    trust_remote_code: bool = changeable(
        "run Python code of a model, tokenizer, metric or kernel",
        False,
        from_checkpoint=False,
        is_rare=True,
    )

    dataset_name: str | None = changeable(
        "Hub id or folder of a dataset, or a sample that a file of samples/ makes, such as stdlib_code",
        group="data",
        is_path=True,
        from_checkpoint=True,
    )
    dataset_config_name: str | None = changeable(
        "configuration (subset) of the Hub dataset", from_checkpoint=True, is_rare=True
    )
    dataset_revision: str | None = changeable(
        "branch, tag or commit of the Hub dataset (default: main)",
        from_checkpoint=True,
        is_rare=True,
    )
    dataset_split: str | None = changeable(
        "split of dataset_name to train on (default: train)", from_checkpoint=True, is_rare=True
    )
    train_file: list[str] = changeable(
        "training data: paths, globs or URLs of jsonl, json, csv, parquet, txt or arrow files",
        [],
        is_path=True,
        from_checkpoint=True,
    )
    validation_file: list[str] = changeable(
        "evaluation data, in the same formats", [], is_path=True, from_checkpoint=True
    )
    mixture: dict[str, MixtureSource] | None = changeable(
        "several datasets: {NAME: {train_file: FILES, weight: X}, …}, or dataset_name instead of train_file; each may "
        "have a validation_file; weight: its share of the examples (by default its size); each is also evaluated alone",
        from_checkpoint=True,
    )
    long_rows: str = option(
        "what becomes of rows, or pairs, longer than max_length: cut, or drop, which leaves them out",
        "cut",
        choices=("cut", "drop"),
        is_rare=True,
    )
    columns: dict[str, str] = changeable(
        "names of columns: {PART: COLUMN, …}, such as {text: review, label: stars}; PART: what the task calls it",
        {},
        from_checkpoint=True,
    )
    cache_dir: str | None = changeable(
        "folder for downloads and prepared data (default: HF_DATASETS_CACHE)",
        is_path=AS_GIVEN,
        is_rare=True,
    )
    cache_per_node: bool = changeable(
        "give each node its own folder in cache_dir instead of sharing one",
        False,
        from_checkpoint=False,  # it says where files are written
        is_rare=True,
    )
    preprocessing_num_workers: int = changeable(
        "processes per rank that prepare data", 1, min=1, max=256, from_checkpoint=False, is_rare=True
    )

    global_batch_size: int = option(
        "examples per optimizer step, summed over all processes and accumulation steps",
        32,
        group="batch",
        min=1,
    )
    per_device_batch_size: int = changeable(
        "examples per forward pass, on average if rows have many lengths (make find-batch-size prints what fits); sets "
        "gradient accumulation; changes dropout masks",
        8,
        min=1,
    )
    per_device_batch_tokens: int | None = changeable(
        "tokens per forward pass, padding included, instead of per_device_batch_size",
        min=1,
        is_rare=True,
    )
    per_device_eval_batch_size: int = changeable("examples per forward pass in evaluation", 8, min=1)
    pad_to_multiple_of: int | None = option(
        "pad rows to a multiple of this many tokens, for compile; changes dropout masks (default: 1)",
        min=1,
        is_rare=True,
    )

    optim: str = option(
        "optimizer: adamw, sgd, or another class of torch.optim, or of a file in addons/optimizers/",
        "adamw",
        group="optimizer",
    )
    optim_args: dict | None = option('further arguments of the optimizer, e.g. {"nesterov": true}', is_rare=True)
    learning_rate: float = option("peak learning rate", 5e-5, min=0)
    weight_decay: float = option("weight decay of parameters with two or more dimensions", 0.01, min=0)
    adam_beta1: float = option("decay of the first moment; momentum of sgd", 0.9, min=0, below=1, is_rare=True)
    adam_beta2: float = option("decay of the second moment", 0.999, min=0, below=1, is_rare=True)
    adam_epsilon: float = option("added to the root of the second moment", 1e-8, above=0, is_rare=True)
    parameter_groups: dict[str, GroupFields] | None = option(
        "rate and weight decay by parameter name: {PATTERN: {lr_factor: X, weight_decay: Y}, …}; * stands for any text",
        is_rare=True,
    )
    lr_layer_decay: float | None = option(
        "multiply the rate by this for each layer further from the head (default: off)",
        above=0,
        max=1,
        is_rare=True,
    )
    freeze: list[str] = option("name patterns of parameters that are not trained; * stands for any text", [])
    max_grad_norm: float = option("clip the gradient to this norm; 0: no clipping", 1.0, min=0)
    max_skipped_steps: int = changeable(
        "fail after this many updates in a row were skipped (not finite, or a spike)",
        20,
        min=1,
        is_rare=True,
    )

    max_steps: int | None = changeable(
        "optimizer steps of the whole run; overrides num_train_epochs", group="schedule", min=1, max=10**12
    )
    num_train_epochs: float = changeable("passes over the training data", 1.0, above=0, max=10**9)
    lr_scheduler_type: str = option(
        "schedule of transformers or of addons/schedules/, evaluated at the number of completed updates",
        "linear",
        choices=SCHEDULES,
        from_checkpoint=False,  # another copy may have other schedules
    )
    lr_scheduler_kwargs: dict | None = option('further arguments of the schedule, e.g. {"min_lr": 1e-5}', is_rare=True)
    warmup_steps: float = option("warmup steps; below 1: a fraction of all steps", 0.0, min=0)
    warmup_start_lr: float = option("learning rate at the start of a linear warmup", 0.0, min=0, is_rare=True)

    eval_steps: int | None = changeable(
        "steps between evaluations (default: only at the end)", group="evaluation", min=1
    )
    max_eval_examples: int | None = option(
        "evaluate only on this many rows from the start of each dataset (default: all)", min=1
    )
    metric_for_best_model: str | None = changeable(
        "evaluation metric that chooses the checkpoint of final/ (default: the last step)"
    )
    greater_is_better: bool | None = changeable(
        "whether a greater metric is better (default: true unless its name ends in loss; wer and the like need it)",
        is_rare=True,
    )
    early_stopping_patience: int | None = changeable(
        "end after this many evaluations in a row without a new best (default: never)", min=1
    )
    stop_on_nan_metric: bool = changeable(
        "save and fail if a metric of an evaluation is not finite; otherwise warn",
        False,
        is_rare=True,
    )

    save_steps: int = changeable("steps between checkpoints; also saved at the end", 500, group="checkpoints", min=1)
    save_total_limit: int = changeable("newest checkpoints to keep", 2, min=1)
    save_keep_every: int | None = changeable(
        "also keep each checkpoint at a multiple of this number of steps", min=1, is_rare=True
    )
    max_failed_saves: int = changeable("fail after this many failed saves in a row", 3, min=1, is_rare=True)
    drift_check_steps: int | None = changeable(
        "steps between checks that model replicas are equal (default: at each save)",
        min=1,
        is_rare=True,
    )

    logging_steps: int = changeable("steps between train lines", 10, group="logging", min=1)
    report_to: list[str] = changeable(
        "trackers besides metrics.jsonl: tensorboard, wandb, … (each needs its package)", []
    )
    project: str | None = changeable(
        "project name in trackers (default: WANDB_PROJECT, else the repository folder)", is_rare=True
    )
    run_name: str | None = changeable("run name in trackers (default: the run folder)", is_rare=True)

    compile: bool = changeable(
        "compile the layers of the model with torch.compile",
        False,
        group="performance",
        from_checkpoint=False,  # eval.py compiles no layers
    )
    gradient_checkpointing: bool | Recomputation = changeable(
        "recompute activations in the backward pass: far less memory, a third slower; {every_n_layers: 2}: only those of "
        "every second layer; {offload: true}: what recomputing needs waits in host memory",
        False,
        from_checkpoint=False,  # eval.py computes no gradients
    )
    profile_steps: list[int] = changeable(
        "first and last step to profile on rank 0: RUN/profile/ gets a table of operations and a trace",
        [],
        is_rare=True,
    )
    tf32: bool = changeable("compute float32 matrix products in TF32: faster, 10 bits of mantissa", False, is_rare=True)
    sync_each_batch: bool | None = changeable(
        "reduce gradients after every micro-batch: more traffic, less memory (default: only FSDP and ZeRO-2/3)",
        is_rare=True,
    )
    exact_sums: bool = option(
        "add gradients, losses and statistics exactly: bitwise the same weights on any number of processes (one process and "
        "DDP)",
        False,
    )
    ddp_comm_hook: str = changeable(
        "send compressed gradients in DDP; results then depend on the number of processes",
        "no",
        choices=COMM_HOOKS,
        is_rare=True,
    )
    ddp_find_unused_parameters: bool = changeable(
        "allow parameters that only some rows use (DDP and FSDP2); each step then searches for them",
        False,
        from_checkpoint=False,  # the backend of an evaluation may refuse it
        is_rare=True,
    )
    ddp_timeout: int = changeable(
        "seconds a collective may wait", 600, min=1, max=10**7, from_checkpoint=False, is_rare=True
    )
    dataloader_num_workers: int = changeable(
        "dataloader workers per rank; 0: load in the training process",
        0,
        min=0,
        max=256,
        from_checkpoint=False,  # of this machine, as the other numbers of workers and seconds here
        is_rare=True,
    )
    dataloader_timeout: int = changeable(
        "seconds a dataloader worker may take for one micro-batch", 600, min=1, from_checkpoint=False, is_rare=True
    )


@cache
def config_class() -> type[RunConfig]:
    """Return RunConfig of src/fields.py, which has the copy's own fields, or RunConfig above if there is no such file.

    Raise UsageError for a field that is not declared by `option`."""
    file = "src/fields.py"
    if not (REPOSITORY / file).exists():
        return RunConfig
    cls = getattr(import_module("src.fields"), "RunConfig", None)
    if not (isinstance(cls, type) and issubclass(cls, RunConfig)):
        raise UsageError(f"{file}: it has no class RunConfig(run_config.RunConfig): restore it, or remove the file")
    declared = {field.name for field in dataclasses.fields(cls) if "option" in field.metadata}
    for name in inspect.get_annotations(cls):
        if name not in declared:
            raise UsageError(f"{file}: {name} has no option: write it as {name}: TYPE = option(HELP, DEFAULT)")
    return cls


def field_values(cfg: RunConfig) -> dict[str, Any]:
    """Return a copy of the values of all fields, also of those of the add-ons that the run file uses."""
    values = dataclasses.asdict(cfg)
    for of_addon in values.pop("addons"):
        values |= of_addon
    return values


def changeable_fields(*classes: type) -> set[str]:
    """Return the names of the fields of these dataclasses that a resumed run may change."""
    names = set()
    for cls in classes:
        names |= {name for name, rules in declared_options(cls).items() if rules.may_change_on_resume}
    return names


def best_by(cfg: RunConfig) -> tuple[str, bool]:
    """Return (name of the metric that decides which evaluation is best, True if greater is better).

    As in transformers, greater is better unless the name ends in "loss". A prefix `eval_` is removed."""
    name = (cfg.metric_for_best_model or "loss").removeprefix("eval_")
    if cfg.greater_is_better is not None:
        return name, cfg.greater_is_better
    return name, not name.endswith("loss")
