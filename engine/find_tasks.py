"""Find tasks: each file of src/tasks/ and addons/tasks/ is one, and registers nowhere; engine/task.py defines the interface."""

from functools import partial
from importlib import import_module
from typing import Any

from engine.config.errors import UsageError, did_you_mean
from engine.config.find_addons import addon_names
from engine.config.paths import REPOSITORY
from engine.config.run_config import RunConfig
from engine.rows.columns import check_parts
from engine.task import REQUIRED, Batch, Task

__all__ = ["MODULES", "OPTIONS", "Batch", "Task", "make_task"]

# name of a task -> its module
MODULES = {path.stem: f"src.tasks.{path.stem}" for path in sorted((REPOSITORY / "src" / "tasks").glob("[a-z]*.py"))}
MODULES |= {name: f"addons.tasks.{name}" for name in addon_names("tasks")}


def _options(name: str) -> type:
    return _class_of_task(name, "Options")


def _class_of_task(name: str, wanted: str) -> Any:
    """Return the class `wanted` of a task's module; raise UsageError if it has none."""
    module = import_module(MODULES[name])
    if not hasattr(module, wanted):
        classes = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise UsageError(f"task {name}: {_file_of_task(name)} has no class {wanted}{did_you_mean(wanted, classes)}")
    return getattr(module, wanted)


def _file_of_task(name: str) -> str:
    return getattr(import_module(MODULES[name]), "__file__", MODULES[name])


# name of a task -> function that returns its dataclass of options; it imports the task
OPTIONS = {name: partial(_options, name) for name in MODULES}


def make_task(cfg: RunConfig, options: Any) -> Task:
    """Return the task that `cfg.task` names. Raise UsageError if its class lacks a method that has to be defined."""
    task_class = _class_of_task(cfg.task, "Task")
    for name in REQUIRED:
        if getattr(task_class, name, None) in (None, getattr(Task, name)):
            own = set(dir(task_class)) - set(dir(Task))
            raise UsageError(
                f"task {cfg.task}: {task_class.__name__} in {_file_of_task(cfg.task)} has no method `{name}`"
                f"{did_you_mean(name, own)} (engine/task.py says what it returns)"
            )
    if hasattr(task_class, "compute_gradient"):
        raise UsageError(
            f"task {cfg.task}: {task_class.__name__} in {_file_of_task(cfg.task)} has a method `compute_gradient`, which is "
            "not called: define `wrap_gradient(compute)`, which returns that function (engine/task.py)"
        )
    check_parts(cfg.columns, getattr(task_class, "parts", Task.parts), cfg.task)
    return task_class(cfg, options)
