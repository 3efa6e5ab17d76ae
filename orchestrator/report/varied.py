"""The settings that vary between the points of a sweep. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ABSENT_VALUE = "(default)"
# Settings of where a run goes and what is recorded of it, which no result depends on.
UNSHOWN = ("output", "tracking", "cluster", "sweeps", "checkpoint.resume")


@dataclass(frozen=True)
class Varied:
    """A setting that differs between points. name: its key; the keys of settings that always change together, with
    commas. values: its value in each point, in the order of the points. levels: the distinct values, numbers by size,
    others in the order of the sweep."""

    name: str
    values: tuple[str, ...]
    levels: tuple[str, ...]


def _number(text: str) -> float | None:
    try:
        return float(text.partition(",")[0])
    except ValueError:
        return None


def varied_settings(overrides: Sequence[Sequence[str]], order: Sequence[int]) -> list[Varied]:
    """The settings whose typed values differ between points, given the overrides of each point.

    order: the numbers of the points in the order of the sweep.
    """
    columns = varied_keys(overrides)
    groups: dict[tuple[int, ...], list[str]] = {}
    for key, values in columns.items():
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        groups.setdefault(tuple(numbers[value] for value in values), []).append(key)
    found = []
    for together in groups.values():
        values = tuple(map(", ".join, zip(*(columns[key] for key in together), strict=True)))
        found.append(Varied(", ".join(together), values, _levels([values[number] for number in order])))
    return found


def varied_keys(overrides: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The typed value in each point of every key whose typed values differ between points."""
    typed = [dict(word.lstrip("+~").partition("=")[::2] for word in words) for words in overrides]
    keys = dict.fromkeys(key for words in typed for key in words if not key.startswith("-") and not _is_unshown(key))
    columns = {key: tuple(words.get(key, ABSENT_VALUE) for words in typed) for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def key_of(word: str) -> str:
    """The key that an override sets."""
    return word.lstrip("+~").partition("=")[0]


def _levels(values: Sequence[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(values))
    numbers = {value: _number(value) for value in found}
    if any(number is None for number in numbers.values()):
        return found
    return tuple(sorted(found, key=lambda value: numbers[value] or 0.0))


def _is_unshown(key: str) -> bool:
    return key in UNSHOWN or key.partition(".")[0] in UNSHOWN or key.startswith("hydra")
