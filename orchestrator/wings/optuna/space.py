"""What the line of a search varies: ranges `a..b` and lists of values; all its other settings are fixed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.config.strict import Refusal, type_of

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_BRACKETS = re.compile(r"[\[\](){}'\"]")  # a value with commas of its own
LOG_FROM = 10  # a range is searched on a log scale if its upper end is at least this many times its lower end
NOTHING = (
    "nothing to search: give a range or a list of values      fix: optimizer.lr=1e-5..1e-3, or batch.micro=1,2,4,8"
)


@dataclass(frozen=True)
class Searched:
    """A setting that is searched: the `values` of a list, or a range from `low` to `high`, both included.

    is_whole: whether a range has whole numbers alone.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_whole: bool = False

    @property
    def is_log(self) -> bool:
        return 0 < LOG_FROM * self.low <= self.high

    @property
    def ends(self) -> tuple[str, ...]:
        """The values of a list, or both ends of a range, as they are typed."""
        return self.values or (self.typed(self.low), self.typed(self.high))

    def typed(self, value: float) -> str:
        """A value of a range as it is typed: of a fraction, 4 digits."""
        short = min(max(float(f"{value:.4g}"), self.low), self.high)
        return str(int(value)) if self.is_whole else f"{short:.12g}"

    def described(self) -> str:
        if self.values:
            return ", ".join(self.values)
        kind = "whole numbers, " if self.is_whole else ""
        scale = f"log scale (the ends differ {LOG_FROM}-fold or more)" if self.is_log else "linear scale"
        return f"{' to '.join(self.ends)}, {kind}{scale}"


class SearchLine(NamedTuple):
    """The words of a search. by: the metric, empty if none is given. at_once: how many trials are proposed together.
    replaced: fixed values of settings that are searched too."""

    searched: tuple[Searched, ...]
    fixed: tuple[str, ...]
    trials: int
    at_once: int
    by: str
    replaced: tuple[str, ...] = ()

    def words(self, values: Sequence[str]) -> list[str]:
        """The overrides of the trial with these values."""
        return [*self.fixed, *(f"{one.key}={text}" for one, text in zip(self.searched, values, strict=True))]


def read(words: Sequence[str], types: Mapping[str, Any]) -> SearchLine:
    """The search that the words describe. types: of the settings, by key. Refusal: it is no search."""
    own = {"n": "20", "at_once": "1", "by": ""}
    searched: dict[str, Searched] = {}
    fixed: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        if key in own:
            own[key] = text
        elif (one := _searched(word, types.get(key.lstrip("+")))) is not None:
            searched[key] = one
        else:
            fixed.append(word)
    for key, usual in (("n", 20), ("at_once", 1)):
        if not re.fullmatch(r"[1-9]\d{0,6}", own[key]):
            told = f"{key}={own[key]}: expected a whole number of trials, 1 or more      fix: {key}={usual}"
            raise Refusal([told])
    if not searched:
        raise Refusal([NOTHING])
    replaced = tuple(word for word in fixed if word.partition("=")[0] in searched)
    kept = tuple(word for word in fixed if word not in replaced)
    return SearchLine(tuple(searched.values()), kept, int(own["n"]), int(own["at_once"]), own["by"], replaced)


def _searched(word: str, hint: Any) -> Searched | None:
    """The setting that the word searches; None if it has one value."""
    key, _, text = word.partition("=")
    if "," in text and not _BRACKETS.search(text):
        return Searched(key, tuple(dict.fromkeys(text.split(","))))
    if ".." not in text or "/" in text or text == "..":  # the last two are folders
        return None
    ends = _RANGE.fullmatch(text)
    if ends is None:
        raise Refusal([f"{word}: expected a range with a number at both ends      fix: {key}=1e-5..1e-3"])
    first, last = ends.groups()
    low, high = float(first), float(last)
    if not low < high:
        raise Refusal([f"{word}: expected the smaller number first      fix: {key}={last}..{first}"])
    is_whole = type_of(hint)[0] is not float and all(re.fullmatch(r"[-+]?\d+", end) for end in (first, last))
    return Searched(key, (), low, high, is_whole)
