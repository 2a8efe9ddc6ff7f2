"""Add-ons: files and folders of addons/, found by listing them, imported only if a run file or a launch names them.

A run file names a task by `task`, an optimizer by `optim`, a schedule by `lr_scheduler_type`, and every other add-on by
a field that its class declares (engine/config/addon.py); an accelerate file names a backend.
Tests: tests/project/test_without_addons.py.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.config.addon import Addon, check_names, overrides
from engine.config.errors import UsageError
from engine.config.option import declared_options
from engine.config.paths import REPOSITORY, SCHEMA_FILE
from engine.config.run_config import RunConfig, config_class

ADDONS = REPOSITORY / "addons"
NAMED_BY = {"tasks": "task", "techniques": "techniques", "optimizers": "optim", "schedules": "lr_scheduler_type"}


def addon_names(room: str) -> list[str]:
    """Return the names of the add-ons in addons/ROOM, its files and folders, that have all that they need."""
    folder = ADDONS / room
    if not folder.is_dir():
        return []
    names = []
    for path in folder.glob("[!_]*"):
        file = path / "__init__.py" if path.is_dir() else path
        if file.suffix == ".py" and file.exists() and not missing_need(file):
            names.append(path.stem)
    return sorted(names)


def needs_of(file: Path) -> list[str]:
    """Return the paths that the first line of an add-on's file names (`# Needs addons/tasks/distillation/ and …`)."""
    with file.open(encoding="utf-8") as lines:
        first = lines.readline()
    return re.findall(r"\baddons/[\w/]+(?:\.py)?", first) if first.startswith("# Needs ") else []


def missing_need(file: Path) -> str | None:
    """Return the first path that an add-on's file needs, or that one of these needs, and that is not here."""
    for need in needs_of(file):
        path = REPOSITORY / need
        path = path / "__init__.py" if path.is_dir() else path
        missing = missing_need(path) if path.exists() else need
        if missing:
            return missing
    return None


def load_addon(room: str, name: str) -> ModuleType:
    """Return the module addons/ROOM/NAME; raise UsageError if it is not there."""
    if name not in addon_names(room):
        raise UsageError(f"{name} is an add-on that is not here: restore addons/{room}/{name}, or do not use it")
    return import_module(f"addons.{room}.{name}")


# ---- add-ons with fields of their own --------------------------------------------------------------------------------


@cache
def addons_with_fields() -> tuple[type[Addon], ...]:
    """Return the classes derived from Addon, in the order of their paths; import their files."""
    classes = []
    for path in sorted(ADDONS.rglob("*.py")):
        declares = re.search(r"^class \w+\((\w+\.)?Addon\):", path.read_text(encoding="utf-8"), re.M)
        if declares and not missing_need(path):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            module = import_module(".".join(parts).removesuffix(".__init__"))
            classes += addon_classes(module)
    return tuple(classes)


def addon_classes(module: ModuleType) -> list[type[Addon]]:
    """Return the classes derived from Addon that a module defines; raise UsageError for a name that Addon does not know."""
    classes = []
    for value in vars(module).values():
        is_defined_here = isinstance(value, type) and value.__module__ == module.__name__
        if is_defined_here and issubclass(value, Addon):
            check_names(value)
            classes.append(value)
    return classes


def addons_declaring(names: Iterable[str]) -> list[type[Addon]]:
    """Return the add-ons that declare one of these fields, other than those of the core; import none if there is none."""
    names = set(names) - declared_options(config_class()).keys()
    return [cls for cls in addons_with_fields() if names & declared_options(cls).keys()] if names else []


def run_config(**values: Any) -> RunConfig:
    """Return a RunConfig with these values, and the add-ons that they are of."""
    addons = []
    for cls in addons_declaring(values):
        addon = cls(**{name: values.pop(name) for name in declared_options(cls) if name in values})
        if addon != cls():  # config.yaml of a run may name fields that were not given
            addons.append(addon)
    return config_class()(addons=tuple(addons), **values)


def missing_addon(name: str, value: Any = None) -> str | None:
    """Return a sentence if the field `name`, or its `value`, is of an add-on that is not here, or lacks what it needs."""
    known = known_addons()
    addon = known.get(name if value is None else f"{name}={value}")
    if not addon:
        return None
    path = REPOSITORY / addon
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    missing = missing_need(file) if file.exists() else f"{addon}/__init__.py" if path.is_dir() else addon
    if not missing:
        return None
    return f"{name}: this is of the add-on {addon}; {missing} is not here: restore it and what it imports, or do not use it"


def known_addons() -> dict[str, str]:
    """Return {field, or FIELD=VALUE: path of its add-on}: of those that are here, and of those that were once.

    configs/schema.json keeps the names of add-ons that were removed, and of those that `make fork` has left out."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) if SCHEMA_FILE.exists() else {}
    known = dict(schema.get("x-add-ons", {}))
    for room, field in NAMED_BY.items():
        known |= {f"{field}={name}": f"addons/{room}/{name}" for name in addon_names(room)}
    for addon in addons_with_fields():
        known |= dict.fromkeys(declared_options(addon), addon.__module__.replace(".", "/"))
    return known


def first_answer(answers: Iterable[Any]) -> Any:
    """Return the first answer of add-ons that is not None, None if there is none."""
    return next((answer for answer in answers if answer is not None), None)


def fields_of_addons_with(cfg: RunConfig, *methods: Callable[..., Any]) -> dict[str, Any]:
    """Return the fields, with their values unless these are None, of the add-ons that define one of these methods."""
    fields: dict[str, Any] = {}
    for addon in cfg.addons:
        if overrides(addon, *methods):
            fields |= {name: value for name, value in vars(addon).items() if value is not None}
    return fields


# ---- schedules -------------------------------------------------------------------------------------------------------


def schedule_addon(cfg: RunConfig) -> ModuleType | None:
    """Return the add-on that `lr_scheduler_type` names, None for a schedule of transformers."""
    name = cfg.lr_scheduler_type
    return load_addon("schedules", name) if name in addon_names("schedules") else None


def follows_evaluations(cfg: RunConfig) -> bool:
    """Return whether the schedule depends on the results of evaluations."""
    return hasattr(schedule_addon(cfg), "after_evaluation")
