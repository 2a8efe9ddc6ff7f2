"""Task registry. Add a task here: a file in this folder and its line in OPTIONS. base.py defines the interface."""

from importlib import import_module

from src.config.schema import RunConfig
from src.tasks.base import Batch, Task

__all__ = ["OPTIONS", "Batch", "Task", "make_task"]


def _options(name: str):
    return lambda: import_module(f"src.tasks.{name}").Options  # imported only when needed, so --help stays fast


OPTIONS = {  # task name (also its file name) -> function that returns its Options dataclass
    "causal_lm": _options("causal_lm"),
    "text_classification": _options("text_classification"),
}


def make_task(cfg: RunConfig, options) -> Task:
    """Return the task that `cfg.task` names."""
    return import_module(f"src.tasks.{cfg.task}").Task(cfg, options)
