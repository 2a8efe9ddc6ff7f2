"""Task registry. Add a task here: a file in this folder and its line in OPTIONS. base.py defines the interface."""

from importlib import import_module

from src.config.schema import RunConfig
from src.models.adapter_options import read_options
from src.tasks.base import Batch, Task

__all__ = ["OPTIONS", "Batch", "Task", "make_task"]


def _options(name: str):
    return lambda: import_module(f"src.tasks.{name}").Options  # imported only when needed, so --help stays fast


OPTIONS = {  # task name (also its file name) -> function that returns its Options dataclass
    "causal_lm": _options("causal_lm"),
    "distillation": _options("distillation"),
    "preference": _options("preference"),
    "masked_lm": _options("masked_lm"),
    "token_classification": _options("token_classification"),
    "seq2seq": _options("seq2seq"),
    "embeddings": _options("embeddings"),
    "text_classification": _options("text_classification"),
    "image_classification": _options("image_classification"),
    "segmentation": _options("segmentation"),
}


def make_task(cfg: RunConfig, options) -> Task:
    """Return the task that `cfg.task` names; raise UsageError for options of `peft` that are wrong."""
    if cfg.peft is not None:
        read_options(cfg)  # raises UsageError for invalid ones
    return import_module(f"src.tasks.{cfg.task}").Task(cfg, options)
