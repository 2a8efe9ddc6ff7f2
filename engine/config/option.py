"""Declaration of one field of the run file (YAML): help, type, choices, bounds; check of its value by pydantic.

Declare every field of RunConfig and of a task's `Options` by `option(...)`. Tests: tests/engine/config/test_config.py.
"""

import dataclasses
import json
import operator
from contextlib import suppress
from functools import cache, reduce
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    with_config,
)
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict, is_typeddict

from engine.config.errors import did_you_mean, one_line
from engine.config.paths import Loader, check_length, expand

AS_GIVEN = "as given"
Auto = Literal["auto"]  # of old run files: read, but not offered by the JSON schema
NUMBERS = (int, float, bool, NoneType)  # the types of values that a checkpoint may choose


@dataclasses.dataclass(frozen=True)
class Option:
    """Help text and rules of a field, besides its type and default."""

    help: str  # ends with "(default: …)" only if the default in the dataclass does not tell the effect
    choices: tuple = ()  # all texts that the field may have
    min: float | None = None
    max: float | None = None
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    values: Any = None  # of a dict: the type of its values, such as a TypedDict
    # True if a resumed run may change this field: the results do not depend on the field, or resume compares what it
    # determines (content of model and data, past learning rates). Resume refuses to change any other field.
    may_change_on_resume: bool = False
    # Whether `eval.py --checkpoint` takes the value of the checkpoint, which may be anyone's. None: a number, a bool or a
    # choice, yes; a text, a list or a mapping, no (of a task, eval.py names the flag to give). Never True for a text
    # that names a folder to write to. False: never, without a word.
    from_checkpoint: bool | None = None
    may_be_empty: bool = False  # True if --flag "" is a valid value
    # May name a local file or folder, so ~ and $NAME are expanded. With True, config.yaml records the absolute path; with
    # AS_GIVEN, the name: of an output, and of what a resumed run compares by its name.
    is_path: bool | str = False
    is_rare: bool = False  # True if few runs set it: --help then only names it, and --help all shows it
    group: str = ""  # heading in --help; a field without a group belongs to the group of the field above


def option(help: str, default: Any = None, **rules) -> Any:
    """Declare a dataclass field by its help text, default, and `rules`: any other fields of Option."""
    metadata = {"option": Option(help, **rules)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_options(cls: type) -> dict[str, Option]:
    """Return {field name: Option} for all fields of a dataclass."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(cls)}


# ---- types -----------------------------------------------------------------------------------------------------------


def _text(value: Any) -> Any:
    """Return a number, bool or date, which YAML finds in words such as 2024 or no, as text."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if value is None or isinstance(value, str | list | dict) else str(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic would take it for 0 or 1
        raise ValueError("it should be a number")
    return value


def _read_text(text: str) -> Any:
    """Return what a text holds in YAML or JSON."""
    value = yaml.load(text, Loader)  # it also finds a key that is given twice
    with suppress(ValueError):
        value = json.loads(text)  # 1e5 is a number in JSON, but text in YAML 1.1
    return value


def _mapping(value: Any) -> Any:
    """Return text as the mapping that it holds, in YAML or JSON; raise ValueError if it holds none."""
    if isinstance(value, str):
        value = _read_text(value)
    if not isinstance(value, dict):
        raise ValueError("expected {NAME: VALUE, …} in YAML or JSON")
    return value


def _path(value: str, info: ValidationInfo) -> str:
    """Return the name of a file or folder, expanded if the user gave it: one from a checkpoint may be anyone's."""
    is_from_user = info.context is not None and info.context["from_user"]
    return check_length(expand(value) if is_from_user else value)


def as_list(value: Any) -> list:
    """Return a list unchanged, and any other value as a list with one item."""
    return value if isinstance(value, list) else [value]


# ---- the mappings `mixture`, `parameter_groups` and `gradient_checkpointing` -----------------------------------------

Name = Annotated[str, Field(min_length=1)]
Column = Annotated[Name, BeforeValidator(_text)]  # which YAML may take for a number
PathName = Annotated[Name, AfterValidator(_path)]
PathNames = Annotated[list[PathName], BeforeValidator(as_list)]


@with_config(ConfigDict(extra="forbid", strict=True))
class Source(TypedDict, total=False):
    """One dataset of `mixture`."""

    train_file: PathNames
    validation_file: PathNames
    dataset_name: PathName
    dataset_config_name: Name
    dataset_revision: Name
    dataset_split: Name
    weight: Annotated[float, Field(gt=0, le=1e100)]  # so that a sum of weights is finite


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class GroupFields(TypedDict, total=False):
    """What `parameter_groups` sets for the parameters of a pattern."""

    lr_factor: Annotated[float, Field(ge=0)]
    weight_decay: Annotated[float, Field(ge=0)]


@with_config(ConfigDict(extra="forbid", strict=True))
class Recomputation(TypedDict, total=False):
    """Which activations `gradient_checkpointing` recomputes, and where it keeps what it needs for that."""

    every_n_layers: Annotated[int, Field(ge=1)]
    offload: bool


# ---- adapters of pydantic --------------------------------------------------------------------------------------------


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return {field name: type} for a dataclass."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _with_rules(type_: Any, rules: Option) -> Any:
    """Return the declared type of a field with its rules, as pydantic takes it."""
    if get_origin(type_) is list:
        return Annotated[list[_with_rules(get_args(type_)[0], rules)], BeforeValidator(as_list)]  # pyrefly: ignore
    if get_origin(type_) in (Union, UnionType):
        return reduce(operator.or_, [_with_rules(part, rules) for part in get_args(type_)])
    if type_ == Auto:
        return SkipJsonSchema[Auto]
    if rules.choices:
        return Annotated[Literal[rules.choices], BeforeValidator(_text)]  # pyrefly: ignore
    if type_ is str:  # constraints stand before readers, so that the JSON schema shows them
        text = Annotated[str, Field(min_length=None if rules.may_be_empty else 1), BeforeValidator(_text)]
        return Annotated[text, AfterValidator(_path)] if rules.is_path else text  # pyrefly: ignore
    if type_ is dict:
        values = dict[str, rules.values or JsonValue]  # pyrefly: ignore
        if rules.values is Column:
            return Annotated[values, BeforeValidator(_mapping)]
        return Annotated[values, BeforeValidator(_mapping), WithJsonSchema({"type": "object"})]
    if is_typeddict(type_):
        schema = TypeAdapter(
            type_
        ).json_schema()  # inline: a reference would not be found in the schema of the run file
        del schema["title"], schema["description"]
        return Annotated[type_, BeforeValidator(_mapping), WithJsonSchema(schema)]
    if type_ in (int, float):
        allow_inf_nan = None if type_ is int else False
        bounds = Field(ge=rules.min, gt=rules.above, le=rules.max, lt=rules.below, allow_inf_nan=allow_inf_nan)
        return Annotated[type_, bounds, BeforeValidator(_number)]
    return type_


@cache
def _adapter(cls: type, name: str) -> TypeAdapter:
    """Return pydantic's type of a field of a dataclass, with help, default and rules."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    rules = field.metadata["option"]
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    extra: dict[str, Any] = {"default": default}
    if rules.group:
        extra["x-group"] = rules.group
    if rules.is_rare:
        extra["x-rare"] = True
    value = _with_rules(field_types(cls)[name], rules)
    return TypeAdapter(Annotated[value, Field(description=rules.help, json_schema_extra=extra)])


def json_schema(cls: type) -> dict[str, dict]:
    """Return the JSON schema of each field of a dataclass."""
    schemas = {name: _adapter(cls, name).json_schema() for name in field_types(cls)}
    for schema in schemas.values():
        if schema.get("type") == "array":  # one value stands for a list with one item
            items = schema["items"]
            others = [each["type"] for each in items.get("anyOf", [items]) if each["type"] != "array"]
            schema["type"] = ["array", *others]
    return schemas


# ---- values ----------------------------------------------------------------------------------------------------------


def is_from_checkpoint(cls: type, name: str) -> bool:
    """Return whether eval.py takes the field `name` of a dataclass from a checkpoint, which may be anyone's.

    A number, a bool or a choice cannot name a file or code; a text, a list or a mapping has to be declared harmless."""
    rules = declared_options(cls)[name]
    if rules.from_checkpoint is not None:
        return rules.from_checkpoint
    type_ = field_types(cls)[name]
    parts = get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)
    return bool(rules.choices) or all(part in NUMBERS or get_origin(part) is Literal for part in parts)


def read_words(cls: type, name: str, words: list[str]) -> Any:
    """Return the words after a flag as the type of the field `name` of a dataclass. Raise ValueError as read_value."""
    type_ = field_types(cls)[name]
    if not words and bool in (type_, *get_args(type_)):
        return True  # a flag without a value
    if get_origin(type_) is list and words:
        return _read_list(cls, name, words)
    if len(words) != 1:
        words_text = " ".join(words) or "none"
        raise ValueError(f"{name}: expected one value, found {words_text} ({declared_options(cls)[name].help})")
    return read_value(cls, name, words[0])


def _read_list(cls: type, name: str, words: list[str]) -> list:
    """Return the words after the flag of a list as its items; a word that is a list in YAML or JSON is that list.

    A single word is the whole list, one of several is an item, such as a chat: a list of mappings."""
    (item,) = get_args(field_types(cls)[name])
    takes_chats = any(dict in get_args(part) for part in get_args(item))
    values = [_held(word, takes_chats) for word in words]
    return read_value(cls, name, values if len(values) > 1 else values[0])


def _held(word: str, takes_mappings: bool) -> Any:
    """Return the list that a word in brackets holds in YAML or JSON, or the mapping if that is taken; else the word."""
    value = None
    if (word[:1], word[-1:]) in (("[", "]"), ("{", "}")):
        with suppress(yaml.YAMLError, ValueError):
            value = _read_text(word)
    return value if isinstance(value, list) or (takes_mappings and isinstance(value, dict)) else word


def read_value(cls: type, name: str, value: Any, from_user: bool = True) -> Any:
    """Return a value from YAML or of a flag as the type of the field `name` of a dataclass; raise ValueError if invalid.

    `from_user` is False for a value of a checkpoint."""
    try:
        return _adapter(cls, name).validate_python(value, context={"from_user": from_user})
    except ValidationError as error:
        problems = error.errors(include_url=False)  # several for a union, and for items of a list or mapping
        parts = get_args(field_types(cls)[name]) or (field_types(cls)[name],)
        rules = declared_options(cls)[name]
        keys = next((part for part in parts if is_typeddict(part)), rules.values)
        if any(
            is_typeddict(part) for part in parts
        ):  # a mapping with wrong keys is meant as no other type of the union
            of_keys = [problem | {"loc": problem["loc"][1:]} for problem in problems if len(problem["loc"]) > 1]
            problems = of_keys or problems
            in_mapping = bool(of_keys)
        else:
            in_mapping = dict in parts
        text = "; ".join(_sentence(problem, rules, keys, in_mapping) for problem in problems)
    except yaml.YAMLError as error:
        text = one_line(error)
    raise ValueError(f"{name}: {text} ({declared_options(cls)[name].help})")


def _sentence(problem: Any, rules: Option, keys: Any, in_mapping: bool) -> str:
    """Return place, value and reason of an error of pydantic, with the nearest name for a choice or a key.

    `keys`: the TypedDict of the mapping or of its values, None if there is none."""
    place = [str(part) for part in problem["loc"] if in_mapping or isinstance(part, int)]  # no types of a union
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(place[-1], keys.__annotations__)
        return ": ".join([*place, f"unknown field{hint}"])
    value = problem["input"]
    reason = problem["msg"].removeprefix("Value error, ")
    hint = did_you_mean(str(value), rules.choices)
    return ": ".join([*place, repr(value), f"{reason}{hint}"])
