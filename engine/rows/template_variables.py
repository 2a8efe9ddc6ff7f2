"""Variables of chat templates (`enable_thinking`, …): which ones a template reads, and the values that a row gives.

Tests: tests/engine/rows/test_template_choice.py and tests/engine/rows/test_chat.py.
"""

import functools
import inspect
import json
import re
from typing import Any

from engine.config.errors import warn_once
from engine.rows.chat_turns import from_json
from engine.rows.render_chat import without_marks

THINKING = frozenset({"enable_thinking", "thinking"})  # false: the prompt lets no model reason
DEFAULTS = re.compile(r"\{#- defaults of a run: (.*) -#\}\n")  # see with_defaults
OF_TRANSFORMERS = ("messages", "raise_exception", "strftime_now")


def with_defaults(template: Any, variables: dict[str, Any]) -> Any:
    """Return a chat template, or each of several, that has these values of variables where a program gives none."""
    if isinstance(template, dict):
        return {name: with_defaults(each, variables) for name, each in template.items()}
    if not variables:
        return template
    mark = json.dumps(variables, sort_keys=True).replace("#", "\\u0023")  # a # could end the comment
    lines = [f"{{#- defaults of a run: {mark} -#}}\n"]
    for name, value in sorted(variables.items()):
        lines.append(f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n")
    return "".join(lines) + template


def _literal(value: Any) -> str:
    """Return a value as Jinja writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def split_defaults(template: Any) -> tuple[Any, dict[str, Any]]:
    """Return a chat template, or several, without what `with_defaults` has put before it, and those values."""
    if isinstance(template, dict):
        parts = {name: split_defaults(each) for name, each in template.items()}
        defaults = {name: value for _, values in parts.values() for name, value in values.items()}
        return {name: each for name, (each, _) in parts.items()}, defaults
    match = DEFAULTS.match(template)
    if not match:
        return template, {}
    defaults = json.loads(match[1])
    return "".join(template.splitlines(keepends=True)[1 + len(defaults) :]), defaults


@functools.lru_cache
def names_in(template: str) -> frozenset[str]:
    """Return the names that a chat template reads. Raise jinja2.TemplateSyntaxError if it is no Jinja template."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(without_marks(template))))


@functools.lru_cache
def variables_of(tokenizer: Any, template: str) -> frozenset[str]:
    """Return the variables of a chat template that a run or a row may set: not its turns, its tools or special tokens."""
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters
    return names_in(template) - {*arguments, *OF_TRANSFORMERS, *tokenizer.special_tokens_map}


def read_variables(given: Any, tokenizer: Any, *templates: str) -> dict[str, Any]:
    """Return the variables that a row gives, a mapping or JSON text, without nulls and those that no template reads.

    Raise ValueError for another value."""
    values = from_json(given, "`chat_template_kwargs` of the row")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"`chat_template_kwargs` of the row is {type(values).__name__}: give names and values")
    values = {name: value for name, value in values.items() if value is not None}  # where others have it, in Parquet
    names = {name for template in templates for name in variables_of(tokenizer, template)}
    ignored = sorted(values.keys() - names)
    for name in ignored:
        warn_once(f"chat_template_kwargs of rows: the chat template does not read {name}: it is not used")
    return {name: value for name, value in values.items() if name not in ignored}
