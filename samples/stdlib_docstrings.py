"""stdlib_docstrings: functions without their docstring (`code`), and its first sentence (`docstring`)."""

import ast
import re
from pathlib import Path

from samples import _stdlib


def make(folder: Path) -> None:
    """Write train.jsonl, validation.jsonl and tokenizer/."""
    _stdlib.write_sample(folder, docstring_rows(), ["code", "docstring"])


def docstring_rows() -> dict[str, list[dict]]:
    """Return one row per function with a docstring: about 1 in 10 for validation, without copies of training rows."""
    rows = {"train": [], "validation": []}
    for path, text in _stdlib.module_sources():
        for source in _stdlib.functions(text):
            code, docstring = split_docstring(source)
            if 10 <= len(docstring) <= 200:
                split = "validation" if _stdlib.is_held_out(code, 10) else "train"
                rows[split].append({"code": code, "docstring": docstring, "path": path})
    return rows


def split_docstring(source: str) -> tuple[str, str]:
    """Return (source of a function without its docstring, the docstring's first sentence, or "" without one)."""
    try:
        function = ast.parse(source).body[0]
    except SyntaxError:  # a string at the left margin prevented the dedent
        return source, ""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    docstring, first = ast.get_docstring(function), function.body[0]
    if not docstring or len(function.body) == 1 or function.body[1].lineno == first.end_lineno:
        return source, ""
    lines = source.splitlines(keepends=True)
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return "".join(lines[: first.lineno - 1] + lines[first.end_lineno :]), re.split(r"(?<=\w\.) ", paragraph)[0]
