"""`python -m src.reporting.memory_command`: the memory that each strategy needs, and the simplest that fits.

It opens no dataset. Of a Hub model it downloads only the configuration and the tokenizer.
Tests: tests/models/test_memory_estimate.py.
"""

from dataclasses import dataclass, replace

import torch

from src.config import parsing, validation
from src.config.fields import declared_options, option
from src.config.schema import RunConfig
from src.models.activation_memory import forward_without_rows
from src.models.memory_estimate import (
    StrategySettings,
    activations,
    count_parameters,
    resting_bytes,
    rows_per_forward,
    working_bytes,
)
from src.models.model_files import model_folder
from src.runtime.exit_codes import run_main
from src.tasks import OPTIONS, make_task

GIB = 2**30
FREE = 0.1  # fraction of device memory to leave for the device context, library workspaces and fragmentation


@dataclass
class Devices:
    """The flags of this command beside those of train.py."""

    gpus: int | None = option("number of GPUs on all nodes (default: those of this machine, else 1)", min=1)
    gpu_memory: float | None = option(
        "GiB of one GPU (default: those of the first GPU here, else 80)", above=0, below=1e6
    )


def main(argv: list[str]) -> None:
    """Print the memory that each strategy needs, and the simplest strategy that fits."""
    devices, argv = parsing.own_flags(Devices, argv)
    gpus = devices.gpus or torch.cuda.device_count() or 1
    has_gpu = torch.cuda.is_available()
    gpu_memory = devices.gpu_memory or (torch.cuda.get_device_properties(0).total_memory / GIB if has_gpu else 80.0)
    also = {name: rules.help for name, rules in declared_options(Devices).items()}
    cfg, options = parsing.parse(argv, OPTIONS, also=also)
    if not (cfg.dataset_name or cfg.train_file or cfg.mixture):
        cfg.train_file = ["-"]  # validation requires data, but nothing opens it here
    validation.check(cfg, options)
    model, length = empty_model(cfg, options)
    size, forward = count_parameters(model), forward_without_rows(model, length)

    def needed(strategy: StrategySettings) -> dict[str, float]:
        """Return GiB per device by purpose, their total, and GiB on the host."""
        resting = resting_bytes(size, cfg, strategy)
        host = sum(resting.values()) if strategy.offload else 0.0
        device = dict.fromkeys(resting, 0.0) if strategy.offload else resting
        device["working"] = working_bytes(size, cfg, strategy)
        device["activations"] = activations(forward, size, length, cfg, strategy) or 0.0
        device |= {"total": sum(device.values()), "host": host}
        return {name: value / GIB for name, value in device.items()}

    micro_batch = f"{rows_per_forward(cfg, length):,} rows × {length:,}"
    print(
        f"{size.parameters:,} parameters ({size.trained:,} trainable) in {cfg.dtype}, {cfg.optim}; "
        f"micro-batch: {micro_batch}; GPUs: {gpus:,} × {gpu_memory:.3g} GiB"
    )
    table = {strategy: needed(strategy) for strategy in strategies(cfg, gpus)}
    print(f"{'GiB per device':<22}" + "".join(f"{name:>13}" for name in next(iter(table.values()))))
    for strategy, row in table.items():
        print(f"{strategy.name:<22}" + "".join(f"{value:>13,.2f}" for value in row.values()))
    if not all(row["activations"] for row in table.values()):
        print("activations are not estimated: this model needs rows of its task; train.py --dry_run measures one")
    fitting = [strategy for strategy, row in table.items() if row["total"] <= (1 - FREE) * gpu_memory]
    if fitting:
        file = f"accelerate_configs/{fitting[0].file}.yaml{fitting[0].flags}"
        print(f"use {file}: the simplest strategy that leaves {FREE:.0%} of the memory free")
    else:
        print(
            f"nothing fits: no strategy leaves {FREE:.0%} of the memory free. Try --gradient_checkpointing true, a smaller "
            "--per_device_batch_size or --max_length, or more --gpus: see docs/scaling.md"
        )


def strategies(cfg: RunConfig, gpus: int) -> list[StrategySettings]:
    """Return the strategies for `gpus` devices, the simplest first."""
    common = {"low_precision": cfg.dtype == "float32", "recompute": cfg.gradient_checkpointing}
    if gpus == 1:
        return [StrategySettings("one GPU", "gpu", **common)]
    fsdp = StrategySettings("FSDP2", "fsdp2", "FSDP", gpus, **common)
    zero2 = StrategySettings("ZeRO-2", "zero2", "ZERO2", gpus, **common)
    zero3 = replace(zero2, name="ZeRO-3", file="zero3", kind="ZERO3")
    found = [
        StrategySettings("DDP", "ddp", "DDP", **common),
        replace(fsdp, name="FSDP2, reduced once", reduce_often=False, flags=" and --sync_each_batch false"),
        fsdp,
    ]
    if gpus >= 4 and gpus % 2 == 0:
        found.append(replace(fsdp, name="HSDP, 2 replicas", file="hsdp", shards=gpus // 2))
    found += [
        zero2,
        zero3,
        replace(fsdp, name="FSDP2, offload", file="fsdp2_offload", offload=True, recompute=True),
        replace(zero3, name="ZeRO-3, offload", file="zero3_offload", offload=True),
    ]
    return [strategy for strategy in found if cfg.dtype != "float64" or strategy.kind in ("DDP", "FSDP")]


def empty_model(cfg: RunConfig, options) -> tuple[torch.nn.Module, int]:
    """Return (the task's model on the meta device, the length of its rows)."""
    from datasets import ClassLabel, Features

    if name := cfg.model_name_or_path:
        cfg = replace(cfg, model_name_or_path=model_folder(cfg, name, weights=False))
    task = make_task(cfg, options)
    task.load()
    task.on_prepared(Features({"label": ClassLabel(num_classes=2)}))  # the real number of labels is in the data
    with torch.device("meta"):
        return task.build_model(empty=True).train(), getattr(task, "max_length", 1)


if __name__ == "__main__":
    run_main(main)
