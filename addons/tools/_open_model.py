"""The model of a run, a checkpoint or a Hub model, opened to answer prompts: for `make chat` and `make predict`.

Tests: tests/addons/tools/test_chat_and_predict.py.
"""

from typing import Any, NamedTuple

from engine.checkpointing import locate_weights
from engine.config import parsing
from engine.config.errors import UsageError
from engine.distributed.backends import Backend
from engine.distributed.choose_backend import make_backend
from engine.distributed.init_accelerator import check_environment, init_accelerator
from engine.find_tasks import OPTIONS, make_task
from engine.run.model_with_loss import ModelWithLoss
from engine.task import Task


class OpenModel(NamedTuple):
    """A model that answers prompts, on each process of a launch."""

    cfg: Any  # RunConfig; `output_dir` is the run folder
    task: Task
    backend: Backend
    module: Any  # the wrapped ModelWithLoss, to call


def open_model(argv: list[str]) -> OpenModel:
    """Return the model that flags of eval.py name: --checkpoint, else --model_name_or_path, else the newest run.

    Raise UsageError if its task does not generate answers."""
    argv, base, _ = locate_weights.evaluation_args(argv)  # base: the checkpoint's config, which flags override
    cfg, options = parsing.parse(argv, OPTIONS, base)
    if not cfg.model_name_or_path:
        raise UsageError("no model: give RUN=folder, or ARGS='--model_name_or_path NAME'")
    check_environment()
    task = make_task(cfg, options)
    if hasattr(options, "predict_with_generate"):
        options.predict_with_generate = False  # the data of the run is not read
        options.sample_prompts = []
    task.load()
    if task.generation is None:
        raise UsageError(f"task {cfg.task} does not generate answers: give the run of a language model (causal_lm)")
    if task.generation.tokenizer is None:
        raise UsageError("the model has no tokenizer: give --tokenizer_name")
    accelerator = init_accelerator(cfg)
    backend = make_backend(accelerator, cfg)
    weights = cfg.model_name_or_path if base is not None else None  # of --checkpoint, with its adapter if it has one
    model = ModelWithLoss(backend.build_model(task, weights), task)
    return OpenModel(cfg, task, backend, backend.prepare_for_evaluation(model))


def most_tokens(task: Task, asked: int | None, default: int) -> int:
    """Return how many tokens an answer may have: `asked`, else `default`, or half of the model's positions if it has fewer.

    Raise UsageError if `asked` is not positive."""
    if asked is not None and asked < 1:
        raise UsageError(f"max_new_tokens is {asked}: give 1 or more")
    limit = task.generation.limit
    room = default if limit is None else max(1, min(default, limit // 2))
    return asked or room
