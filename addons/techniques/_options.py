"""Options of a technique: read from the field `techniques`, with defaults, in words.

Tests: tests/addons/techniques/test_technique_chain.py, tests/engine/checkpointing/test_run_identity.py.
"""

from typing import Any

from addons.techniques import Technique
from engine.config.errors import did_you_mean
from engine.config.option import declared_options, read_values


def read_options(kind: type[Technique], given: Any) -> Technique:
    """Return a technique with the options `given` (null or true: all defaults); raise ValueError for an invalid one.

    An option that is null has its default."""
    given = {} if given is None or given is True else given
    if given is False:
        raise ValueError("false: to train without it, remove the entry")
    if not isinstance(given, dict):
        raise ValueError(f"expected options as {{NAME: VALUE}}, found {given!r}")
    rules = declared_options(kind)
    if unknown := [str(name) for name in given if name not in rules]:
        text = f"{unknown[0]}: unknown option{did_you_mean(unknown[0], rules)}"
        raise ValueError(f"{text}; it has {', '.join(rules) or 'none'}")
    changed = {name: value for name, value in given.items() if value is not None and value != rules[name].default}
    values, errors = read_values(changed, rules)
    if errors:
        raise ValueError("; ".join(errors.values()))
    return kind(**values)


def options_of(technique: Technique) -> dict[str, Any]:
    """Return the values of all options of a technique, defaults, too."""
    return {name: getattr(technique, name) for name in declared_options(type(technique))}


def in_words(options: dict[str, Any]) -> str:
    """Return "decay 0.999, final": each option with its value, without those that are off."""
    on = {name: value for name, value in options.items() if value is not None and value is not False}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in on.items())
