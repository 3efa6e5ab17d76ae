"""Describes and reads the keys of a configuration: the kind of each value, and its effect. Standard library only.

[Note: no key is ignored in silence]
Every key is mapped, refused with a reason, or idle: accepted, checked for its type, and named in one warning.
All problems of a configuration are collected and reported together.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from zero_runtime.deepspeed.json_text import shown, shown_key
from zero_runtime.errors import PlanError
from zero_runtime.limits import ConfigError

AUTO = "auto"


def _is_number(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):  # numpy's numbers are Real too
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def in_list(value: Any) -> list[Any]:
    """The values of a list or tuple; any other value alone."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


KINDS: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool) or (type(value) is int and value in (0, 1)),
    "a whole number": _is_whole,
    "a number": _is_number,
    # Some writers of YAML and JSON make a text of it.
    "a number above 0, or inf": lambda value: (
        value in (math.inf, "inf", "Infinity") or (_is_number(value) and value > 0)
    ),
    "a number or a list of numbers": lambda value: bool(in_list(value)) and all(map(_is_number, in_list(value))),
    "a text": lambda value: isinstance(value, str),
    "two numbers": lambda value: len(in_list(value)) == 2 and all(map(_is_number, in_list(value))),
    "a list": lambda value: isinstance(value, (list, tuple)),
    "an object": lambda value: isinstance(value, Mapping),
    "any value": lambda value: True,
    "a text or a list of texts": lambda value: all(isinstance(one, str) for one in in_list(value)),
}
BOOL, WHOLE, NUMBER, NUMBER_OR_INF, NUMBER_OR_LIST, TEXT, PAIR, LIST, OBJECT, ANY, TEXTS = KINDS

_CONVERTED: Mapping[str, Callable[[Any], Any]] = {BOOL: bool, WHOLE: int}


@dataclass(frozen=True)
class Key:
    """One key. `acts`: its value is returned to the caller; otherwise the key is idle, because of `reason`, except at
    the value `acts_at`. `only`: the allowed values; any other value is refused, with `reason`. `table`: the keys of a
    value that is an object."""

    kind: str = ANY
    acts: bool = False
    acts_at: Any = None
    only: tuple[Any, ...] | None = None
    reason: str = ""
    table: Mapping[str, Key] | None = None


def mapped(kind: str) -> Key:
    """A key that has an effect here."""
    return Key(kind, acts=True)


def all_mapped(kind: str, *names: str) -> dict[str, Key]:
    """Keys of one kind that have an effect here."""
    return dict.fromkeys(names, mapped(kind))


def choice(*values: str, reason: str) -> Key:
    """A key that has an effect here and must have one of these values."""
    return Key(TEXT, acts=True, only=values, reason=reason)


def idle(kind: str, reason: str = "", acts_at: Any = None) -> Key:
    """A key that has no counterpart here, except at the value `acts_at`, and does not change results."""
    return Key(kind, reason=reason, acts_at=acts_at)


def all_idle(kind: str, *names: str, reason: str = "") -> dict[str, Key]:
    """Keys of one kind that have no counterpart here and do not change results."""
    return dict.fromkeys(names, idle(kind, reason))


def only(*values: Any, kind: str, reason: str) -> Key:
    """A key without effect: these values describe what always holds here; any other value is refused."""
    return Key(kind, only=values, reason=reason)


def section(table: Mapping[str, Key]) -> Key:
    """A key whose value is an object with the keys of `table`."""
    return Key(OBJECT, acts=True, table=table)


def feature(reason: str) -> Key:
    """A section for a feature that does not exist here: refused if it is switched on, idle if "enabled" is false."""
    return Key(ANY, only=(), reason=reason)


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        switches = [value[name] for name in ("enabled", "deepcompile") if name in value]
        return value.get("disable") is True or (bool(switches) and not any(switches)) or not any(value.values())
    return value in (False, None)


def is_comment(name: object) -> bool:
    """Whether a key is a comment: its name starts with an underscore, as "_comment"."""
    return isinstance(name, str) and name.startswith("_")


@dataclass
class Reader:
    """Reads objects by their tables; collects problems and idle keys. `homes`: the full paths of each key name.

    `refused`: the paths of keys whose own value is a problem. `older`: older names that were read, with the newer ones.
    """

    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    older: dict[str, str] = field(default_factory=dict)

    def read(self, table: Mapping[str, Key], found: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """The values of the keys that have an effect, integers as int, switches as bool. A null counts as missing."""
        values: dict[str, Any] = {}
        for name, value in found.items():
            where = path + shown_key(name)
            if is_comment(name):
                self.idle.append(where)
            elif name not in table:
                self.refused.add(where)
                self.problems.append(f"{where}: unknown key{self._hint(str(name), table, path)}")
            elif value is not None and self._fits(table[name], value, where):
                key = table[name]
                if key.table is not None:
                    values[name] = self.read(key.table, value, where + ".")
                elif key.acts or (value == key.acts_at is not None):
                    values[name] = _CONVERTED[key.kind](value) if key.kind in _CONVERTED else value
                else:
                    self.idle.append(where)
        return values

    def unused(self, path: str, found: Mapping[str, Any], names: Iterable[str]) -> None:
        """Report those of these keys that are present as idle: together with the other keys they have no effect."""
        self.idle += [f"{path}.{name}" for name in names if name in found]

    def _fits(self, key: Key, value: Any, where: str) -> bool:
        problem = ""
        if isinstance(value, str) and value == AUTO:
            problem = _auto_problem(key)
        elif not KINDS[key.kind](value):
            problem = f"expected {key.kind}, found {shown(value)}"
        elif key.only == () and not _is_off(value):
            problem = key.reason
        elif key.only and value not in key.only:
            problem = f"expected {' or '.join(map(repr, key.only))}, found {shown(value)}: {key.reason}"
        if problem:
            self.refuse(where, problem)
        return not problem

    def refuse(self, where: str, problem: str) -> None:
        """Add a problem of the key at this path."""
        self.problems.append(f"{where}: {problem}")
        self.refused.add(where)

    @contextmanager
    def collecting(self, where: str) -> Iterator[None]:
        """A context whose error of settings becomes problems of the section `where`, and ends it."""
        try:
            yield
        except ConfigError as error:  # its fixes name the keys of conf/, which a section of DeepSpeed's does not have
            self.problems += [f"{where}: {one._replace(fix=())}" for one in error.broken]
        except PlanError as error:
            self.problems.append(f"{where}: {error}")

    def _hint(self, name: str, table: Mapping[str, Key], path: str) -> str:
        homes = [home for home in self.homes.get(name, ()) if home != path + name]
        if homes:
            return f"; it belongs at {' or '.join(homes)}"
        near = difflib.get_close_matches(name, table, 1, 0.75)
        if near:
            return f"; did you mean {near[0]}?"
        near = difflib.get_close_matches(name, self.homes, 1, 0.8)
        return f"; did you mean {self.homes[near[0]][0]}?" if near else ""

    def finish(self) -> None:
        """Raise PlanError with all problems, if there are any."""
        if self.problems:
            count = len(self.problems)
            raise PlanError(
                f"config: {count} problem{'s' * (count > 1)}:\n" + "\n".join(f"  {text}" for text in self.problems)
            )


def _auto_problem(key: Key) -> str:
    """Why "auto" cannot stand here; empty for a key without effect, whose value does not matter."""
    if not key.acts and key.only is None:
        return ""
    expected = f"write {key.kind}" if key.acts else "leave the key out"
    return f'"auto" is filled in from TrainingArguments, and none that say it were given as args; {expected}'


def without_effect(idle: Mapping[str, str], table: Mapping[str, Key]) -> list[str]:
    """One line for all keys that have no effect for one reason, from their paths and what to call each."""
    by_reason: dict[str, list[str]] = {}
    for path, label in idle.items():
        by_reason.setdefault(_reason(table, path), []).append(label)
    return [f"without effect here: {', '.join(on)}{why and f': {why}'}" for why, on in by_reason.items()]


def _reason(table: Mapping[str, Key], path: str) -> str:
    key = Key(table=table)
    for name in path.split("."):
        key = (key.table or {}).get(name, Key())
    return "" if key.acts or key.only is not None else key.reason


def homes_of(table: Mapping[str, Key], path: str = "") -> dict[str, tuple[str, ...]]:
    """The full paths of each key name, over all nested tables."""
    homes: dict[str, tuple[str, ...]] = {}
    for name, key in table.items():
        homes[name] = (*homes.get(name, ()), path + name)
        for inner, paths in homes_of(key.table or {}, f"{path}{name}.").items():
            homes[inner] = (*homes.get(inner, ()), *paths)
    return homes
