"""Fingerprint of the code behind a task's `encode`: part of the cache key of prepared data.

Tests: tests/data/test_dataset.py.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

ROOTS = ("inspect_columns", "encode")  # the methods that turn raw rows into prepared ones


def encode_fingerprint(task) -> str:
    """Return the code in src/ that a task's `inspect_columns` and `encode` can reach, without comments and docstrings.

    The search follows names: functions, classes and constants of a module, attributes of modules, and task methods.
    It does not find code called in other ways, such as through a dict of functions: add that to the task's
    `fingerprint`."""
    kind = type(task)
    pending = [getattr(kind, name) for name in ROOTS]
    found: dict[str, str] = {}
    while pending:
        item = inspect.unwrap(pending.pop())
        key = f"{item.__module__}.{item.__qualname__}"
        if key in found:
            continue
        found[key] = _source(item)
        for function in _functions(item):
            methods = [getattr(kind, name, None) for name in _names(function.__code__)]
            pending += [method for method in methods if isinstance(method, FunctionType)]
            for name, value in _globals(function):
                if isinstance(value, FunctionType | type) or hasattr(value, "__wrapped__"):
                    if _ours(value.__module__):
                        pending.append(value)
                elif isinstance(value, int | float | str | bytes | tuple | frozenset):
                    found[f"{function.__module__}:{name}"] = repr(value)
    return "\n".join(f"{name} {text}" for name, text in sorted(found.items()))


def _ours(module: str | None) -> bool:
    return (module or "").startswith("src.")


def _functions(item) -> list[FunctionType]:
    """Return [item] for a function; for a class, the methods of it and of its base classes in src/."""
    if isinstance(item, FunctionType):
        return [item]
    if not isinstance(item, type):
        return []
    members = [value for kind in item.__mro__ if _ours(kind.__module__) for value in vars(kind).values()]
    members = [getattr(value, "__func__", getattr(value, "fget", value)) for value in members]
    return [value for value in members if isinstance(value, FunctionType)]


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names that a function and its nested functions use."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the global variables, and of the attributes of src/ modules, that a function uses."""
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
