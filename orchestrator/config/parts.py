"""Groups of conf/ whose keys are fields of the runtime's settings classes.

A field with the metadata `part` holds settings of the runtime, whose keys are keys of the group. If the part has
`kinds`, the group's key `kind` chooses the class.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_origin, get_type_hints

from zero_runtime.limits import example_of, keys_of, values_of

SCALARS = (str, int, float, bool, type(None))


class GroupKey(NamedTuple):
    """A key of a group. `part`: the field of the group that holds it, empty for the group itself. `example`: a valid
    value."""

    field: str
    hint: Any
    part: str = ""
    example: Any = None


def part(kinds: Mapping[str, type] | None = None) -> Mapping[str, Any]:
    """Metadata of a field of a group whose keys are keys of the group; kinds: its classes, if there are several."""
    return {"part": kinds or {}}


def parts_of(cls: type) -> dict[str, Field[Any]]:
    """The parts of a group, by field."""
    return {one.name: one for one in fields(cls) if "part" in one.metadata}


def kinds_of(cls: type) -> Mapping[str, type]:
    """The classes that the key `kind` of a group chooses from; empty if no part has kinds."""
    return next(filter(None, (one.metadata["part"] for one in parts_of(cls).values())), {})


def has_kind(cls: type, kind: object) -> bool:
    """Whether a group has this kind; a group without kinds has the empty one only."""
    return isinstance(kind, str) and kind in (kinds_of(cls) or ("",))


def default_kind(cls: type) -> str:
    """The kind of a group whose default part has it; empty without kinds."""
    defaults: Iterable[Any] = (one.default for one in parts_of(cls).values() if one.metadata["part"])
    return next((settings.kind for settings in defaults), "")


def class_of(cls: type, name: str, kind: str) -> type:
    """The class of a part of a group of this kind."""
    one = parts_of(cls)[name]
    found: type = one.metadata["part"].get(kind) or type(one.default)
    return found


@functools.cache
def keys_of_kind(cls: type, kind: str) -> Mapping[str, GroupKey]:
    """The keys of a group of one kind, in order. The kind of a group without kinds is empty."""
    known, parts = get_type_hints(cls), parts_of(cls)
    keys = {"kind": GroupKey("", Literal[tuple(kinds_of(cls))])} if kinds_of(cls) else {}
    for one in fields(cls):
        if one.name in parts:
            settings = class_of(cls, one.name, kind)
            hints = get_type_hints(settings)
            for key, inner in keys_of(settings).items():
                keys[key] = GroupKey(inner.name, hints[inner.name], one.name, example_of(inner))
        else:
            keys[one.name] = GroupKey(one.name, known[one.name])
    return MappingProxyType(keys)


@functools.cache  # called for each group of every point of a sweep
def hints_of(cls: type) -> Mapping[str, Any]:
    """The types of a group's keys, of all kinds, in order. A key that a kind does not have may be null."""
    by_kind = [keys_of_kind(cls, kind) for kind in kinds_of(cls) or ("",)]
    union = {key: found.hint for keys in by_kind for key, found in keys.items()}
    partial = {key: hint for key, hint in union.items() if not all(key in keys for keys in by_kind)}
    nullable = {key: hint if get_origin(hint) is dict else hint | None for key, hint in partial.items()}
    return MappingProxyType({key: nullable.get(key, hint) for key, hint in union.items()})


def unset(hint: Any) -> Any:
    """The value of a key that a kind does not have."""
    return {} if get_origin(hint) is dict else None


@functools.cache
def _unset(cls: type) -> Mapping[str, Any]:
    return {key: unset(hint) for key, hint in hints_of(cls).items()}


def plain(group: Any) -> dict[str, Any]:
    """The group as plain data for JSON, with the keys of all kinds; enums become their names."""
    cls: type = type(group)
    # All kinds, so that the form of a written configuration does not depend on its kind. strict.py expects it too.
    values: dict[str, Any] = {key: {} if held is not None else None for key, held in _unset(cls).items()}
    for one in fields(group):
        value = getattr(group, one.name)
        if "part" not in one.metadata:
            values[one.name] = _plain(value)
        else:
            values |= {key: _plain(inner) for key, inner in values_of(value).items()}
            values |= {"kind": value.kind} if one.metadata["part"] else {}
    return values


def _plain(value: Any) -> Any:
    if type(value) in SCALARS:  # nearly all
        return value
    if is_dataclass(value):
        return plain(value)
    return str(value.value) if isinstance(value, Enum) else copy.deepcopy(value)


def completed(cls: type, data: Mapping[Any, Any]) -> dict[Any, Any]:
    """`data` with the keys that it leaves out: the defaults of the group, and null for those that its kind lacks.

    Unchanged if the group has no default, or no such kind.
    """
    kind = data.get("kind", default_kind(cls)) if kinds_of(cls) else ""
    return {**_left_out(cls, kind), **data} if isinstance(kind, str) else dict(data)


@functools.cache  # called for each group of every point of a sweep
def _left_out(cls: type, kind: str) -> Mapping[str, Any]:
    if any(one.default is one.default_factory is MISSING for one in fields(cls)) or not has_kind(cls, kind):
        return {}
    own = keys_of_kind(cls, kind)
    return {key: value if key in own else unset(hints_of(cls)[key]) for key, value in plain(cls()).items()}
