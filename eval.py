"""Evaluate a run, a checkpoint or a Hub model: accelerate launch eval.py [--checkpoint runs/stdlib_lm]

The loss equals the one that train.py reported, to the last digit, on any number of processes.
"""

from pathlib import Path

from engine import startup

if __name__ == "__main__":
    startup.begin()  # before the slow imports: checks the installation, answers --help and --schema, ends at Ctrl-C

# isort: split
from engine.checkpointing import locate_weights
from engine.config import parsing, validation
from engine.config.errors import UsageError
from engine.distributed.backends import Backend
from engine.distributed.choose_backend import make_backend
from engine.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from engine.find_tasks import OPTIONS, make_task
from engine.plan.dataset import check_same_data, prepare_datasets
from engine.process.console import table
from engine.process.exit_codes import run_main
from engine.run.answers import answer_samples
from engine.run.model_with_loss import ModelWithLoss
from engine.run.run_record import write_evaluation
from engine.task import Task
from src.fields import RunConfig
from src.training.environment import topology
from src.training.evaluation import evaluate
from src.training.training_model import choose_kernels


def main(argv: list[str]) -> None:
    argv, base, step = locate_weights.evaluation_args(argv)  # base: the checkpoint's config, which flags override
    cfg, options = parsing.parse(argv, OPTIONS, base)
    validation.check(cfg, options, training=False)
    check_environment()

    task = make_task(cfg, options)
    splits = prepare_datasets(cfg, task, wanted=("validation",))
    accelerator = init_accelerator(cfg)
    backend = make_backend(accelerator, cfg)
    check_same_data(splits)
    check_same_weights(accelerator, cfg.model_name_or_path)
    locate_weights.warn_of_precision(cfg, accelerator.mixed_precision)
    weights = cfg.model_name_or_path if base is not None else None  # of --checkpoint, with its adapter if it has one
    evaluate_and_report(cfg, task, splits["validation"], backend, step, weights)
    shutdown(accelerator)


def check_same_weights(accelerator, name: str | None) -> None:
    """Raise UsageError on all ranks if they found different weights, because a running training saved meanwhile."""
    from accelerate.utils import gather_object

    names = sorted({str(each) for each in gather_object([name])})
    if len(names) > 1:
        raise UsageError(f"checkpoint: ranks found {' and '.join(names)}: give one of them as --checkpoint")


def evaluate_and_report(
    cfg: RunConfig, task: Task, split, backend: Backend, step: int | None, weights: str | None
) -> None:
    """Evaluate the model on `split`; print the metrics and write eval.json. `weights`: as of `Task.build`."""
    accelerator = backend.accelerator
    choose_kernels(cfg, task, split, accelerator.device)
    model = ModelWithLoss(backend.build_model(task, weights), task)
    module = backend.prepare_for_evaluation(model)
    metrics = evaluate(backend, module, task, split, cfg)
    samples = answer_samples(backend, module, task, cfg) or []
    if accelerator.is_main_process:
        rows = topology(backend, cfg, training=False) | {"model": cfg.model_name_or_path}
        print(table(rows), end="\n\n")
        write_evaluation(Path(cfg.output_dir), step, metrics, samples)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    run_main(main)
