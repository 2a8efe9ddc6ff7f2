"""Declaration of the fields of the run file (YAML): help, type, choices, bounds; check of their values by pydantic.

Declare every field of RunConfig and of a task's `Options` by `option(...)`. Tests: tests/engine/config/test_config.py.
"""

import dataclasses
import json
import operator
from collections.abc import Iterator
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
from typing_extensions import TypedDict, is_typeddict

from engine.config.errors import did_you_mean, one_line
from engine.config.paths import Loader, check_length, expand

AS_GIVEN = "as given"
NUMBERS = (int, float, bool, NoneType)  # the types of values that a checkpoint may choose


@dataclasses.dataclass(frozen=True)
class Option:
    """Help text and rules of a field."""

    help: str  # ends with "(default: …)" only if the default in the dataclass does not tell the effect
    choices: tuple = ()  # all texts that the field may have
    min: float | None = None
    max: float | None = None
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
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
    type: Any = None  # this and `default` as the dataclass has them
    default: Any = None


def option(help: str, default: Any = None, **rules) -> Any:
    """Declare a dataclass field by its help text, default, and `rules`: any other fields of Option."""
    metadata = {"option": Option(help, **rules)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def declared_options(cls: type) -> dict[str, Option]:
    """Return {field name: Option, with its type and default} of the fields of a dataclass that `option` declares."""
    types, defaults = get_type_hints(cls), cls()
    options = {}
    for field in dataclasses.fields(cls):
        if "option" in field.metadata:
            about = {"type": types[field.name], "default": getattr(defaults, field.name)}
            options[field.name] = dataclasses.replace(field.metadata["option"], **about)
    return options


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


def _path(value: str, info: ValidationInfo) -> str:
    """Return the name of a file or folder, expanded if the user gave it: one from a checkpoint may be anyone's."""
    return check_length(expand(value) if info.context else value)


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _parts(type_: Any) -> tuple:
    """Return the types of a union, or the type itself."""
    return get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)


def _read_text(text: str) -> Any:
    """Return what a text holds in YAML or JSON."""
    value = yaml.load(text, Loader)  # it also finds a key that is given twice
    with suppress(ValueError):
        value = json.loads(text)  # 1e5 is a number in JSON, but text in YAML 1.1
    return value


def _mapping(value: Any) -> Any:
    """Return text as what it holds in YAML or JSON, and any other value unchanged."""
    try:
        return _read_text(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from None


# ---- the mappings `mixture`, `parameter_groups` and `gradient_checkpointing` -----------------------------------------

Name = Annotated[str, Field(min_length=1)]
PathName = Annotated[Name, AfterValidator(_path)]
PathNames = Annotated[list[PathName], BeforeValidator(_as_list)]


@with_config(ConfigDict(extra="forbid", strict=True))
class MixtureSource(TypedDict, total=False):
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


# ---- the adapter of pydantic -----------------------------------------------------------------------------------------


def _with_rules(type_: Any, rules: Option) -> Any:
    """Return a type, that of a field or a part of it, with the rules of the field, as pydantic takes it."""
    if len(_parts(type_)) > 1:
        return reduce(operator.or_, [_with_rules(part, rules) for part in _parts(type_)])
    if get_origin(type_) is list:
        return Annotated[list[_with_rules(get_args(type_)[0], rules)], BeforeValidator(_as_list)]  # pyrefly: ignore
    if is_typeddict(type_):
        schema = TypeAdapter(type_).json_schema()  # inline: a reference would not be found in that of the run file
        del schema["title"], schema["description"]
        return Annotated[type_, BeforeValidator(_mapping), WithJsonSchema(schema)]
    if dict in (type_, get_origin(type_)):
        values = get_args(type_)[1] if get_args(type_) else JsonValue
        mapping = Annotated[dict[str, _with_rules(values, rules)], BeforeValidator(_mapping)]  # pyrefly: ignore
        return mapping if values is str else Annotated[mapping, WithJsonSchema({"type": "object"})]
    if rules.choices:
        return Annotated[Literal[rules.choices], BeforeValidator(_text)]  # pyrefly: ignore
    if type_ is str:  # constraints stand before readers, so that the JSON schema shows them
        text = Annotated[str, Field(min_length=None if rules.may_be_empty else 1), BeforeValidator(_text)]
        return Annotated[text, AfterValidator(_path)] if rules.is_path else text  # pyrefly: ignore
    if type_ in (int, float):
        allow_inf_nan = None if type_ is int else False
        bounds = Field(ge=rules.min, gt=rules.above, le=rules.max, lt=rules.below, allow_inf_nan=allow_inf_nan)
        return Annotated[type_, bounds, BeforeValidator(_number)]
    return type_


def _adapter(options: dict[str, Option]) -> TypeAdapter:
    """Return pydantic's type of fields, none of them required, with help, defaults and rules."""
    fields = {}
    for name, rules in options.items():
        extra = {"default": rules.default}
        if rules.group:
            extra["x-group"] = rules.group
        if rules.is_rare:
            extra["x-rare"] = True
        about = Field(description=rules.help, json_schema_extra=extra)
        fields[name] = Annotated[_with_rules(rules.type, rules), about]  # pyrefly: ignore
    return TypeAdapter(TypedDict("Fields", fields, total=False))  # pyrefly: ignore


def json_schema(cls: type) -> dict[str, dict]:
    """Return the JSON schema of each field of a dataclass."""
    schemas = _adapter(declared_options(cls)).json_schema()["properties"]
    for schema in schemas.values():
        del schema["title"]
        if schema.get("type") == "array":  # one value stands for a list with one item
            items = schema["items"]
            others = [each["type"] for each in items.get("anyOf", [items]) if each["type"] != "array"]
            schema["type"] = ["array", *others]
    return schemas


# ---- values ----------------------------------------------------------------------------------------------------------


def is_from_checkpoint(rules: Option) -> bool:
    """Return whether eval.py takes a field from a checkpoint, which may be anyone's.

    A number, a bool or a choice cannot name a file or code; a text, a list or a mapping has to be declared harmless."""
    if rules.from_checkpoint is not None:
        return rules.from_checkpoint
    parts = _parts(rules.type)
    return bool(rules.choices) or all(part in NUMBERS or get_origin(part) is Literal for part in parts)


def value_of_words(type_: Any, words: list[str]) -> Any:
    """Return the words after the flag of a field of this type as a run file would hold them; None: they are missing.

    The single word of a list may be the list in YAML or JSON; one of several is an item, such as a chat: a list of
    mappings."""
    if not words:
        return True if bool in _parts(type_) else None
    if get_origin(type_) is not list:
        return words[0] if len(words) == 1 else words
    kinds = (list,) if type_ == list[str] else (list, dict)
    values = [_held(word, kinds) for word in words]
    return values[0] if len(values) == 1 else values


def _held(word: str, kinds: tuple) -> Any:
    """Return what a word in brackets holds in YAML or JSON, if that is of these types; else the word."""
    value = None
    if word[:1] + word[-1:] in ("[]", "{}"):
        with suppress(yaml.YAMLError, ValueError):
            value = _read_text(word)
    return value if isinstance(value, kinds) else word


def read_values(
    given: dict[str, Any], options: dict[str, Option], from_user: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ({name: value} as the types of these fields, {name: sentence} of all values that are invalid).

    `given` has values as a run file holds them; `from_user` is False for those of a checkpoint."""
    problems: dict[str, list] = {}
    try:
        adapter = _adapter({name: options[name] for name in given})  # of all fields it would take a tenth of a second
        return adapter.validate_python(given, context=from_user), {}
    except ValidationError as error:
        for problem in error.errors(include_url=False):  # several for a union, and for items of a list or mapping
            name, location = str(problem["loc"][0]), problem["loc"][1:]
            problems.setdefault(name, []).append((_place(given[name], location), problem))
    errors = {}
    for name in problems:
        errors[name] = f"{name}: {'; '.join(_sentences(problems[name], options[name]))} ({options[name].help})"
    return {}, errors


def _place(value: Any, location: tuple) -> list[str]:
    """Return the keys and the numbers of items in a location of pydantic, which also has the types of a union."""
    place = []
    with suppress(ValueError):
        value = _mapping(value)
    for part in location:
        with suppress(LookupError, TypeError):
            value = value[part]
            place.append(str(part))
    return place


def _sentences(problems: list, rules: Option) -> Iterator[str]:
    """Yield place, value and reason of the errors of a field, with the nearest name for a choice or a key.

    A mapping with a wrong key is meant as no other type of the union: what has an error within itself has no other."""
    for place, problem in problems:
        if any(len(other) > len(place) and other[: len(place)] == place for other, _ in problems):
            continue
        value = problem["input"]
        reason = f"{value!r}: {problem['msg'].removeprefix('Value error, ')}{did_you_mean(str(value), rules.choices)}"
        if problem["type"] == "extra_forbidden":
            mappings = [each for part in _parts(rules.type) for each in (part, *get_args(part)) if is_typeddict(each)]
            keys = [key for mapping in mappings for key in mapping.__annotations__]
            reason = f"unknown field{did_you_mean(place[-1], keys)}"
        elif problem["type"] == "dict_type":
            reason = f"{value!r}: expected {{NAME: VALUE, …}} in YAML or JSON"
        elif not place and (value is None or isinstance(value, list)):
            reason = f"expected one value, found {' '.join(map(str, value or ())) or 'none'}"
        yield ": ".join([*place, reason])
