"""Formats numbers and lists for people: sizes in powers of 1024, counts, percentages, ranges of steps, groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

ABSENT = "-"
Key = TypeVar("Key")
Item = TypeVar("Item")


def size(count_bytes: float | None) -> str:
    """A size such as "1.50 GiB", "12.3 MiB" or "640 KiB", with 1 GiB = 2^30 bytes."""
    if count_bytes is None:
        return ABSENT
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count_bytes) >= factor:
            return f"{digits(count_bytes / factor)} {unit}"
    return f"{count_bytes:,.0f} B"


def digits(value: float | None) -> str:
    """A number with three significant digits, or all digits before the point: 1.23, 12.3, 123, 1,234."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{places}f}"


def significant(value: float) -> str:
    """A number with three significant digits, also a small one: 0.00123, 1.23, 1,234."""
    return f"{value:.3g}" if abs(value) < 1 else digits(value)


def count(number: float | None) -> str:
    """A count such as "124.40 M", "1.24 B" or "6,400"."""
    if number is None:
        return ABSENT
    for unit, factor in (("B", 1e9), ("M", 1e6)):
        if abs(number) >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:,.0f}"


def loss(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"


def difference(measured: float | None, predicted: float | None) -> str:
    """The difference of `measured` from `predicted`, in percent of `predicted`.

    "exact" if they are equal, "new" if `predicted` is 0, ABSENT if one is missing.
    """
    if measured is None or predicted is None:
        return ABSENT
    if measured == predicted:
        return "exact"
    return change_text(measured / predicted) if predicted else "new"


def change_text(ratio: float) -> str:
    """A ratio as its change: "+5.2 %" for 1.052; "0.0 %" if it rounds to none."""
    rounded = round(100 * (ratio - 1), 1)
    return f"{rounded:+.1f} %" if rounded else "0.0 %"


def percent(part: float, total: float) -> str:
    return f"{100 * part / total:.0f} %" if total else ABSENT


def duration(seconds: float) -> str:
    """A time such as "8 s", "12 min" or "3.5 h", rounded up."""
    if seconds < 100:
        return f"{math.ceil(seconds)} s"
    minutes = seconds / 60
    return f"{math.ceil(minutes)} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def spans(numbers: Iterable[int]) -> list[list[int]]:
    """The numbers, which must be sorted, as ranges: [[1, 3], [7, 7]] for [1, 2, 3, 7]."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def steps_text(rows: Sequence[Sequence[int]]) -> str:
    """The ranges of `spans` in words: "steps 1 to 3 and 7", "step 7"."""
    parts = [str(low) if low == high else f"{low} to {high}" for low, high in rows]
    text = " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])
    return f"step{'' if len(rows) == 1 and rows[0][0] == rows[0][1] else 's'} {text}"


def many(number: int, what: str) -> str:
    """A count with its noun: "1 point", "2 points"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def share_text(share: float) -> str:
    return f"{100 * share:.1f} %"


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """The items of each key, both in the order of the pairs."""
    found: dict[Key, list[Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found
