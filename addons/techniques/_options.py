"""Options of techniques: reading the field `techniques`, defaults, all values in words.

Tests: tests/addons/techniques/test_technique_chain.py, tests/checkpointing/test_run_identity.py.
"""

from collections.abc import Mapping
from typing import Any

from addons.techniques import TECHNIQUES, Technique
from src.config.addons import addons_with_fields
from src.config.errors import did_you_mean
from src.config.fields import declared_options, read_value
from src.config.schema import RunConfig
from src.tasks import OPTIONS


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
        name = unknown[0]
        if name in kind.removed_options:
            raise ValueError(f"{name}: unknown option: {kind.removed_options[name][1]}")
        raise ValueError(f"{name}: unknown option{did_you_mean(name, rules)}; it has {', '.join(rules) or 'none'}")
    values, errors, defaults = {}, [], kind()
    for name, value in given.items():
        default = getattr(defaults, name)
        if value is None or (type(value) is type(default) and value == default):  # [] too, as config.yaml records it
            continue
        try:
            values[name] = read_value(kind, name, value)
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError("; ".join(errors))
    return kind(**values)


def options_of(technique: Technique) -> dict[str, Any]:
    """Return the values of all options of a technique, defaults, too."""
    return {name: getattr(technique, name) for name in declared_options(type(technique))}


def in_words(options: Mapping[str, Any]) -> str:
    """Return "decay 0.999, final": each option with its value, without those that are off."""
    return ", ".join(
        name if value is True else f"{name} {_text(value)}"
        for name, value in options.items()
        if value is not None and value is not False
    )


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def with_defaults(given: dict | None) -> dict[str, dict]:
    """Return all options of each technique of the field `techniques`; of one that this version lacks, those given."""
    found = {}
    for name, options in (given or {}).items():
        kind = TECHNIQUES[name]() if name in TECHNIQUES else None
        known = options_of(kind()) if kind else {}
        removed = {key: value for key, (value, _) in kind.removed_options.items()} if kind else {}
        options = options if isinstance(options, dict) else {}
        found[name] = known | {key: value for key, value in options.items() if (key, value) not in removed.items()}
    return found


def explain_unknown(name: str, known: Mapping[str, Any]) -> str:
    """Return where the effect of `name` is to be had if it is no technique, else the nearest technique."""
    lower = name.lower()
    if lower in known:
        return f"unknown; did you mean {lower}?"
    if any(lower in declared_options(kind) for kind in (RunConfig, *(each.Fields for each in addons_with_fields()))):
        return f"is a field of the run file, not a technique: give {lower} outside techniques"
    for task, options in OPTIONS.items():
        if lower in declared_options(options()):
            return f"is an option of a task ({task}, …), not a technique: give {lower} outside techniques"
    return f"unknown{did_you_mean(lower, known)}; choose from {', '.join(known)}"
