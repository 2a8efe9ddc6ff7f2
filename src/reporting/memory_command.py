"""`python -m src.reporting.memory_command`: which strategy fits on how many devices.

No data is opened, and of a Hub model only its configuration and tokenizer are fetched.
Tests: tests/models/test_memory_estimate.py.
"""

from dataclasses import replace

import torch

from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.models.memory_estimate import Strategy, activations, count, passing, resting, rows_at_once, strategies
from src.runtime.exit_codes import run_main
from src.tasks import OPTIONS

GIB = 2**30
SPARE = 0.1  # of a device's memory, for its context, the libraries' workspaces and fragmentation
OWN = {
    "gpus": "GPUs over all nodes (default: those of this machine, else 1)",
    "gpu_memory": "GiB that each of them has (default: what the first one here has, else 80)",
}


def main(argv: list[str]) -> None:
    """Print a line for each strategy, and the first that fits."""
    argv, gpus, memory = _own(argv)
    cfg, options = parsing.parse(argv, OPTIONS, also=OWN)
    if not (cfg.dataset_name or cfg.train_file or cfg.mixture):
        cfg.train_file = ["-"]  # no data is opened
    validation.check(cfg, options)
    model, length = _model(cfg, options)
    n, rows = count(model), rows_at_once(cfg, length)

    def needs(way: Strategy) -> list[float | None]:
        """Return GiB of a device for weights, gradients, moments, copies, activations, all of it; and of the host."""
        still, kept = list(resting(n, cfg, way).values()), activations(model, n, length, cfg, way)
        device = ([0.0] * 3 if way.offload else still) + [passing(n, cfg, way), kept or 0.0]
        return [value / GIB for value in (*device, sum(device), sum(still) if way.offload else 0.0)]

    def fitting(gpus: int, cfg: RunConfig = cfg) -> Strategy | None:
        return next((way for way in strategies(cfg, gpus) if needs(way)[5] <= (1 - SPARE) * memory), None)

    trained = f"{n.parameters:,} parameters, {n.trained:,} of them trained, in {cfg.dtype}, {cfg.optim}"
    print(f"{trained}; a micro-batch is {rows:,} × {length:,}; {gpus:,} × {memory:.3g} GiB")
    heads = ("weights", "gradients", "optimizer", "at work", "activations", "together", "on the host")
    print(f"{'GiB per device':<22}" + "".join(f"{head:>13}" for head in heads))
    for way in strategies(cfg, gpus):
        print(f"{way.name:<22}" + "".join(f"{value:>13,.2f}" for value in needs(way)))
    if activations(model, n, length, cfg, strategies(cfg, gpus)[0]) is None:
        print("activations are unknown: this model does not run on token ids alone")

    way, again = fitting(gpus), fitting(gpus, replace(cfg, gradient_checkpointing=True))
    spare = f"leaves {SPARE:.0%} of the memory free"
    if way:
        print(f"use accelerate_configs/{way.file}.yaml{way.flags}: the simplest that {spare}")
    else:
        print(f"nothing fits: no strategy {spare}")
        powers = (2**power for power in range(1, 13))
        if more := next((count for count in powers if count > gpus and fitting(count)), None):
            print(f"on {more:,} such devices accelerate_configs/{fitting(more).file}.yaml would")
    if again and (not way or again.file != way.file):
        print(f"with --gradient_checkpointing true accelerate_configs/{again.file}.yaml{again.flags} would")
    if not way:
        print("a smaller --per_device_batch_size or --max_length helps as well: docs/scaling.md")


def _own(argv: list[str]) -> tuple[list[str], int, float]:
    """Return (the other flags, number of devices, GiB of each)."""
    rest, given = [], {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in OWN:
            given[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    here = torch.cuda.is_available()
    try:
        gpus = int(given.get("gpus", torch.cuda.device_count() or 1))
        memory = float(given.get("gpu_memory", torch.cuda.get_device_properties(0).total_memory / GIB if here else 80))
    except ValueError:
        gpus = memory = 0
    if gpus < 1 or not 0 < memory < 1e6:
        said = " ".join(f"--{name} {value}" for name, value in given.items())
        raise UsageError(f"{said}: give a whole number of devices and GiB above zero, such as --gpus 8 --gpu_memory 80")
    return rest, gpus, memory


def _model(cfg: RunConfig, options) -> tuple[torch.nn.Module, int]:
    """Return (the task's model without weights, the length of its rows)."""
    from datasets import ClassLabel, Features

    from src.download import hub
    from src.download.cache_folder import cache_root
    from src.tasks import make_task

    if name := cfg.model_name_or_path:  # its weights are not fetched
        folder = hub.model_folder(
            name, cfg.model_revision, "model_name_or_path", cache_root(cfg), False, cfg.trust_remote_code
        )
        cfg = replace(cfg, model_name_or_path=folder)
    task = make_task(cfg, options)
    task.load()
    task.on_prepared(Features({"label": ClassLabel(num_classes=2)}))  # how many there are, only data would say
    with torch.device("meta"):
        return task.build(empty=True).train(), getattr(task, "max_length", 1)


if __name__ == "__main__":
    run_main(main)
