"""The fields of the run file (YAML): help, default, bounds, and whether a resumed run may change the field.

Add your own fields here, then run `make schema`, which writes configs/schema.json; no other file has to change. The
groups run, model and data are in model_and_data_fields.py.
Tests: tests/config/test_config.py, tests/checkpointing/test_resume.py.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from src.config.fields import Auto, declared_options, option
from src.config.model_and_data_fields import ModelAndDataFields
from src.config.paths import REPOSITORY

SCHEDULES = ("linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt")
SCHEDULES += ("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay")
SCHEDULES += tuple(sorted(path.stem for path in (REPOSITORY / "addons" / "schedules").glob("[a-z]*.py")))
COMM_HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")  # accelerate's names


@dataclass(frozen=True)
class RunConfig(ModelAndDataFields):
    """All fields that say what is trained; parsed once, and nothing writes to it. The accelerate file says where: processes, devices, mixed precision."""

    # The add-ons with fields that the run file names; src/config/addons.py adds their fields to this class.
    addons: ClassVar[tuple[ModuleType, ...]] = ()

    global_batch_size: int = option(
        "examples per optimizer step, summed over all processes and accumulation steps",
        32,
        group="batch",
        min=1,
        from_checkpoint=True,  # eval.py computes a loss over the whole batch on blocks of this size
    )
    per_device_batch_size: int | Auto = option(
        "examples per forward pass, or auto (as many as fit in memory); sets gradient accumulation; "
        "changes dropout masks",
        8,
        min=1,
        may_change_on_resume=True,
    )
    per_device_batch_tokens: int | None = option(
        "tokens per forward pass, padding included, instead of per_device_batch_size", min=1, may_change_on_resume=True
    )
    per_device_eval_batch_size: int = option(
        "examples per forward pass in evaluation", 8, min=1, may_change_on_resume=True, from_checkpoint=True
    )
    pad_to_multiple_of: int | None = option(
        "pad rows to a multiple of this many tokens, for compile; changes dropout masks (default: 1)",
        min=1,
        from_checkpoint=True,
    )

    optim: str = option(
        "optimizer: adamw, sgd, muon, or a name of torch.optim or of the package pytorch_optimizer",
        "adamw",
        group="optimizer",
    )
    optim_args: dict | None = option('further arguments of the optimizer, e.g. {"nesterov": true}')
    learning_rate: float = option("peak learning rate", 5e-5, min=0)
    weight_decay: float = option("weight decay of parameters with two or more dimensions", 0.01, min=0)
    adam_beta1: float = option("decay of the first moment; momentum of sgd", 0.9, min=0, below=1)
    adam_beta2: float = option("decay of the second moment", 0.999, min=0, below=1)
    adam_epsilon: float = option("added to the root of the second moment", 1e-8, above=0)
    parameter_groups: dict | None = option(
        "rate and weight decay by parameter name: {PATTERN: {lr_factor: X, weight_decay: Y}, …}; * stands for any text"
    )
    lr_layer_decay: float | None = option(
        "multiply the rate by this for each layer further from the head (default: off)", above=0, max=1
    )
    freeze: list[str] = option("name patterns of parameters that are not trained; * stands for any text", [])
    max_grad_norm: float = option("clip the gradient to this norm; 0: no clipping", 1.0, min=0)
    max_skipped_steps: int = option(
        "fail after this many updates in a row were skipped (not finite, or a spike)",
        20,
        min=1,
        may_change_on_resume=True,
    )

    max_steps: int | None = option(
        "optimizer steps of the whole run; overrides num_train_epochs",
        group="schedule",
        min=1,
        max=10**12,
        may_change_on_resume=True,
    )
    num_train_epochs: float = option(
        "passes over the training data", 1.0, above=0, max=10**9, may_change_on_resume=True
    )
    lr_scheduler_type: str = option(
        "schedule of transformers or of addons/schedules/, evaluated at the number of completed updates",
        "linear",
        choices=SCHEDULES,
    )
    lr_scheduler_kwargs: dict | None = option('further arguments of the schedule, e.g. {"min_lr": 1e-5}')
    warmup_steps: float = option("warmup steps; below 1: a fraction of all steps", 0.0, min=0)
    warmup_start_lr: float = option("learning rate at the start of a linear warmup", 0.0, min=0)

    eval_steps: int | None = option(
        "steps between evaluations (default: only at the end)", group="evaluation", min=1, may_change_on_resume=True
    )
    max_eval_examples: int | None = option(
        "evaluate only on this many rows from the start of each dataset (default: all)", min=1, from_checkpoint=True
    )
    metric_for_best_model: str | None = option(
        "evaluation metric that chooses the checkpoint of final/ (default: the last step)", may_change_on_resume=True
    )
    greater_is_better: bool | None = option(
        "whether a greater metric is better (default: true unless its name ends in loss)", may_change_on_resume=True
    )
    early_stopping_patience: int | None = option(
        "end after this many evaluations in a row without a new best (default: never)", min=1, may_change_on_resume=True
    )
    stop_on_nan_metric: bool = option(
        "save and fail if a metric of an evaluation is not finite; otherwise warn", False, may_change_on_resume=True
    )

    save_steps: int = option(
        "steps between checkpoints; also saved at the end", 500, group="checkpoints", min=1, may_change_on_resume=True
    )
    save_total_limit: int = option("newest checkpoints to keep", 2, min=1, may_change_on_resume=True)
    save_keep_every: int | None = option(
        "also keep each checkpoint at a multiple of this number of steps", min=1, may_change_on_resume=True
    )
    max_failed_saves: int = option("fail after this many failed saves in a row", 3, min=1, may_change_on_resume=True)
    drift_check_steps: int | None = option(
        "steps between checks that model replicas are equal (default: at each save)", min=1, may_change_on_resume=True
    )

    logging_steps: int = option("steps between train lines", 10, group="logging", min=1, may_change_on_resume=True)
    report_to: list[str] = option(
        "trackers besides metrics.jsonl: tensorboard, wandb, … (each needs its package)", [], may_change_on_resume=True
    )
    project: str | None = option(
        "project name in trackers (default: WANDB_PROJECT, else the repository folder)", may_change_on_resume=True
    )
    run_name: str | None = option("run name in trackers (default: the run folder)", may_change_on_resume=True)

    compile: bool = option(
        "compile the layers of the model with torch.compile", False, group="performance", may_change_on_resume=True
    )
    gradient_checkpointing: bool = option(
        "recompute activations in the backward pass: far less memory, a third slower", False, may_change_on_resume=True
    )
    tf32: bool = option(
        "compute float32 matrix products in TF32: faster, 10 bits of mantissa",
        False,
        may_change_on_resume=True,
        from_checkpoint=True,
    )
    sync_each_batch: bool | None = option(
        "reduce gradients after every micro-batch: more traffic, less memory (default: only FSDP and ZeRO-2/3)",
        may_change_on_resume=True,
    )
    ddp_comm_hook: str = option(
        "send compressed gradients in DDP; results then depend on the number of processes",
        "no",
        choices=COMM_HOOKS,
        may_change_on_resume=True,
    )
    ddp_find_unused_parameters: bool = option(
        "allow parameters that only some rows use (DDP and FSDP2); each step then searches for them",
        False,
        may_change_on_resume=True,
    )
    ddp_timeout: int = option("seconds a collective may wait", 600, min=1, max=10**7, may_change_on_resume=True)
    dataloader_num_workers: int = option(
        "dataloader workers per rank; 0: load in the training process", 0, min=0, max=256, may_change_on_resume=True
    )
    dataloader_timeout: int = option(
        "seconds a dataloader worker may take for one micro-batch", 600, min=1, may_change_on_resume=True
    )


def changeable_fields(*kinds: type) -> set[str]:
    """Return the names of the fields of these dataclasses that a resumed run may change."""
    declared = [declared_options(kind) for kind in kinds]
    return {name for rules in declared for name, rule in rules.items() if rule.may_change_on_resume}
