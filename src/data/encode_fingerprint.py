"""Fingerprint of the code behind a task's `encode`: part of the cache key of prepared data.

Tests: tests/data/test_dataset.py.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from src.tasks import base

ROOTS = ("inspect_columns", "encode")  # the methods that turn raw rows into prepared ones
# Methods that `encode` does not call: in its code these names are methods of other objects, such as `image.load()`.
LATER = vars(base.Task).keys() - {*ROOTS}


def encode_fingerprint(task) -> str:
    """Return the code in src/ and addons/ that a task's `inspect_columns` and `encode` can reach, without comments and docstrings.

    The search follows names: functions, classes and constants of a module, attributes of modules, methods and attributes
    of the task. It does not find code called in other ways, such as through a dict of functions: add that to the task's
    `fingerprint`."""
    methods = _methods(type(task))
    pending: list = [method for name in ROOTS for method in methods[name]]
    found: dict[str, str] = {}
    while pending:
        item = inspect.unwrap(pending.pop())
        key = f"{item.__module__}.{item.__qualname__}"
        if key in found:
            continue
        found[key] = _source(item)
        for function in _functions(item):
            names = _names(function.__code__)
            if function in methods.get(function.__name__, ()):
                pending += [method for name in names - LATER for method in methods.get(name, ())]
                used = [type(vars(task)[name]) for name in names & vars(task).keys() - {"cfg", "options"}]
                pending += [kind for kind in used if _ours(kind.__module__)]
            for name, value in _globals(function):
                if isinstance(value, FunctionType | type) or hasattr(value, "__wrapped__"):
                    if _ours(value.__module__):
                        pending.append(value)
                elif text := _constant(name, value):
                    found[f"{function.__module__}:{name}"] = text
    return "\n".join(f"{name} {text}" for name, text in sorted(found.items()))


def _methods(kind: type) -> dict[str, list[FunctionType]]:
    """Return the methods of a task by name, also those that `super()` calls."""
    found: dict[str, list[FunctionType]] = {}
    for base_class in kind.__mro__:
        for name, value in vars(base_class).items():
            if isinstance(function := _function(value), FunctionType):
                found.setdefault(name, []).append(function)
    return found


def _constant(name: str, value) -> str | None:
    """Return a constant of a module as text, the same in every process; None for any other variable."""
    is_container = isinstance(value, list | dict | set) and name.rpartition(".")[2].isupper()
    if not (is_container or isinstance(value, int | float | str | bytes | tuple | frozenset)):
        return None
    text = repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
    return None if " at 0x" in text else text  # the address of an object


def _ours(module: str | None) -> bool:
    return (module or "").startswith(("src.", "addons."))


def _functions(item) -> list[FunctionType]:
    """Return [item] for a function; for a class, the methods of it and of its base classes in src/ and addons/."""
    if isinstance(item, FunctionType):
        return [item]
    if not isinstance(item, type):
        return []
    members = [_function(value) for kind in item.__mro__ if _ours(kind.__module__) for value in vars(kind).values()]
    return [value for value in members if isinstance(value, FunctionType)]


def _function(member):
    """Return the function of a static method, class method or property; any other member as it is."""
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, None) or member
    return inspect.unwrap(member) if callable(member) else member


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names that a function and its nested functions use."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the global variables, and of the attributes of our modules, that a function uses."""
    names = _names(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            if _ours(value.__name__):
                yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in sorted(names & vars(value).keys()))
        else:
            yield name, value


@functools.cache
def _source(item) -> str:
    """Return the syntax tree (AST) of a function or class as text, without docstrings. An AST has no comments."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
    except (OSError, TypeError, SyntaxError):  # created at run time, without source: use its bytecode and constants
        code = getattr(item, "__code__", None)
        return repr((code.co_code, code.co_consts, code.co_names)) if code else repr(item)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = None
    return ast.dump(tree)
