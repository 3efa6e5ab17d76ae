"""The comparison of a sweep's points: ranking, ties, checks, table, report.md and results.csv. Pure."""

from __future__ import annotations

import csv
import io
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orchestrator.config.lossy import lossy_words
from orchestrator.config.strict import nearest
from orchestrator.records.run_state import RunState
from orchestrator.report.losses import loss_to_exact, perplexity_texts
from orchestrator.report.summary import PHASES, Table, missing_text, run_command, without_key
from orchestrator.text.paths import program
from orchestrator.text.units import ABSENT, digits, loss, size


class Spread(NamedTuple):
    """A number from a point's result, with the range of its steps: p10, median, p90, or one value three times."""

    low: float
    middle: float
    high: float


class Metric(NamedTuple):
    """A metric by which points are ranked."""

    words: str
    higher_first: bool
    read: Callable[[dict[str, Any]], Spread | None]


def _of_steps(key: str) -> Callable[[dict[str, Any]], Spread]:
    def read(result: dict[str, Any]) -> Spread:
        values = result["throughput"][key]
        return Spread(values["p10"], values["median"], values["p90"])

    return read


def _each_rank(result: dict[str, Any]) -> Spread:
    return Spread(*(value / result["world"] for value in _of_steps("tokens_per_second")(result)))


def _exact(read: Callable[[dict[str, Any]], float | None]) -> Callable[[dict[str, Any]], Spread | None]:
    def spread(result: dict[str, Any]) -> Spread | None:
        value = read(result)
        return None if value is None else Spread(value, value, value)

    return spread


# [Note: a notable load]
# A run that wants all cores gets 1 - s of them if other processes take the share s. The load alone can therefore make
# one row slower than another by the ratio of the shares left to each. Up to a tenth, this is within half the width of
# the p10-p90 range of most rows, by which ties are judged; a larger share could decide the order.
NOTABLE_SHARE = 0.1
REUSED_NAMED = 4  # rows whose time is printed under the table; the table marks all reused rows
# The settings of an evaluation that generation does not have: in part they would contradict its own data.
OF_EVALUATION = ("measure", "data", "batch")
DEFAULT_METRIC = "tokens_per_second"
METRICS = {
    DEFAULT_METRIC: Metric("median tokens/s of all ranks", True, _of_steps("tokens_per_second")),
    "tokens_per_second_per_rank": Metric("median tokens/s of one rank", True, _each_rank),
    "step_ms": Metric("median step time", False, _of_steps("step_ms")),
    "peak_bytes": Metric("peak memory of a rank", False, _exact(lambda result: peak_bytes(result))),
    "states_bytes": Metric("model states of a rank", False, _exact(lambda result: states_bytes(result))),
    "loss_last": Metric("last training loss", False, _exact(lambda result: result["loss"]["last"])),
    "loss_validation": Metric("validation loss", False, _exact(lambda result: result["loss"]["validation"])),
    "perplexity": Metric("perplexity", False, _exact(lambda result: result["loss"].get("perplexity"))),
}


def metric_problem(name: str) -> str | None:
    """The error message for an unknown metric, with the nearest valid name; None for a valid one."""
    if name in METRICS:
        return None
    near = nearest(name, METRICS)
    hint = f" Did you mean '{near}'?" if near else ""
    return f"rank_by: there is no metric '{name}'.{hint}      known: {' '.join(METRICS)}"


def rule(metric: str) -> str:
    """Describes how the rows are ordered."""
    order = "higher" if METRICS[metric].higher_first else "lower"
    return (
        f"sorted by {METRICS[metric].words}, {order} first; = marks a tie: "
        "its p10-p90 range overlaps that of the first row of its group"
    )


@dataclass(frozen=True)
class Entry:
    """One point of a sweep and how it ended. `result` is set exactly if it succeeded."""

    label: str
    state: str
    result: dict[str, Any] | None = None
    message: str = ""
    folder: str = ""
    overrides: tuple[str, ...] = field(default=())
    measured_at: float | None = None  # seconds since the epoch
    config: Mapping[str, Any] = field(default_factory=dict)  # of the point, as it is recorded

    @property
    def is_reused(self) -> bool:
        """Whether another command measured it before the sweep."""
        return self.state == RunState.cached.value

    @property
    def others_share(self) -> float | None:
        """The share of the cores that other processes took during the measurement; None if unknown."""
        share: float | None = ((self.result or {}).get("load") or {}).get("others_share")
        return share


@dataclass(frozen=True)
class Ranked:
    """`place` is None without a result. `tied`: its spread overlaps that of the first row with the same place."""

    entry: Entry
    place: int | None = None
    tied: bool = False
    metric: str = DEFAULT_METRIC


def rank(entries: Sequence[Entry], metric: str = DEFAULT_METRIC) -> list[Ranked]:
    """Best first by `rule(metric)`, then the entries without a result in their original order."""
    sign = -1 if METRICS[metric].higher_first else 1
    spreads = {id(entry): METRICS[metric].read(entry.result) if entry.result else None for entry in entries}
    measured = [entry for entry in entries if spreads[id(entry)] is not None]
    measured.sort(key=lambda entry: sign * _middle(spreads[id(entry)]))
    ranked: list[Ranked] = []
    leader: Ranked | None = None
    for place, entry in enumerate(measured, start=1):
        if leader is not None and _overlap(spreads[id(leader.entry)], spreads[id(entry)]):
            ranked.append(Ranked(entry, leader.place, tied=True, metric=metric))
        else:
            leader = Ranked(entry, place, metric=metric)
            ranked.append(leader)
    return ranked + [Ranked(entry, metric=metric) for entry in entries if spreads[id(entry)] is None]


def _middle(spread: Spread | None) -> float:
    assert spread is not None
    return spread.middle


def _speed(entry: Entry) -> dict[str, float]:
    assert entry.result is not None
    speed: dict[str, float] = entry.result["throughput"]["tokens_per_second"]
    return speed


def _overlap(first: Spread | None, second: Spread | None) -> bool:
    assert first is not None
    assert second is not None
    return first.low <= second.high and second.low <= first.high


HEADER = (
    "place",
    "point",
    "tokens/s",
    "p10-p90",
    "vs best",
    "step ms",
    "states/rank",
    "peak/rank",
    "sent/step",
    "loss last",
)
LOSSY_HEADER = ("lossy", "loss - exact")


def table(ranked: Sequence[Ranked]) -> Table:
    """The comparison, one row per point. A failed point's row has its state; the reason is under the table."""
    speeds = [_speed(row.entry)["median"] for row in ranked if row.entry.result]
    best = max(speeds, default=0.0)
    header: tuple[str, ...] = HEADER
    rows = [_cells(row, best) for row in ranked]
    if perplexities := perplexity_texts({row.entry.label: row.entry.result for row in ranked}):
        header = (*header, "perplexity")
        rows = [(*cells, perplexities[row.entry.label]) for cells, row in zip(rows, ranked, strict=True)]
    if any(lossy_words(row.entry.config) for row in ranked):
        header = (*header, *LOSSY_HEADER)
        entries = [row.entry for row in ranked]
        rows = [(*cells, *_lossy_cells(row.entry, entries)) for cells, row in zip(rows, ranked, strict=True)]
    if any(row.entry.is_reused for row in ranked):
        header = (*header, "reused from")
        rows = [(*cells, _reused_from(row.entry)) for cells, row in zip(rows, ranked, strict=True)]
    return Table(header, tuple(rows), names=2)


def _lossy_cells(entry: Entry, entries: Sequence[Entry]) -> tuple[str, str]:
    """What is lossy in a row, and by how much its last loss is above that of the exact row."""
    difference = _to_exact(entry, entries)
    return ", ".join(lossy_words(entry.config)) or "exact", ABSENT if difference is None else f"{difference:+.4f}"


def _to_exact(entry: Entry, entries: Sequence[Entry]) -> float | None:
    measured = [(one.config, one.result) for one in entries if one.result is not None]
    return None if entry.result is None else loss_to_exact(entry.config, entry.result, measured)


def _reused_from(entry: Entry) -> str:
    """The time of a reused row, short enough for a table on a terminal; `reused` adds the year."""
    return _clock(entry, "%m-%d %H:%M") if entry.is_reused else ""


def _clock(entry: Entry, form: str) -> str:
    return "at an unknown time" if entry.measured_at is None else time.strftime(form, time.localtime(entry.measured_at))


def _cells(ranked: Ranked, best: float) -> tuple[str, ...]:
    entry = ranked.entry
    if entry.result is None:
        return (ABSENT, entry.label, entry.state, *[ABSENT] * (len(HEADER) - 3))
    speed = _speed(entry)
    share = "best" if speed["median"] == best else f"{100 * (speed['median'] / best - 1):+.1f} %"
    return (
        ABSENT if ranked.place is None else f"{'= ' if ranked.tied else ''}{ranked.place}",
        entry.label,
        digits(speed["median"]),
        f"{digits(speed['p10'])}-{digits(speed['p90'])}",
        share,
        digits(entry.result["throughput"]["step_ms"]["median"]),
        size(states_bytes(entry.result)),
        size(peak_bytes(entry.result)),
        size(sent_bytes(entry.result)),
        loss(entry.result["loss"]["last"]),
    )


def states_bytes(result: dict[str, Any]) -> int:
    """Measured bytes of the model states that a rank holds."""
    return sum(state["measured_bytes"] or 0 for state in result["memory"]["states"])


def peak_bytes(result: dict[str, Any]) -> int | None:
    """The peak of the device's allocator; on a CPU, of the process."""
    memory = result["memory"]
    allocated: int | None = memory.get("peak_allocated_bytes")
    return memory.get("peak_rss_bytes") if allocated is None else allocated


def sent_bytes(result: dict[str, Any]) -> int:
    return sum(volume["bytes"] for volume in result["communication"]["data"].values())


def failures(ranked: Sequence[Ranked]) -> list[str]:
    """One line for each point without a result: its state and the reason."""
    lost = [row.entry for row in ranked if row.entry.result is None]
    return [f"{entry.label}: {entry.state}: {entry.message or 'no reason known'}" for entry in lost]


def reused(ranked: Sequence[Ranked]) -> list[str]:
    """One line if rows were measured before this sweep: how many, which and when."""
    entries = [row.entry for row in ranked if row.entry.is_reused]
    if not entries:
        return []
    rows = sum(row.entry.result is not None for row in ranked)
    named = [f"{entry.label} measured {_clock(entry, '%Y-%m-%d %H:%M')}, reused" for entry in entries[:REUSED_NAMED]]
    named += [f"{len(entries) - REUSED_NAMED} more"] if len(entries) > REUSED_NAMED else []
    were = "row was" if rows == 1 else f"rows {'was' if len(entries) == 1 else 'were'}"
    return [
        f"{len(entries)} of {rows} {were} measured earlier: {'; '.join(named)}. --fresh measures all in one session"
    ]


def _curve_warnings(ranked: Sequence[Ranked]) -> list[str]:
    losses = {row.entry.label: row.entry.result["loss"] for row in ranked if row.entry.result}
    return [
        f"{label}: {missing_text(curve['missing_steps'])}"
        for label, curve in losses.items()
        if curve.get("missing_steps")
    ]


def _load_warnings(ranked: Sequence[Ranked]) -> list[str]:
    """Warnings about load from other processes. See [Note: a notable load]."""
    known = {row.entry.label: row.entry.others_share for row in ranked if row.entry.others_share is not None}
    if not known or max(known.values()) < NOTABLE_SHARE:
        return []
    shares = _grouped({label: f"{100 * share:.0f} %" for label, share in known.items()})
    text = f"other processes took this share of the cores while a row was measured: {shares}"
    if 1 - max(known.values()) < (1 - NOTABLE_SHARE) * (1 - min(known.values())):
        return [f"the rows were measured under different loads, so speeds do not compare; {text}"]
    return [text]


def load_text(result: Mapping[str, Any]) -> str | None:
    """A sentence if other processes took a notable share of the cores during a run, else None."""
    share = (result.get("load") or {}).get("others_share")
    if share is None or share < NOTABLE_SHARE:
        return None
    return f"other processes took {100 * share:.0f} % of the cores while this was measured"


def warnings(ranked: Sequence[Ranked]) -> list[str]:
    """Reasons why the rows are not comparable."""
    results = [(row.entry.label, row.entry.result) for row in ranked if row.entry.result]
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
    ] + [*_curve_warnings(ranked), *_load_warnings(ranked)]


def _grouped(values: dict[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for label, value in values.items():
        groups.setdefault(value, []).append(label)
    return "; ".join(f"{value}: {', '.join(labels)}" for value, labels in groups.items())


def conclusion(ranked: Sequence[Ranked]) -> str:
    """Names the best point, or reports a tie if the spreads overlap."""
    if not ranked or ranked[0].place is None:
        return "no point has a result"
    best = ranked[0].entry
    ties = [row.entry for row in ranked[1:] if row.tied and row.place == 1]
    word = "fastest" if ranked[0].metric == DEFAULT_METRIC else f"best by {METRICS[ranked[0].metric].words}"
    word += _of_how_many(ranked)
    if not ties:
        return f"{word}: {best.label}"
    group = [best, *ties]
    names = ", ".join(entry.label for entry in group)
    states = {entry.label: states_bytes(entry.result or {}) for entry in group}
    least = [label for label, held in states.items() if held == min(states.values())]
    smallest = f"; {least[0]} has the smallest model states" if len(least) == 1 else ""
    return f"{word}: a tie of {names}: their spreads overlap{smallest}"


def _of_how_many(ranked: Sequence[Ranked]) -> str:
    """How many points have an answer, if some do not: the first of these need not be the best of all."""
    left = sum(not RunState(row.entry.state).answered for row in ranked)
    return f" of the {len(ranked) - left} of {len(ranked)} points that have an answer" if left else ""


def next_after_sweep(ranked: Sequence[Ranked]) -> str:
    """A useful next command after a sweep: measure the best point longer, or run a failed point alone."""
    if not ranked:
        return program()
    entry = ranked[0].entry
    if entry.result is None:
        return run_command(entry.overrides)
    return longer(entry.overrides, evaluates="perplexity" in entry.result["loss"])


def longer(overrides: Sequence[str], *, evaluates: bool) -> str:
    """The command that measures a point longer; after an evaluation text from the same weights, because
    measure=standard would train them."""
    if not evaluates:
        # Steps given on the command line would override those of measure=standard.
        others = without_key(overrides, "measure", "measure.steps", "measure.warmup_steps")
        return run_command([*others, "measure=standard"])
    kept = [word for word in without_key(overrides, "sweeps") if not word.lstrip("+~").startswith(OF_EVALUATION)]
    # Synthetic data need no tokenizer, and with no other data the model may have none.
    prompt = "tokens=5,6,7" if "data=synthetic" in overrides else "prompt=Once"
    return f"{program()} generate {shlex.join([*kept, prompt])}"


def markdown(table_: Table) -> str:
    """The table in Markdown."""
    lines = [table_.header, tuple("---" if index < table_.names else "---:" for index in range(len(table_.header)))]
    return "\n".join(f"| {' | '.join(_escaped(row))} |" for row in [*lines, *table_.rows])


def _escaped(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in row]


def report_md(name: str, ranked: Sequence[Ranked]) -> str:
    """The complete report of a sweep."""
    parts = [
        f"# Sweep {name}",
        markdown(table(ranked)),
        f"{rule(ranked[0].metric if ranked else DEFAULT_METRIC)}.",
        *(f"{line}." for line in reused(ranked)),
        f"**{conclusion(ranked)}.**",
    ]
    parts += [f"Warning: {warning}" for warning in warnings(ranked)]
    if lost := failures(ranked):
        parts.append("Without a result:\n\n" + "\n".join(f"- {line}" for line in lost))
    commands = [f"- {row.entry.label}: `{run_command(row.entry.overrides)}`" for row in ranked]
    parts.append("Commands:\n\n" + "\n".join(commands))
    return "\n\n".join(parts) + "\n"


def results_csv(ranked: Sequence[Ranked]) -> str:
    """One line per point; numbers unrounded and in base units, named by their column."""
    entries = [row.entry for row in ranked]
    rows = [
        _csv_row(row)
        | {"lossy": ", ".join(lossy_words(row.entry.config)), "loss_to_exact": _to_exact(row.entry, entries)}
        for row in ranked
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["place"])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_row(ranked: Ranked) -> dict[str, object]:
    entry, result = ranked.entry, ranked.entry.result
    speed = result["throughput"] if result else {}
    row: dict[str, object] = {
        "place": ranked.place,
        "tied": ranked.tied,
        "label": entry.label,
        "state": entry.state,
        "message": entry.message,
        "measured_at": _clock(entry, "%Y-%m-%d %H:%M:%S") if result else None,
        "reused": entry.is_reused,
        "others_share": ("unknown" if entry.others_share is None else entry.others_share) if result else None,
    }
    for name in ("median", "p10", "p90"):
        row[f"tokens_per_second_{name}"] = speed["tokens_per_second"][name] if result else None
        row[f"step_ms_{name}"] = speed["step_ms"][name] if result else None
    row |= {f"{phase}_ms": result["phases_ms"][phase] if result else None for phase, _ in PHASES}
    row |= {
        "states_measured_bytes": states_bytes(result) if result else None,
        "activations_bytes": result["memory"]["activations_bytes"] if result else None,
        "activations_predicted_bytes": result["memory"].get("activations_predicted_bytes") if result else None,
        "peak_bytes": peak_bytes(result) if result else None,
        "sent_bytes_per_step": sent_bytes(result) if result else None,
        "loss_first": result["loss"]["first"] if result else None,
        "loss_last": result["loss"]["last"] if result else None,
        "loss_validation": result["loss"]["validation"] if result else None,
        "perplexity": result["loss"].get("perplexity") if result else None,
        "data_hash": result["data"]["hash"] if result else None,
        "world": result["world"] if result else None,
        "folder": entry.folder,
        "command": run_command(entry.overrides),
    }
    return row
