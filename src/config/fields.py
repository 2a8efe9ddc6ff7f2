"""Declaration of one field of the run file (YAML): help, type, choices, bounds; check of its value by pydantic.

Declare every field of RunConfig and of a task's `Options` by `option(...)`. Tests: tests/config/test_config.py.
"""

import dataclasses
import json
import operator
from collections.abc import Callable
from contextlib import suppress
from functools import cache, reduce
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import (
    AllowInfNan,
    BeforeValidator,
    Field,
    JsonValue,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from src.config.errors import did_you_mean
from src.config.yaml_files import Loader

ASK = "ask"
Auto = Literal["auto"]
TRUTH = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(("false", "f", "no", "n", "0"), False)
BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number")  # errors of pydantic


@dataclasses.dataclass(frozen=True)
class Option:
    """Help text and rules of a field, besides its type and default."""

    help: str  # ends with "(default: …)" only if the default in the dataclass does not tell the effect
    choices: tuple = ()  # all values that the field may have
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


# ---- types -----------------------------------------------------------------------------------------------------------


def _spelled(kind: Callable) -> BeforeValidator:
    """Return a reader of text, such as 1e5 in YAML or a word after a flag, as the number that it spells."""

    def number(value: Any) -> Any:
        with suppress(ValueError):
            return kind(value) if isinstance(value, str) else value
        return value  # pydantic reports it

    return BeforeValidator(number)


def _truth(value: Any) -> Any:
    return TRUTH.get(value.lower(), value) if isinstance(value, str) else value


def _text(value: Any) -> Any:
    """Return a number, bool or date, which YAML finds in words such as 2024 or no, as text."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str | list | dict) else str(value)


def _mapping(value: Any) -> Any:
    """Return text as the mapping that it holds, in YAML or JSON; raise ValueError if it holds none."""
    reason = ""
    if isinstance(value, str):
        try:
            value = yaml.load(text := value, Loader)  # it also finds a key that is given twice
            with suppress(ValueError):
                value = json.loads(text)  # 1e5 is a number in JSON, but text in YAML 1.1
        except (ValueError, yaml.YAMLError) as error:
            reason = f": {getattr(error, 'problem', None) or error}"
    if not isinstance(value, dict):
        raise ValueError(f"expected {{NAME: VALUE, …}} in YAML or JSON{reason}")
    return value


def _as_list(value: Any) -> list:
    values = value if isinstance(value, list) else [value]
    for one in values:
        if str(one).startswith("--"):  # a value from YAML: on the command line it would be a flag
            raise ValueError(f"{one} would be a flag: write ./{one} if it is a file")
    return values


# type of a field -> (type for pydantic, its constraints and readers); `TYPE | None` and list[TYPE] also work.
# Strict: pydantic takes no bool for a number, and no 3.0 for a whole one.
TYPES: dict[Any, tuple[Any, list]] = {
    str: (str, [BeforeValidator(_text)]),
    int: (int, [Strict(), _spelled(int)]),
    float: (float, [Strict(), AllowInfNan(False), _spelled(float)]),
    bool: (bool, [Strict(), BeforeValidator(_truth)]),
    dict: (dict[str, JsonValue], [BeforeValidator(_mapping), WithJsonSchema({"type": "object"})]),
    Auto: (Auto, []),
}


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return {field name: type} for a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _parts(type_: Any) -> list[Any]:
    """Return the types of a union, or the type of the items of a list."""
    if type_ in TYPES:
        return [type_]
    return [part for part in get_args(type_) if part is not type(None)] or [type_]


def _for_pydantic(field: dataclasses.Field, type_: Any) -> Any:
    """Return the type of a field with its help, default and rules, as pydantic takes it."""
    rules: Option = field.metadata["option"]
    bounds = Field(ge=rules.min, gt=rules.above, le=rules.max, lt=rules.below)
    constraints = {int: bounds, float: bounds, str: Field(min_length=None if rules.may_be_empty else 1)}
    parts: list[Any] = []
    for part in _parts(type_):
        if part not in TYPES:
            raise TypeError(f"{field.name}: a field is str, int, float, bool, dict (or None), or a list of one of them")
        value_type, readers = TYPES[part]
        if rules.choices:
            parts.append(Annotated[Literal[rules.choices], readers[-1]])  # pyrefly: ignore
        else:  # constraints stand before readers, so that the JSON schema shows them
            parts.append(Annotated[value_type, constraints.get(part, Field()), *readers])
    parts += [None] if type(None) in get_args(type_) else []
    is_list = get_origin(type_) is list
    value = Annotated[list[parts[0]], BeforeValidator(_as_list)] if is_list else reduce(operator.or_, parts)
    extra = {"default": _default(field)} | ({"x-group": rules.group} if rules.group else {})
    return Annotated[value, Field(description=rules.help, json_schema_extra=extra)]


@cache
def _adapters(kind: type) -> dict[str, TypeAdapter]:
    types = field_types(kind)
    return {field.name: TypeAdapter(_for_pydantic(field, types[field.name])) for field in dataclasses.fields(kind)}


def _default(field: dataclasses.Field) -> Any:
    """Return the default of a field; a list is a copy."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def json_schema(kind: type) -> dict[str, dict]:
    """Return the JSON schema of each field of a dataclass."""
    schemas = {name: adapter.json_schema() for name, adapter in _adapters(kind).items()}
    for schema in schemas.values():
        if schema.get("type") == "array":  # one value stands for a list with one item
            schema["type"] = ["array", schema["items"]["type"]]
    return schemas


# ---- values ----------------------------------------------------------------------------------------------------------


class OutOfBoundsError(ValueError):
    """A number of the right type that is out of the bounds of its field."""

    def __init__(self, message: str, value: float):
        super().__init__(message)
        self.value = value


def read_words(kind: type, name: str, words: list[str]) -> Any:
    """Return the words after a flag as the type of its field. Raise ValueError and OutOfBoundsError as read_value."""
    type_ = field_types(kind)[name]
    if not words and bool in _parts(type_):
        return True  # a flag without a value
    if not words or (len(words) > 1 and get_origin(type_) is not list):
        words_text = " ".join(words) or "none"
        raise ValueError(f"{name}: expected one value, found {words_text} ({declared_options(kind)[name].help})")
    return read_value(kind, name, words if get_origin(type_) is list else words[0])


def read_value(kind: type, name: str, value: Any) -> Any:
    """Return a value from YAML, the words after a flag, or an object as the type of the field `name` of a dataclass.

    Raise ValueError if it is invalid, OutOfBoundsError if it is only out of bounds."""
    try:
        return _adapters(kind)[name].validate_python(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)  # several for a union, and for items of a list or mapping
    text, wrong, rules = " or ".join(map(_sentence, problems)), problems[0]["input"], declared_options(kind)[name]
    if problems[0]["type"] in BOUNDS and not isinstance(value, list):
        raise OutOfBoundsError(f"{name} is {wrong}: {text}", wrong)
    near = did_you_mean(str(wrong), map(str, rules.choices)) if rules.choices else ""
    raise ValueError(f"{name}: {wrong!r}: {text}{near} ({rules.help})")


def _sentence(problem: Any) -> str:
    if problem["loc"][-1:] == ("[key]",):
        word = yaml.safe_dump(problem["input"]).split("\n")[0]
        return f'the key {word} is not text: give a name, or write "{word}" if it is one'
    text = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return "the value is empty: omit the field, or give a value" if problem["type"] == "string_too_short" else text


def range_errors(config: Any) -> list[str]:
    """Return one error for each number in a dataclass that is out of the bounds of its field."""
    errors = []
    for name in declared_options(type(config)):
        try:
            read_value(type(config), name, getattr(config, name))
        except OutOfBoundsError as error:
            errors.append(str(error))
        except ValueError:
            pass  # an empty default
    return errors
