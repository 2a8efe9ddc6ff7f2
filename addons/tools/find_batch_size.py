"""Print the largest per_device_batch_size that fits in memory: make find-batch-size CONFIG=configs/stdlib_lm.yaml

It tries a forward and backward pass over the longest rows beside the state of the optimizer, in the precision and on the
processes of the accelerate file, and writes nothing. Tests: tests/addons/tools/test_find_batch_size.py.
"""

import gc
from dataclasses import replace

from engine import startup

if __name__ == "__main__":
    startup.begin(has_help=False)  # before the slow imports below: Ctrl-C ends it at once

# isort: split
import torch

from engine.checkpointing.locate_weights import init_weights
from engine.config import parsing, validation
from engine.config.errors import UsageError
from engine.distributed import backends
from engine.distributed.choose_backend import make_backend
from engine.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from engine.find_tasks import OPTIONS, Task, make_task
from engine.plan import dataset
from engine.process import exit_codes
from engine.process.exit_codes import run_main
from engine.rows.prepared_split import Split
from engine.run.techniques import make_techniques
from src.fields import RunConfig
from src.training import optimizers
from src.training.training_model import build_model

MOMENTS = 2  # tensors that AdamW keeps for each trained weight; others keep fewer


def main(argv: list[str]) -> None:
    cfg, task_options = parsing.parse(parsing.with_default_config(argv), OPTIONS)
    cfg = replace(cfg, per_device_batch_size=1, report_to=[])  # no tracker
    validation.check(cfg, task_options)
    check_environment()
    task = make_task(cfg, task_options)
    datasets = dataset.prepare_datasets(cfg, task, wanted=("train",))
    accelerator = init_accelerator(cfg)
    find(cfg, task, datasets, accelerator)
    shutdown(accelerator)  # now nothing may refer to the model


def find(cfg: RunConfig, task: Task, datasets: dict, accelerator) -> None:
    """Try sizes on all ranks, and print the line for the run file on one."""
    dataset.check_same_data(datasets)
    backend = make_backend(accelerator, cfg)
    train_set = datasets["train"]
    check_searchable(backend, cfg, train_set)
    model = build_model(cfg, backend, task, train_set, init_weights(cfg, task), make_techniques(cfg).change_model)
    optimizer = optimizers.make_optimizer(cfg, model, backend.can_fuse_optimizer)
    module, _ = backend.prepare(model, optimizer)
    share = max(1, cfg.global_batch_size // backend.data_world_size)
    size = largest_that_fits(backend, module, task, train_set, largest_power_of_two(share))
    if accelerator.is_main_process:
        processes = f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)}"
        print(f"The largest power of two that fits, at most the share of a process ({processes}) of global_batch_size:")
        print(f"per_device_batch_size: {size}")


def check_searchable(backend: backends.Backend, cfg: RunConfig, train_set: Split) -> None:
    """Raise UsageError where running out of memory would end or hang a process, or the longest rows are not known."""
    if backend.accelerator.device.type == "cpu":
        raise UsageError(
            "find-batch-size: a process that runs out of memory on a CPU is killed without an error, so nothing is tried: "
            "give a per_device_batch_size that you know to fit, such as 8"
        )
    if backend.is_sharded:
        raise UsageError(
            f"find-batch-size: under {backend.name} each pass is a collective, in which all ranks would wait for one that "
            "has run out of memory: try a per_device_batch_size by make smoke, and halve it until it fits"
        )
    if not hasattr(train_set, "longest"):
        raise UsageError("find-batch-size: the longest rows of a stream are not known: try sizes by make smoke")


def largest_power_of_two(number: int) -> int:
    """Return the largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)


def largest_that_fits(
    backend: backends.Backend, module: torch.nn.Module, task: Task, train_set: Split, size: int
) -> int:
    """Return the first of `size`, `size` / 2, … rows with a pass that fits on every rank; a collective."""
    with backend.buffers.unchanged():
        while size > 1 and backend.hosts.sum([lacks_memory(backend, module, task, train_set, size)])[0]:
            size //= 2
    return size


def lacks_memory(backend: backends.Backend, module: torch.nn.Module, task: Task, train_set: Split, size: int) -> bool:
    """Return whether a pass over `size` rows does not fit in memory beside the optimizer's moments."""
    # Without DDP: a rank could wait for an all-reduce that another rank, out of memory, never reaches.
    module = backend.accelerator.unwrap_model(module)
    device = backend.accelerator.device
    moments = []
    try:
        rows = train_set.rows(train_set.longest(size))
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        moments = [torch.empty_like(parameter) for parameter in trained * MOMENTS]
        inputs = {name: value.to(device) for name, value in task.collate(rows, training=True).inputs.items()}
        inputs.pop("target_positions", None)  # as if every token had a target: other rows of this length may
        out = module(inputs)
        torch.stack([value.float().sum() for value in out.values() if value.requires_grad]).sum().backward()
        return False
    except RuntimeError as error:
        if not exit_codes.is_out_of_memory(error):
            raise
        return True
    finally:
        moments.clear()
        module.zero_grad(set_to_none=True)
        torch.compiler.reset()  # torch compiles at most eight sizes
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run_main(main)
