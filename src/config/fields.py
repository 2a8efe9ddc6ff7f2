"""One field of the run file: help, type, choices and bounds; read from YAML or a flag.

Every field of RunConfig and of a task's `Options` is made by `option(...)`. Tests: tests/config/test_config.py.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from src.config.errors import did_you_mean

ASK = "ask"
Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field declares besides its type and default."""

    help: str  # ends with "(default: …)" only where the default of the field does not say it
    choices: tuple = ()
    min: float | None = None
    max: float | None = None
    above: float | None = None  # a bound that is itself not allowed
    below: float | None = None
    # Whether a resumed run may change it: the numbers do not depend on it, or resume checks its effect (model and data
    # by content, the length by its learning rates). Any other change is refused.
    may_change_on_resume: bool = False
    # Whether `eval.py --checkpoint` uses the value that the checkpoint records: True, or a function that accepts it.
    # A checkpoint may come from anywhere, so never for what runs code or says where files are written. With ASK it is
    # not used, and eval.py names the flag to give. None: ASK for an option of a task, False for a field of the run.
    from_checkpoint: bool | str | Callable[[Any], bool] | None = None
    may_be_empty: bool = False  # whether --flag "" is a value
    is_path: bool = False  # may name a local file or folder: config.yaml then holds its absolute path
    group: str = ""  # of --help; fields without one belong to the group of the field above


def option(help: str, default: Any = None, **rules) -> Any:
    """Return a dataclass field with its help text, default and further `rules`, which are the fields of Option."""
    metadata = {"option": Option(help, **rules)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_options(kind: type) -> dict[str, Option]:
    """Return the Option of each field of a dataclass by its name."""
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
    text = (
        json.dumps(value, default=str) if isinstance(value, dict) else _text(value)
    )  # YAML: keys and dates become text
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {text}")
    return found


def _int_or_auto(value) -> int | str:
    return value if value == "auto" else _int(value)


# type of a field -> (function that reads it, its name in --help); `TYPE | None` and list[TYPE] are allowed, too
TYPES: dict[Any, tuple[Callable, str]] = {
    str: (_text, "TEXT"),
    int: (_int, "N"),
    float: (_float, "X"),
    bool: (_bool, "true|false"),
    dict: (_json_object, "JSON"),
    int | Auto: (_int_or_auto, "N|auto"),
}
TYPES |= {kind | None: entry for kind, entry in TYPES.items()}


def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass; TypeError names a field of a type that cannot be read."""
    types = get_type_hints(kind)
    for name, type_ in types.items():
        if (get_args(type_)[0] if get_origin(type_) is list else type_) not in TYPES:
            raise TypeError(
                f"{kind.__qualname__}.{name}: a field is str, int, float, bool, dict (or None), or list[str]"
            )
    return types


def read_value(type_: Any, rules: Option, value: Any) -> Any:
    """Return `value`, from YAML or the list of words after a flag, as `type_`; ValueError says what was expected."""
    values = value if isinstance(value, list) else [value]
    if "" in values and not rules.may_be_empty:
        raise ValueError("the value is empty: omit the field, or give a value")
    if get_origin(type_) is list:
        return _read_list(get_args(type_)[0], values)
    if not values and TYPES[type_][0] is _bool:
        return True  # a flag without a value
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
        if str(value).startswith("--"):  # from a file: on the command line it would be a flag
            raise ValueError(f"{value!r} would be a flag: write ./{value} if it is a file")
    return [TYPES[type_][0](value) for value in values]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def range_errors(config: Any) -> list[str]:
    """Return an error for each number in a dataclass that is outside the bounds of its field."""
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
