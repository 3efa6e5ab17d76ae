"""Points compared in pairs: those of two sweeps that are the same, or those of one that differ in one setting. Pure.

Two sweeps share no rounds, and a machine whose speed changes within minutes changes between them too; nothing that a
sweep records tells how much. Points of one sweep took turns, so what both met is not in their ratio. So two versions of
the code are compared best as points of one sweep, by `resources.code`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orchestrator.records.run_record import without_ignored
from orchestrator.records.run_state import RunState
from orchestrator.report.named_apart import held_bytes, memory_words, on_device
from orchestrator.report.ranking import peak_bytes, states_bytes, tokens_per_second
from orchestrator.report.summary import Table
from orchestrator.rounds import recorded
from orchestrator.rounds.comparison import RANGE, Comparison, compare
from orchestrator.text.units import ABSENT, change_text, digits, grouped, size

ENVIRONMENT = ("torch", "python", "cpu", "gpu", "host", "threads_per_rank", "git", "variables")
BEFORE, AFTER = "tokens/s before", "tokens/s after"
MEMORY, GROWTH = "memory/rank", "its change"
DROPS = (MEMORY, BEFORE, AFTER, RANGE)  # the order in which a narrow terminal leaves them out
HEADER = ("point", BEFORE, AFTER, "time/token", RANGE, MEMORY, GROWTH, "verdict")
# Ends of a point that had a result before. One that was cancelled, or has not run yet, is not judged.
LOST = frozenset(state for state in RunState if (state.answered or state.kept) and not state.measured)
Config = Mapping[str, Any]


class Judgement(str, Enum):
    """What became of a point. Only `slower`, `larger` and `lost` are regressions."""

    slower = "slower"
    larger = "more memory"
    lost = "no result"
    faster = "faster"
    same = "no change"
    unclear = "unclear"  # the interval holds both no change and one of the threshold
    unjudged = "not judged"  # too few rounds, or no result before

    @property
    def is_regression(self) -> bool:
        return self in (Judgement.slower, Judgement.larger, Judgement.lost)


@dataclass(frozen=True)
class Measured:
    """A point of one side. result: None if it has none; `state` says why. apart: why it has no place in its sweep."""

    label: str
    point: str
    config: Config
    result: dict[str, Any] | None
    state: str
    apart: str = ""


@dataclass(frozen=True)
class Change:
    """A point of both sides. matched: by what. time: of a token, after by before; None if there are too few rounds.

    memory: of a rank, after by before, as named_apart.held_bytes reads it: the number that is judged. peak, states: the
    peak of the process or of its allocator, and the model states, for programs that read --json.
    """

    before: Measured
    after: Measured
    matched: str
    judgement: Judgement
    time: Comparison | None = None
    memory: float | None = None
    peak: float | None = None
    states: float | None = None
    settings: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


@dataclass(frozen=True)
class Changes:
    """All points of both sides, in the order of the side before. alone: points of a sweep that no other differs from in
    the setting alone by which they are compared."""

    threshold: float
    points: tuple[Change, ...]
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()
    names: tuple[str, str] = field(default=("before", "after"))
    alone: tuple[str, ...] = ()

    @property
    def regressions(self) -> list[Change]:
        return [one for one in self.points if one.judgement.is_regression]

    @property
    def is_judged(self) -> bool:
        """Whether at least one point could be judged."""
        return any(one.judgement is not Judgement.unjudged for one in self.points)


def changes(before: Sequence[Measured], after: Sequence[Measured], threshold: float, names: tuple[str, str]) -> Changes:
    """Compares two sides. threshold: the smallest growth that has to be found, such as 0.05."""
    pairs = list(_pairs(before, after))
    points = tuple(_change(one, other, matched, threshold) for one, other, matched in pairs)
    labels = [{id(pair[side]) for pair in pairs} for side in (0, 1)]
    return Changes(
        threshold,
        points,
        tuple(one.label for one in before if id(one) not in labels[0]),
        tuple(one.label for one in after if id(one) not in labels[1]),
        names,
    )


def by_setting(points: Sequence[Measured], key: str, threshold: float) -> Changes:
    """Compares points of one sweep that differ in this setting, or in settings of this group, alone: each with the
    first of them. A refused point has no settings, so it is compared with none."""
    # The versions of an engine's packages follow from its environment.
    keys = (key, "engine.versions") if key == "engine.python" else (key,)
    first: dict[str, Measured] = {}
    pairs = list[tuple[Measured, Measured]]()
    for point in (one for one in points if one.config):
        settings = _settings(point)
        others = {name: settings[name] for name in settings if not any(_is_in(name, one) for one in keys)}
        before = first.setdefault(repr(sorted(others.items())), point)
        if before is not point:
            pairs.append((before, point))
    paired = {id(one) for pair in pairs for one in pair}
    alone = tuple(one.label for one in points if id(one) not in paired)
    found = tuple(_change(before, after, key, threshold) for before, after in pairs)
    return Changes(threshold, found, alone=alone, names=(f"the first {key}", f"another {key}"))


def has_setting(point: Measured, key: str) -> bool:
    """Whether a point has this setting, or settings in this group."""
    return any(_is_in(name, key) for name in flat(point.config))


def _settings(point: Measured) -> dict[str, Any]:
    return flat(without_ignored(point.config))


def _is_in(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def _pairs(before: Sequence[Measured], after: Sequence[Measured]) -> Iterator[tuple[Measured, Measured, str]]:
    """The same points: by id, else by equal settings, else by label. Each point is in one pair at most."""
    ways: tuple[tuple[str, Callable[[Measured], object]], ...] = (
        ("id", lambda one: one.point or None),
        ("settings", lambda one: repr(sorted(_settings(one).items())) if one.config else None),
        ("label", lambda one: one.label),
    )
    left, partners = list(after), dict[int, tuple[Measured, str]]()
    for way, key in ways:
        for one in (each for each in before if id(each) not in partners):
            found = next((other for other in left if key(one) is not None and key(other) == key(one)), None)
            if found is not None:
                left = [other for other in left if other is not found]
                partners[id(one)] = found, way
    for one in before:
        if id(one) in partners:
            yield one, *partners[id(one)]


def _change(before: Measured, after: Measured, matched: str, threshold: float) -> Change:
    settings = tuple(_differences(_settings(before), _settings(after)))
    old, new = before.result, after.result
    if old is None or new is None:
        judgement = Judgement.lost if old is not None and RunState(after.state) in LOST else Judgement.unjudged
        return Change(before, after, matched, judgement, settings=settings)
    environments = [flat(_environment(result)) for result in (old, new)]
    are_ranked = recorded.is_ranked(old) and recorded.is_ranked(new) and before.apart == after.apart
    # A change as large as the threshold must be found, and no change must not be reported. Both kinds of mistakes are
    # equally rare if the line between them is half of the threshold. Memory has no such noise, and is held against the
    # whole threshold.
    time = compare(new, old, equal=threshold / 2) if are_ranked else None
    memory = _grown(held_bytes(old), held_bytes(new)) if on_device(old) == on_device(new) else None
    peak, states = _grown(peak_bytes(old), peak_bytes(new)), _grown(states_bytes(old), states_bytes(new))
    judgement = Judgement.unjudged if time is None else Judgement[time.verdict.name]
    if before.apart == after.apart and not judgement.is_regression and (memory or 1.0) > 1 + threshold:
        judgement = Judgement.larger
    differences = tuple(_differences(*environments))
    return Change(before, after, matched, judgement, time, memory, peak, states, settings, differences)


def _environment(result: Mapping[str, Any]) -> dict[str, Any]:
    known = result.get("environment") or {}
    return {key: known.get(key) for key in ENVIRONMENT}


def _grown(before: float | None, after: float | None) -> float | None:
    return after / before if before and after is not None else None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their keys joined with dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def _differences(before: Config, after: Config) -> Iterator[str]:
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if old != new:
            yield f"{key}: {old} -> {new}"


# ---- for people and programs ----------------------------------------------------------------------------------------


def table(found: Changes) -> Table:
    """A row for each point of both sides."""
    return Table(HEADER, tuple(map(_row, found.points)), drops=DROPS, kept=HEADER[-2:])


def _row(one: Change) -> tuple[str, ...]:
    speeds = [_speed_text(side) for side in (one.before, one.after)]
    time = (ABSENT, ABSENT)
    if one.time is not None:
        time = change_text(one.time.ratio), f"{change_text(one.time.low)} to {change_text(one.time.high)}"
    memory = size(held_bytes(one.after.result)) if one.after.result else ABSENT
    growth = ABSENT if one.memory is None else change_text(one.memory)
    return (one.after.label, *speeds, *time, memory, growth, one.judgement.value)


def _work(one: Change) -> tuple[str, ...]:
    sides = (one.before, one.after) if one.before.apart != one.after.apart else ()
    return tuple(f"{side.label}: {side.apart}" for side in sides if side.apart)


def _speed_text(side: Measured) -> str:
    return digits(tokens_per_second(side.result)) if side.result else side.state


def notes(found: Changes) -> list[str]:
    """What differs between the sides besides the numbers; what all points share is one line."""
    measured = [one.after.result for one in found.points if one.after.result]
    lines = [f"{MEMORY}: {what}" for what in dict.fromkeys(map(memory_words, measured))]
    for what, texts in (
        ("settings", {one.after.label: one.settings for one in found.points}),
        ("versions and machine", {one.after.label: one.environment for one in found.points}),
        ("not judged, because the work differs", {one.after.label: _work(one) for one in found.points}),
    ):
        groups = grouped((differences, label) for label, differences in texts.items() if differences)
        for differences, labels in groups.items():
            whose = "" if len(labels) == len(found.points) else f" of {', '.join(labels)}"
            lines.append(f"{what}{whose}: {'; '.join(differences)}")
    for name, lone in zip(found.names, (found.only_before, found.only_after), strict=True):
        if lone:
            lines.append(f"only in {name}: {', '.join(lone)}")
    if found.alone:
        lines.append(f"compared with no other: {', '.join(found.alone)}")
    return lines


def conclusion(found: Changes) -> str:
    """The answer in one sentence."""
    words = f"{100 * found.threshold:g} %"
    if found.regressions:
        named = ", ".join(f"{one.after.label} ({one.judgement.value})" for one in found.regressions)
        return f"worse: {named}"
    if not found.points:
        return "no two points differ in that alone" if found.alone else "the two have no point in common"
    if not found.is_judged:
        differ = all(_work(one) for one in found.points)
        return f"not judged: {'the work differs' if differ else 'both sides need at least 3 rounds (measure=standard)'}"
    unclear = [one.after.label for one in found.points if one.judgement in (Judgement.unclear, Judgement.unjudged)]
    if unclear:
        return f"no regression of {words} is shown; too noisy or too short to exclude one: {', '.join(unclear)}"
    return f"no regression of {words}"


def document(found: Changes) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "before": found.names[0],
        "after": found.names[1],
        "threshold": found.threshold,
        "regressions": [one.after.label for one in found.regressions],
        "only_before": list(found.only_before),
        "only_after": list(found.only_after),
        "alone": list(found.alone),
        "points": [
            {
                "label": one.after.label,
                "label_before": one.before.label,
                "matched_by": one.matched,
                "judgement": one.judgement.name,
                "time_per_token_ratio": _interval(one.time),
                "memory_bytes_ratio": one.memory,
                "peak_bytes_ratio": one.peak,
                "states_bytes_ratio": one.states,
                "settings": list(one.settings),
                "environment": list(one.environment),
            }
            for one in found.points
        ],
    }


def _interval(time: Comparison | None) -> dict[str, float] | None:
    return None if time is None else {"low": time.low, "middle": time.ratio, "high": time.high}
