"""Evaluate a run, a checkpoint or a Hub model: accelerate launch eval.py [--checkpoint runs/stdlib_lm]

The loss of a run is the number that train.py reported, to the last digit, on any number of processes.
"""

import json
import os
from pathlib import Path

from src.checkpointing import locate_weights, run_identity
from src.config import parsing, validation
from src.config.errors import UsageError
from src.data.dataset import load, same_everywhere
from src.distributed import launch, prepare_model
from src.reporting.environment import topology
from src.runtime import run_status
from src.runtime.console import exact, table
from src.storage import atomic_folder
from src.storage.jsonl import strict
from src.tasks import OPTIONS, make_task
from src.training.evaluation import evaluate
from src.training.step import Objective


def main(argv: list[str]) -> None:
    argv, base, step = locate_weights.to_evaluate(
        or_newest_run(argv)
    )  # --checkpoint brings the run's config; flags win over it
    run, options = parsing.parse(
        argv, OPTIONS, base, {"checkpoint": "run, checkpoint or final model to evaluate, as it was trained"}
    )
    validation.check(run, options, training=False)
    launch.check_environment()

    task = make_task(run, options)
    splits = load(run, task, wanted=("validation",))
    accelerator = launch.start(run)
    same_everywhere(accelerator, splits)
    same_weights(accelerator, run.model_name_or_path)
    run_identity.warn_of_precision(run, accelerator)
    score(run, task, splits["validation"], accelerator, step)
    launch.finish(accelerator)


def or_newest_run(argv: list[str]) -> list[str]:
    """Return `argv` with the newest run of runs/ as checkpoint, if it names neither checkpoint nor model."""
    if parsing.given(argv) & {"checkpoint", "config", "model_name_or_path", "model_config", "help"} or "-h" in argv:
        return argv
    if argv and not argv[0].startswith("--"):
        raise UsageError(f"{argv[0]!r}: a flag was expected; did you mean --checkpoint {argv[0]}?")
    if (run := run_status.newest_run(Path("runs"))) is None:
        raise UsageError("checkpoint: there is no run in runs/ yet: train one first, or give --checkpoint FOLDER")
    if os.environ.get("RANK", "0") == "0":
        print(f"No checkpoint or model is given: evaluating the newest run, {run}", flush=True)
    return ["--checkpoint", str(run), *argv]


def same_weights(accelerator, name: str | None) -> None:
    """Raise UsageError on all ranks if they found different weights: a run that is still training saved in between."""
    from accelerate.utils import gather_object

    if len(found := sorted(map(str, set(gather_object([name]))))) > 1:
        raise UsageError(f"checkpoint: ranks found {' and '.join(found)}: give one of them as --checkpoint")


def score(run: parsing.RunConfig, task, split, accelerator, step: int | None) -> None:
    agree = launch.Agreement(accelerator, run.ddp_timeout)
    module = prepare_model.prepare_to_evaluate(
        accelerator, Objective(prepare_model.build(accelerator, task, None), task)
    )
    values = strict({"kind": "eval", "step": step} | evaluate(accelerator, agree, module, task, split, run))
    if accelerator.is_main_process:
        print(table(topology(accelerator, run, training=False) | {"model": run.model_name_or_path}) + "\n")
        print(table({k: exact(v) for k, v in values.items() if k != "kind"}))
        folder = Path(run.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        atomic_folder.rewrite(folder / "eval.json", json.dumps(values, allow_nan=False) + "\n")
        print(f"\nwritten to {(folder / 'eval.json').resolve()}")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    launch.main(main)
