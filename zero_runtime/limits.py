"""Settings that check themselves: their keys, and the limits of their values. Standard library only.

A settings class is a frozen dataclass that can be built from a file: each field is a key, which has the field's name
unless its metadata (`keyed`) gives another. A field with NO_KEY is set from Python only. The class checks all values
when it is made and raises one ConfigError with every broken limit, each with the key and a value that is in range.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple

from zero_runtime.errors import PlanError, brief

_DEFAULT: Any = object()  # a fix: the default of the key


class Broken(NamedTuple):
    """One broken rule. Each entry of `fix` is a list of overrides, such as "a=1 b=2", that is enough to satisfy it."""

    rule: str
    found: str = ""
    fix: tuple[str, ...] = ()

    def __str__(self) -> str:
        fix = f"      fix: {'   or   '.join(self.fix)}" if self.fix else ""
        found = f", found {self.found}" if self.found else ""
        return f"{self.rule}{found}{fix}"


class ConfigError(PlanError):
    """Settings break rules; `broken` has all of them."""

    def __init__(self, broken: list[Broken]) -> None:
        super().__init__("\n".join(str(one) for one in broken))
        self.broken = broken


NO_KEY: Mapping[str, Any] = {"key": None}


def keyed(name: str, example: object = None) -> Mapping[str, Any]:
    """Metadata of a field whose key differs from its name. `example`: a valid value, if the default is none."""
    return {"key": name, "example": example}


def keys_of(cls: type) -> dict[str, Field[Any]]:
    """The fields of a settings class that can be set in a file, by key."""
    ordered = sorted(fields(cls), key=lambda one: bool(one.kw_only))  # those of a base class last
    named = {one.metadata.get("key", one.name): one for one in ordered}
    return {name: one for name, one in named.items() if name is not None}


def example_of(one: Field[Any]) -> Any:
    """A valid value of a field: its default, or its example."""
    made = one.default if one.default_factory is MISSING else one.default_factory()
    return one.metadata.get("example") or made


def values_of(settings: Any) -> dict[str, Any]:
    """The values of settings by key."""
    return {name: getattr(settings, one.name) for name, one in keys_of(type(settings)).items()}


def as_typed(value: object) -> str:
    """A value as it is typed in an override."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Limits:
    """Collects the values of one group that are out of range, so that they are reported together.

    `examples`: values in range, by key. `optional`: the keys whose value may be None, by default all, where a type
    decides that already.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        name: str = "",
        examples: Mapping[str, Any] | None = None,
        optional: Collection[str] | None = None,
    ) -> None:
        self._values = values
        self._prefix = f"{name}." if name else ""
        self._examples = examples or {}
        self._optional = values if optional is None else optional
        self.broken: list[Broken] = []

    @classmethod
    def of(cls, settings: Any, name: str) -> Limits:
        """Limits of settings whose keys are in the group `name`; the fixes are the defaults of their class."""
        keys = keys_of(type(settings))
        examples = {key: example_of(one) for key, one in keys.items()}
        return cls(values_of(settings), name, examples, [key for key, one in keys.items() if one.default is None])

    def must(self, key: str, holds: Callable[[Any], bool], rule: str, fix: object = _DEFAULT) -> None:
        """Records a broken rule if the value of `key` does not satisfy `holds`.

        None means "not set": it is in range for an optional key, and as `fix` it is written as null.
        """
        value = self._values.get(key)
        is_missing = value is None and key in self._values and key not in self._optional
        if is_missing or (value is not None and not holds(value)):
            full = self._prefix + key
            fixed = as_typed(self._examples[key] if fix is _DEFAULT else fix)
            self.broken.append(Broken(f"{full} must be {rule}", brief(value), (f"{full}={fixed}",)))

    def at_least(self, low: int, *keys: str, **fixes: object) -> None:
        """Requires values of at least `low`. Each keyword argument is a key and the value to suggest for it."""
        for key, fix in {**dict.fromkeys(keys, _DEFAULT), **fixes}.items():
            self.must(key, lambda value: value >= low, f"at least {low}", fix)

    def refuse(self, rule: str, found: object, *fixes: str) -> None:
        """Records a broken rule between several values."""
        self.broken.append(Broken(rule, brief(as_typed(found)), fixes))

    def conclude(self) -> None:
        if self.broken:
            raise ConfigError(self.broken)


def broken_by(make: Callable[[], object]) -> list[Broken]:
    """The rules that settings break when they are made."""
    try:
        make()
    except ConfigError as error:
        return error.broken
    return []


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The most similar of `words`, ignoring case; None if none is similar."""
    known = list(words)
    found = difflib.get_close_matches(word.lower(), [one.lower() for one in known], n=1, cutoff=0.6)
    return next((one for one in known if found and one.lower() == found[0]), None)
