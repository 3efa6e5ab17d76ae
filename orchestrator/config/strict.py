"""Builds frozen dataclasses from plain data, and reports all unknown keys, wrong types and bad values together."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

MOST_BITS = 64  # of an integer: neither the libraries nor the record files hold larger ones


class Word(str, Enum):
    """An enum whose members are strings, spelled as in conf/, so that a resolved configuration is plain JSON."""

    def __str__(self) -> str:
        return str(self.value)


class Broken(NamedTuple):
    """One broken rule. Each entry of `fix` is a list of overrides, such as "a=1 b=2", that is enough to satisfy it."""

    rule: str
    found: str = ""
    fix: tuple[str, ...] = ()

    def __str__(self) -> str:
        fix = f"      fix: {'   or   '.join(self.fix)}" if self.fix else ""
        found = f", found {self.found}" if self.found else ""
        return f"{self.rule}{found}{fix}"


class ConfigError(ValueError):
    """A configuration breaks rules; `broken` has all of them."""

    def __init__(self, broken: list[Broken]) -> None:
        super().__init__("\n".join(str(one) for one in broken))
        self.broken = broken


class Refusal(ValueError):
    """Nothing can be started; `problems` lists everything that is wrong with the command line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Limits:
    """Collects the values of one group that are out of range, so that they are reported together."""

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        self._values = values
        self._prefix = f"{name}." if name else ""
        self.broken: list[Broken] = []

    def must(self, key: str, holds: Callable[[Any], bool], rule: str, fix: object) -> None:
        """Records a broken rule if the value of `key` does not satisfy `holds`.

        None means "not set": it is always in range, and as `fix` it is written as null.
        """
        value = self._values.get(key)
        if value is not None and not holds(value):
            full = self._prefix + key
            fixed = "null" if fix is None else fix
            self.broken.append(Broken(f"{full} must be {rule}", str(value), (f"{full}={fixed}",)))

    def at_least(self, low: int, **keys: object) -> None:
        """Requires values of at least `low`. Each keyword argument is a key and the value to suggest for it."""
        for key, fix in keys.items():
            self.must(key, lambda value: value >= low, f"at least {low}", fix)

    def conclude(self) -> None:
        if self.broken:
            raise ConfigError(self.broken)


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The most similar of `words`, ignoring case; None if none is similar."""
    known = list(words)
    found = difflib.get_close_matches(word.lower(), [one.lower() for one in known], n=1, cutoff=0.6)
    return next((one for one in known if found and one.lower() == found[0]), None)


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
    elif get_origin(kind) is dict:
        text = "a mapping"
    elif get_origin(kind) is list:
        text = "a list of texts"
    else:
        text = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
    return text + (", or null" if optional else "")


def wanted(hint: Any, value: object) -> str:
    """`describe`, with the limit on integers and nested values added if `value` exceeds it."""
    text = describe(hint)
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

    Integers are accepted as floats, and numbers as text.
    """
    kind, optional = type_of(hint)
    if not _is_plain(hint, value):
        raise ValueError(f"expected {wanted(hint, value)}, found {shown(value)}")
    if value is None and optional:
        return None
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return dict(value)
    if get_origin(kind) is list and isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return list(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value):
        return float(value)
    if kind in (bool, int) and type(value) is kind:
        return value
    raise ValueError(f"expected {describe(hint)}, found {shown(value)}")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


@functools.cache  # called for each group of every point of a sweep
def hints_of(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name, in the order of the fields."""
    known = get_type_hints(cls)
    return MappingProxyType({one.name: known[one.name] for one in fields(cls)})


def build(cls: type, data: object, path: str = "") -> tuple[Any, list[Broken]]:
    """An instance and no broken rules, or None and all broken rules."""
    if not isinstance(data, Mapping):
        return None, [Broken(f"{path} must be a mapping", shown(data))]
    parts, broken = build_parts(cls, data, path)
    if broken:
        return None, broken
    try:
        return cls(**parts), []
    except ConfigError as error:
        return None, error.broken


def build_parts(cls: type, data: Mapping[Any, object], path: str = "") -> tuple[dict[str, Any], list[Broken]]:
    """The fields that could be built, by name, and all rules that the others break."""
    hints = hints_of(cls)
    prefix = f"{path}." if path else ""
    broken = [_unknown(prefix, str(key), hints) for key in data if key not in hints]
    parts: dict[str, Any] = {}
    for one in fields(cls):
        wrong = _fill(parts, one, hints[one.name], data, prefix)
        broken.extend(wrong)
    return parts, broken


def _fill(parts: dict[str, Any], one: Field[Any], hint: Any, data: Mapping[Any, object], prefix: str) -> list[Broken]:
    key = prefix + one.name
    if one.name not in data:
        # A missing group is never filled in silently: ~group on a command line is reported.
        optional = not is_dataclass(hint) and (one.default is not MISSING or one.default_factory is not MISSING)
        return [] if optional else [Broken(f"{key} is missing")]
    if isinstance(hint, type) and is_dataclass(hint):
        value, broken = build(hint, data[one.name], key)
        if not broken:
            parts[one.name] = value
        return broken
    try:
        parts[one.name] = convert(hint, data[one.name])
    except ValueError:
        value = data[one.name]
        return [Broken(f"{key} must be {wanted(hint, value)}", shown(value))]
    return []


def _unknown(prefix: str, key: str, known: Iterable[str]) -> Broken:
    near = nearest(key, known)
    hint = f"Did you mean '{prefix}{near}'?" if near else f"known: {' '.join(known)}"
    return Broken(f"'{prefix}{key}' is not a setting. {hint}")
