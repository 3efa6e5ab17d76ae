"""What a reader of a comparison must know besides its numbers: reused and failed rows, loads, an anchor. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.records.versions import words
from orchestrator.report.entry import Entry
from orchestrator.report.ranking import Ranked, by_table, clock, why_unjudged
from orchestrator.report.summary import missing_text
from orchestrator.rounds import recorded
from orchestrator.rounds.comparison import SpeedVerdict, compare
from orchestrator.rounds.recorded import NOTABLE_SHARE
from orchestrator.text.units import grouped, share_text

LOST_NAMED = 4  # points of one state and reason
REUSED_NAMED = 4  # rows whose time is printed under the table; the table marks all reused rows


def failures(ranked: Sequence[Ranked]) -> list[str]:
    """One line for each state and reason of points without a result: how many they are, and the first names."""
    lost = [row.entry for row in ranked if row.entry.result is None]
    groups = grouped(((entry.state, entry.message or "no reason known"), entry.label) for entry in lost)
    return [f"{_counted(labels)}: {state}: {reason}" for (state, reason), labels in groups.items()]


def _counted(labels: Sequence[str]) -> str:
    """The label of one point; of several, their number and the first of their names."""
    if len(labels) == 1:
        return labels[0]
    more = f" and {len(labels) - LOST_NAMED} more" if len(labels) > LOST_NAMED else ""
    return f"{len(labels)} points, {', '.join(labels[:LOST_NAMED])}{more}"


def reused(ranked: Sequence[Ranked]) -> list[str]:
    """One line if rows were measured before this sweep: how many, which and when."""
    entries = [row.entry for row in ranked if row.entry.is_reused]
    if not entries:
        return _anchors(ranked)
    rows = sum(row.entry.result is not None for row in ranked)
    several = len({_host(row.entry) for row in ranked if row.entry.result is not None}) > 1
    where = {entry.label: f" on {_host(entry)}" if several else "" for entry in entries}
    named = [
        f"{entry.label} measured {clock(entry, '%Y-%m-%d %H:%M')}{where[entry.label]}, reused"
        for entry in entries[:REUSED_NAMED]
    ]
    named += [f"{len(entries) - REUSED_NAMED} more"] if len(entries) > REUSED_NAMED else []
    were = "row was" if rows == 1 else f"rows {'was' if len(entries) == 1 else 'were'}"
    text = f"{len(entries)} of {rows} {were} measured earlier: {'; '.join(named)}. --fresh measures all in one session"
    return [text, *_anchors(ranked)]


def without_place(ranked: Sequence[Ranked]) -> list[str]:
    """One line if rows that were measured have no place: which and why."""
    named = [f"{row.entry.label} ({row.apart})" for row in ranked if row.apart]
    for rows in by_table(ranked).values():
        # The answer names those that may be the first.
        for place in sorted({row.may_be for row in rows if row.may_be and row.may_be > 1}):
            unjudged = [row for row in rows if row.may_be == place]
            named.append(f"{', '.join(row.entry.label for row in unjudged)} ({why_unjudged(unjudged)})")
    return [f"without a place: {', '.join(named)}"] if named else []


def _host(entry: Entry) -> str:
    """The machine of rank 0. Its hardware has the name of this one's, or it would be another point."""
    return ((entry.result or {}).get("environment") or {}).get("host") or "an unknown machine"


def _anchors(ranked: Sequence[Ranked]) -> list[str]:
    """What changed since the day of reused rows, by a point that was measured on that day and again."""
    lines = []
    for entry in (row.entry for row in ranked if row.entry.anchor is not None):
        before, now = dict(entry.anchor or {}), entry.result or {}
        if not (recorded.is_ranked(before) and recorded.is_ranked(now)):
            continue
        change = compare(before, now)  # the time of that day by today's is the speed of today by that day's
        text = (
            f"the anchor {entry.label} is now {share_text(change.ratio)} ({share_text(change.low)} to "
            f"{share_text(change.high)}) as fast as on {clock_of(before)}"
        )
        is_equal = change.verdict not in (SpeedVerdict.slower, SpeedVerdict.faster)
        then = "; rows of that day can be compared with those of today"
        lines.append(text + (then if is_equal else "; rows of that day differ by as much: --fresh measures them again"))
    return lines


def clock_of(result: Mapping[str, Any]) -> str:
    return clock(Entry("", "", measured_at=result.get("measured_at")), "%Y-%m-%d")


def _version_warnings(ranked: Sequence[Ranked]) -> list[str]:
    found = {row.entry.label: words(row.entry.differs) for row in ranked if row.entry.result and row.entry.differs}
    if not found:
        return []
    then = "speeds and memory do not compare with those of now"
    return [f"rows were measured with other versions, so their {then}: {_grouped(found)}; --fresh measures all again"]


def _curve_warnings(ranked: Sequence[Ranked]) -> list[str]:
    losses = {row.entry.label: row.entry.result["loss"] for row in ranked if row.entry.result}
    return [
        f"{label}: {missing_text(curve['missing_steps'])}"
        for label, curve in losses.items()
        if curve.get("missing_steps")
    ]


def _load_warnings(ranked: Sequence[Ranked]) -> list[str]:
    """Warnings about load from other processes. See [Note: a loaded round] in rounds/recorded.py."""
    known = {row.entry.label: row.entry.others_share for row in ranked if row.entry.others_share is not None}
    if not known or max(known.values()) < NOTABLE_SHARE:
        return []
    shares = _grouped({label: f"{100 * share:.0f} %" for label, share in known.items()})
    text = f"other processes took this share of the cores while a row was measured: {shares}"
    if 1 - max(known.values()) < (1 - NOTABLE_SHARE) * (1 - min(known.values())):
        return [f"the rows were measured under different loads, so speeds do not compare; {text}"]
    return [text]


def _transport_warnings(ranked: Sequence[Ranked]) -> list[str]:
    """One line for each reason why rows with comm=auto use gloo, where it is one; and where others of them do not."""
    rows = [row.entry for row in ranked if row.entry.result and row.entry.result["device"] == "cpu"]
    ways: dict[str, dict[str, str]] = {}
    for entry in rows:
        result = entry.result or {}
        if result["world"] > 1 and (entry.config.get("comm") or {}).get("kind", "auto") == "auto":
            ways.setdefault(result["backend"], {})[entry.label] = result.get("backend_reason") or "no reason is known"
    over_gloo = ways.pop("gloo", {})
    if not ways and set(over_gloo.values()) <= {"no reason is known"}:  # all are of a version that had gloo alone
        return []
    then = ", so their speeds do not compare with those of the others" if ways else ""
    return [f"ranks with comm=auto sent over gloo{then}: {_grouped(over_gloo)}"] if over_gloo else []


def load_text(result: Mapping[str, Any]) -> str | None:
    """A sentence if other processes took a notable share of the cores during a run, else None."""
    share = (result.get("load") or {}).get("others_share")
    if share is None or share < NOTABLE_SHARE:
        return None
    return f"other processes took {100 * share:.0f} % of the cores while this was measured"


def warnings(ranked: Sequence[Ranked]) -> list[str]:
    """Reasons why the rows are not comparable."""
    results = [(row.entry.label, row.entry.result) for row in ranked if row.entry.result and not row.apart]
    tokens = {label: f"{result['batch']['tokens_per_step']:,}" for label, result in results}
    checks = (
        ("data hash", "numbers do not compare", {label: result["data"]["hash"] for label, result in results}),
        ("tokens a step", "losses do not compare (tokens/s do)", tokens),
        ("number of ranks", "numbers do not compare", {label: str(result["world"]) for label, result in results}),
    )
    return [
        f"the points differ in {what}, so their {then}: {_grouped(values)}"
        for what, then, values in checks
        if len(set(values.values())) > 1
    ] + [*_version_warnings(ranked), *_curve_warnings(ranked), *_load_warnings(ranked), *_transport_warnings(ranked)]


def _grouped(values: Mapping[str, str]) -> str:
    groups = grouped((value, label) for label, value in values.items())
    return "; ".join(f"{value}: {', '.join(labels)}" for value, labels in groups.items())
