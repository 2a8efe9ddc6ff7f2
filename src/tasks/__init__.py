"""Task registry: each file of src/tasks/ and addons/tasks/ is a task. base.py defines the interface."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from src.config.addons import addon_names
from src.config.schema import RunConfig
from src.tasks.base import Batch, Task

__all__ = ["MODULES", "OPTIONS", "Batch", "Task", "make_task"]

# name of a task -> its module
MODULES = {path.stem: f"src.tasks.{path.stem}" for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))}
del MODULES["base"]
MODULES |= {name: f"addons.tasks.{name}" for name in addon_names("tasks")}


def _options(name: str) -> type:
    return import_module(MODULES[name]).Options


# name of a task -> function that returns its dataclass of options; it imports the task
OPTIONS = {name: partial(_options, name) for name in MODULES}


def make_task(cfg: RunConfig, options: Any) -> Task:
    """Return the task that `cfg.task` names."""
    return import_module(MODULES[cfg.task]).Task(cfg, options)
