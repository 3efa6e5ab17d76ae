"""Builds frozen dataclasses from plain data, and reports all unknown keys, wrong types and bad values together."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from orchestrator.config.parts import GroupKey, class_of, completed, has_kind, keys_of_kind, kinds_of, parts_of, unset
from orchestrator.config.parts import hints_of as hints_of
from zero_runtime.limits import Broken as Broken
from zero_runtime.limits import ConfigError as ConfigError
from zero_runtime.limits import Limits as Limits
from zero_runtime.limits import as_typed
from zero_runtime.limits import nearest as nearest

MOST_FP32 = 3.4e38  # of a number: larger ones are infinite in the tensors that they reach
MOST_BITS = 64  # of an integer: neither the libraries nor the record files hold larger ones


class Word(str, Enum):
    """An enum whose members are strings, spelled as in conf/, so that a resolved configuration is plain JSON."""

    def __str__(self) -> str:
        return str(self.value)


class Refusal(ValueError):
    """Nothing can be started; `problems` lists everything that is wrong with the command line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def type_of(hint: Any) -> tuple[Any, bool]:
    """The type inside an Optional (or the type itself), and whether null is allowed."""
    if get_origin(hint) in (Union, UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None)), True
    return hint, False


def describe(hint: Any) -> str:
    """A description of the type's values for messages, such as "a whole number, or null"."""
    kind, optional = type_of(hint)
    if isinstance(kind, type) and issubclass(kind, Enum):
        text = "one of " + ", ".join(str(member.value) for member in kind)
    elif get_origin(kind) is Literal:
        text = "one of " + ", ".join(get_args(kind))
    elif get_origin(kind) is dict:
        text = "a mapping"
    elif get_origin(kind) is list:
        text = "a list of texts"
    else:
        text = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
    return text + (", or null" if optional else "")


def wanted(hint: Any, value: object) -> str:
    """`describe`, with the limit on numbers and nested values added if `value` exceeds it."""
    text = describe(hint)
    if type_of(hint)[0] is float and isinstance(value, (int, float)) and abs(value) > MOST_FP32:
        return f"{text}, of at most {MOST_FP32:g}"
    if _is_plain(hint, value):
        return text
    held = "" if type_of(hint)[0] is int else ", of texts, booleans and numbers"
    return f"{text}{held} of at most {MOST_BITS} bits"


def shown(value: object) -> str:
    """The value for a message; a description if it is too long for Python to print."""
    try:
        return repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"one of type {type(value).__name__}, too long to show"


def _is_plain(hint: Any, value: object) -> bool:
    """Whether JSON and all libraries can hold the value. Always true if it is to become a float or text."""
    return type_of(hint)[0] in (float, str) or _is_held(value)


def _is_held(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and all(map(_is_held, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_held, value))
    if isinstance(value, int):
        return value.bit_length() <= MOST_BITS
    return value is None or isinstance(value, (str, float))


def convert(hint: Any, value: object) -> Any:
    """The value converted to the type of `hint`; ValueError if it does not fit.

    Integers are accepted as floats, numbers as text, and a text as a list of it.
    """
    kind, optional = type_of(hint)
    if not _is_plain(hint, value):
        raise ValueError(f"expected {wanted(hint, value)}, found {shown(value)}")
    if value is None and optional:
        return None
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return dict(value)
    if get_origin(kind) is list and isinstance(value, str):
        return [value]
    if get_origin(kind) is list and isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return list(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if get_origin(kind) is Literal and value in get_args(kind):
        return value
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool) and _is_number(value):
        return float(value)
    if kind in (bool, int) and type(value) is kind:
        return value
    raise ValueError(f"expected {describe(hint)}, found {shown(value)}")


def _is_number(value: int | float) -> bool:
    """Whether the value is a number in fp32, in which numbers reach tensors."""
    return abs(value) <= MOST_FP32


def build(cls: type, data: object, path: str = "") -> tuple[Any, list[Broken]]:
    """An instance and no broken rules, or None and all broken rules."""
    if not isinstance(data, Mapping):
        return None, [Broken(f"{path} must be a mapping", shown(data))]
    values, broken = build_parts(cls, data, path)
    if broken:
        return None, broken
    kind = values["kind"] if kinds_of(cls) else ""
    keys = keys_of_kind(cls, kind)
    made: dict[str, Any] = {}
    for name in parts_of(cls):
        settings = {one.field: values[key] for key, one in keys.items() if one.part == name}
        _make(made, name, class_of(cls, name, kind), settings, broken)
    own = {one.field: values[key] for key, one in keys.items() if one.field and not one.part and key in values}
    _make(made, "group", cls, own | made, broken)  # a part that breaks rules has its default here
    return (None, broken) if broken else (made["group"], [])


@functools.lru_cache(maxsize=4096)  # a point of a sweep has most of its groups in common with the others
def _built(cls: type, pickled: bytes, path: str) -> tuple[Any, list[Broken]]:
    """`build` of a group; equal groups are one object."""
    return build(cls, pickle.loads(pickled), path)


def _make(made: dict[str, Any], name: str, cls: type, values: dict[str, Any], broken: list[Broken]) -> None:
    try:
        made[name] = cls(**values)
    except ConfigError as error:
        broken += error.broken


def build_parts(cls: type, data: Mapping[Any, object], path: str = "") -> tuple[dict[str, Any], list[Broken]]:
    """The values that could be built, by key, and all rules that the others break."""
    hints, prefix = hints_of(cls), f"{path}." if path else ""
    broken = [_unknown(prefix, str(key), hints) for key in data if key not in hints]
    data = completed(cls, data)
    kind = data.get("kind") if kinds_of(cls) else ""
    # Of a kind that does not exist, only the types of the keys are checked.
    own = keys_of_kind(cls, str(kind)) if has_kind(cls, kind) else {key: GroupKey(key, hints[key]) for key in hints}
    required = {one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING}
    built: dict[str, Any] = {}
    for key, hint in hints.items():
        if key not in data:
            # A missing group is never filled in silently: ~group on a command line is reported.
            broken += [Broken(f"{prefix}{key} is missing")] if key in required or is_dataclass(hint) else []
        elif key not in own:
            broken += _other_kind(path, str(kind), key, hint, data[key])
        elif data[key] is None and own[key].part and not type_of(own[key].hint)[1]:
            fix = f"{prefix}{key}={as_typed(own[key].example)}"
            broken.append(Broken(f"{path}={kind} needs {prefix}{key}", "null", (fix,)))
        else:
            broken += _fill(built, key, own[key].hint, data[key], prefix)
    return built, broken


def _other_kind(group: str, kind: str, key: str, hint: Any, value: object) -> list[Broken]:
    """The broken rule if a key is set that only other kinds have."""
    empty = unset(hint)
    if value is None or value == empty:
        return []
    fix = f"{group}.{key}={as_typed(empty)}"
    return [Broken(f"{group}={kind} has no {group}.{key}", str(value), (fix,))]


def _fill(built: dict[str, Any], key: str, hint: Any, value: object, prefix: str) -> list[Broken]:
    """Builds one value; the rules that it breaks."""
    if isinstance(hint, type) and is_dataclass(hint):
        group, broken = _built(hint, pickle.dumps(value), prefix + key)
        if not broken:
            built[key] = group
        return broken
    try:
        built[key] = convert(hint, value)
    except ValueError:
        return [Broken(f"{prefix}{key} must be {wanted(hint, value)}", shown(value))]
    return []


def _unknown(prefix: str, key: str, known: Iterable[str]) -> Broken:
    near = nearest(key, known)
    hint = f"Did you mean '{prefix}{near}'?" if near else f"known: {' '.join(known)}"
    return Broken(f"'{prefix}{key}' is not a setting. {hint}")
