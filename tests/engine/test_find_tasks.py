"""Tasks by name: a class that is missing, or that lacks a method, is one sentence before anything else happens."""

import inspect
import sys
from types import SimpleNamespace

import pytest

from engine import task as base
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.find_tasks import MODULES, OPTIONS, make_task
from tests.helpers import kit, plain_task

pytestmark = pytest.mark.usefixtures("plain")


def module_with(monkeypatch, **classes) -> None:
    """Put a module with these classes in place of that of the plain task."""
    module = SimpleNamespace(__file__="src/tasks/plain.py", Options=plain_task.Options, **classes)
    monkeypatch.setitem(sys.modules, MODULES["plain"], module)


def without(name: str, misspelled: str | None = None) -> type:
    """Return the plain task without a method, or with one that is misspelled."""
    own = {key: value for key, value in vars(plain_task.Task).items() if key != name}
    if misspelled:
        own[misspelled] = getattr(plain_task.Task, name)
    return type("Task", (base.Task,), own)


def test_required_methods_are_those_that_the_base_class_leaves_open():
    methods = inspect.getmembers(base.Task, inspect.isfunction)
    left_open = {name for name, method in methods if "raise NotImplementedError" in inspect.getsource(method)}
    assert left_open == set(base.REQUIRED)


@pytest.mark.parametrize("name", base.REQUIRED)
def test_a_missing_method_is_named_with_its_task_and_file(monkeypatch, name):
    module_with(monkeypatch, Task=without(name))
    with pytest.raises(UsageError, match=rf"^task plain: Task in src/tasks/plain\.py has no method `{name}`"):
        make_task(RunConfig(task="plain"), plain_task.Options())
    module_with(monkeypatch, Task=without(name, misspelled=f"{name}_"))
    with pytest.raises(UsageError, match=f"did you mean {name}_"):
        make_task(RunConfig(task="plain"), plain_task.Options())


def test_a_method_of_an_older_version_that_is_not_called_any_more_is_refused(monkeypatch):
    old = type("Task", (plain_task.Task,), {"compute_gradient": lambda self: None})
    module_with(monkeypatch, Task=old)
    with pytest.raises(UsageError, match=r"^task plain: .*compute_gradient.* define `wrap_gradient\(compute\)`"):
        make_task(RunConfig(task="plain"), plain_task.Options())


def test_a_class_that_is_not_derived_may_have_all_methods(monkeypatch):
    """A class of its own that lacks one is refused as well."""
    own = {name: getattr(plain_task.Task, name) for name in base.REQUIRED if name != "loss"}
    own |= {"__init__": base.Task.__init__}
    module_with(monkeypatch, Task=type("Own", (), own | {"loss": plain_task.Task.loss}))
    make_task(RunConfig(task="plain"), plain_task.Options())
    module_with(monkeypatch, Task=type("Own", (), own))
    with pytest.raises(UsageError, match=r"Own in .* has no method `loss`"):
        make_task(RunConfig(task="plain"), plain_task.Options())


def test_a_module_without_a_class_is_named(monkeypatch):
    module_with(monkeypatch, Tasks=plain_task.Task)
    with pytest.raises(UsageError, match=r"^task plain: src/tasks/plain\.py has no class Task; did you mean Tasks"):
        make_task(RunConfig(task="plain"), plain_task.Options())


def test_a_run_ends_at_once_with_exit_code_2(plain, tmp_path, monkeypatch):
    module_with(monkeypatch, Task=without("collate"))
    argv = [*plain_task.flags(plain, max_steps=1), "--output_dir", "run"]
    codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2)
    assert codes == [2, 2], outputs
    assert outputs[0].rstrip().splitlines()[-1].startswith("error: task plain: Task in ")
    assert "Traceback" not in "".join(outputs)
    assert not (tmp_path / "here" / "run").exists()


def test_every_task_of_this_copy_is_complete():
    for name in OPTIONS:
        make_task(RunConfig(task=name), OPTIONS[name]())
