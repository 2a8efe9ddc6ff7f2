"""Declaration of one field of the run file (YAML): help, type, choices, bounds; reader of its value.

Declare every field of RunConfig and of a task's `Options` by `option(...)`. Tests: tests/config/test_config.py.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from src.config.errors import did_you_mean
from src.config.yaml_files import Loader

ASK = "ask"
Auto = Literal["auto"]
MAPPING = "{NAME: VALUE, …}"


@dataclasses.dataclass(frozen=True)
class Option:
    """Help text and rules of a field, besides its type and default."""

    help: str  # ends with "(default: …)" only if the default in the dataclass does not tell the effect
    choices: tuple = ()
    min: float | None = None
    max: float | None = None
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    # True if a resumed run may change this field: the results do not depend on the field, or resume compares what it
    # determines (content of model and data, past learning rates). Resume refuses to change any other field.
    may_change_on_resume: bool = False
    # True if `eval.py --checkpoint` uses the value recorded in the checkpoint; a function accepts only safe values.
    # A checkpoint may be untrusted, so never True for a field that runs code or names a folder to write to. With ASK,
    # eval.py ignores the value and names the flag to give. None: ASK for a task's option, False for a RunConfig field.
    from_checkpoint: bool | str | Callable[[Any], bool] | None = None
    may_be_empty: bool = False  # True if --flag "" is a valid value
    is_path: bool = False  # may name a local file or folder; config.yaml then records the absolute path
    group: str = ""  # heading in --help; a field without a group belongs to the group of the field above


def option(help: str, default: Any = None, **rules) -> Any:
    """Declare a dataclass field by its help text, default, and `rules`: any other fields of Option."""
    metadata = {"option": Option(help, **rules)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_options(kind: type) -> dict[str, Option]:
    """Return {field name: Option} for all fields of a dataclass."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(kind)}


# ---- reading a value -------------------------------------------------------------------------------------------------


def _text(value) -> str:
    if isinstance(value, dict | list):
        raise ValueError(f"expected one value, found {json.dumps(value, default=str)}")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _int(value) -> int:
    try:
        return int(_text(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None


def _float(value) -> float:
    try:
        return float(_text(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _bool(value) -> bool:
    text = _text(value).lower()
    if text not in ("true", "t", "yes", "y", "1", "false", "f", "no", "n", "0"):
        raise ValueError(f"expected true or false, found {value!r}")
    return text in ("true", "t", "yes", "y", "1")


def _json_object(value) -> dict:
    found = value if isinstance(value, dict) else _mapping(_text(value))
    _check_keys(found)
    return _with_numbers(json.loads(json.dumps(found, default=str)))  # dates become text


def _mapping(text: str) -> dict:
    """Return a mapping in YAML or JSON; raise ValueError for anything else, and for a key that is given twice."""
    reason = ""
    try:
        found = json.loads(text, object_pairs_hook=_without_repeated_keys)
    except ValueError:
        try:
            found = yaml.load(text, Loader)
        except (ValueError, yaml.YAMLError) as error:
            found, reason = None, getattr(error, "problem", None) or ""
    if not isinstance(found, dict):
        raise ValueError(f"expected {MAPPING} in YAML or JSON, found {text}{reason and f': {reason}'}")
    return found


def _without_repeated_keys(pairs: list[tuple]) -> dict:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")  # the YAML reader says which
    return found


def _check_keys(value: Any) -> None:
    """Raise ValueError for a key that is not text, at any depth."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                word = yaml.safe_dump(key).split("\n")[0]
                raise ValueError(f'the key {word} is not text: give a name, or write "{word}" if it is one')
    if isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            _check_keys(inside)


def _with_numbers(value: Any) -> Any:
    """Return `value` with texts such as 1e-5 as numbers: YAML 1.1 reads a number without a point as text."""
    if isinstance(value, dict):
        return {name: _with_numbers(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [_with_numbers(inside) for inside in value]
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE]-\d+", value) else value


def _int_or_auto(value) -> int | str:
    return value if value == "auto" else _int(value)


# type of a field -> (function that reads a value, placeholder in --help); `TYPE | None` and list[TYPE] also work
TYPES: dict[Any, tuple[Callable, str]] = {
    str: (_text, "TEXT"),
    int: (_int, "N"),
    float: (_float, "X"),
    bool: (_bool, "true|false"),
    dict: (_json_object, "{NAME: VALUE}"),
    int | Auto: (_int_or_auto, "N|auto"),
}
TYPES |= {kind | None: entry for kind, entry in TYPES.items()}


def field_types(kind: type) -> dict[str, Any]:
    """Return {field name: type} for a dataclass. Raise TypeError if no reader supports the type of a field."""
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    for name, type_ in types.items():
        if (get_args(type_)[0] if get_origin(type_) is list else type_) not in TYPES:
            raise TypeError(
                f"{kind.__qualname__}.{name}: a field is str, int, float, bool, dict (or None), or list[str]"
            )
    return types


def read_value(type_: Any, rules: Option, value: Any) -> Any:
    """Convert a value from YAML, or the list of words after a flag, to `type_`. Raise ValueError if it is invalid."""
    values = value if isinstance(value, list) else [value]
    if "" in values and not rules.may_be_empty:
        raise ValueError("the value is empty: omit the field, or give a value")
    if get_origin(type_) is list:
        return _read_list(get_args(type_)[0], values)
    if not values and TYPES[type_][0] is _bool:
        return True  # a flag without a value
    if len(values) > 1 and TYPES[type_][0] is _json_object:
        raise ValueError(f"expected {MAPPING}, found [{', '.join(map(str, values))}]")
    if len(values) != 1:
        raise ValueError(f"expected one value, found {' '.join(map(str, values)) or 'none'}")
    found = TYPES[type_][0](values[0])
    if rules.choices and found not in rules.choices:
        names = ", ".join(map(repr, rules.choices))
        raise ValueError(f"{found!r} is not one of {names}{did_you_mean(str(found), map(str, rules.choices))}")
    return found


def _read_list(type_: Any, values: list) -> list:
    if not values:
        raise ValueError("expected one value or more, found none")
    for value in values:
        if str(value).startswith("--"):  # a value from YAML: on the command line it would be a flag
            raise ValueError(f"{value!r} would be a flag: write ./{value} if it is a file")
    return [TYPES[type_][0](value) for value in values]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def range_errors(config: Any) -> list[str]:
    """Return one error for each number in a dataclass that is out of the bounds of its field."""
    errors = []
    for name, rules in declared_options(type(config)).items():
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (bound := _violated_bound(value, rules)):
            errors.append(f"{name} is {value}: {bound}")
    return errors


def _violated_bound(value: float, rules: Option) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    if rules.min is not None and value < rules.min:
        return f"it must be at least {rules.min}"
    if rules.above is not None and value <= rules.above:
        return f"it must be above {rules.above}"
    if rules.max is not None and value > rules.max:
        return f"it must be at most {rules.max}"
    if rules.below is not None and value >= rules.below:
        return f"it must be below {rules.below}"
    return None
