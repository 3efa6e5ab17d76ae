"""The comparison of a sweep's points: ranking, ties, the winner and the table. Pure."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from orchestrator.config.strict import nearest
from orchestrator.records.run_state import RunState
from orchestrator.report import extras, trained
from orchestrator.report.entry import Entry
from orchestrator.report.summary import Table, run_command, without_key
from orchestrator.rounds import recorded
from orchestrator.rounds.comparison import EQUAL, SpeedVerdict, compare
from orchestrator.rounds.intervals import LEAST, RoundsEstimate, of_rounds
from orchestrator.text.paths import program
from orchestrator.text.units import ABSENT, change_text, digits, grouped, loss, many, size


class Metric(NamedTuple):
    """A metric by which points are ranked. times: for a speed, the times in each round that its comparison is of; None
    for a value that is exact."""

    words: str
    higher_first: bool
    read: Callable[[dict[str, Any]], float | None]
    times: Callable[[Mapping[str, Any]], list[float]] | None = None


def speed(result: dict[str, Any]) -> RoundsEstimate | None:
    """Tokens per second of all ranks; None if there are too few rounds for an interval."""
    if not recorded.is_ranked(result):
        return None
    return of_rounds([1e3 / ms for ms in recorded.ms_per_token(result)])


def tokens_per_second(result: Mapping[str, Any]) -> float:
    return float(result["throughput"]["tokens_per_second"]["median"])


def step_ms(result: Mapping[str, Any]) -> float:
    return float(result["throughput"]["step_ms"]["median"])


OF_TRAINING = "loss_validation"  # the metric of a sweep whose points train to an end
# The settings of an evaluation that generation does not have: in part they would contradict its own data.
OF_EVALUATION = ("measure", "data", "batch")
STANDARD = "measure=standard"
JUDGED = 0.05  # the relative difference that rounds must show, or a row has no place
DEFAULT_METRIC = "tokens_per_second"
METRICS = {
    DEFAULT_METRIC: Metric("median tokens/s of all ranks", True, tokens_per_second, recorded.ms_per_token),
    "tokens_per_second_per_rank": Metric(
        "median tokens/s of one rank",
        True,
        lambda result: tokens_per_second(result) / result["world"],
        lambda result: [ms * result["world"] for ms in recorded.ms_per_token(result)],
    ),
    "step_ms": Metric("median step time", False, step_ms, recorded.step_medians_ms),
    "peak_bytes": Metric("peak memory of a rank", False, lambda result: peak_bytes(result)),
    "states_bytes": Metric("model states of a rank", False, lambda result: states_bytes(result)),
    "loss_last": Metric("last training loss", False, lambda result: result["loss"]["last"]),
    "loss_validation": Metric("validation loss", False, lambda result: result["loss"]["validation"]),
    "perplexity": Metric("perplexity", False, lambda result: result["loss"].get("perplexity")),
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
    tie = f"its rounds show no difference of more than {100 * EQUAL:g} % from the first row of its group"
    tie += f", and would show one of {100 * JUDGED:.0f} %; rows that they do not judge have no place"
    tie = tie if METRICS[metric].times else "the same value"
    return f"sorted by {METRICS[metric].words}, {order} first; = marks a tie: {tie}"


@dataclass(frozen=True)
class Ranked:
    """`place` is None without a result, and for a speed without enough rounds. `tied`: the rounds show no difference
    from the first row with the same place; `hidden`: the relative difference up to which they would show none.
    `may_be`: the place that none of several rows has, because the rounds do not judge which of them it is;
    `more_rounds`: how many more would. `apart`: why it has no place though it was measured; `table`: the name of its
    table, if there are several."""

    entry: Entry
    place: int | None = None
    tied: bool = False
    hidden: float = 0.0
    may_be: int | None = None
    more_rounds: int = 0
    metric: str = DEFAULT_METRIC
    apart: str = ""
    table: str = ""

    @property
    def has_speed(self) -> bool:
        """Whether its speed can be compared with that of other rows: it has rounds, and a place beside them."""
        return recorded.is_ranked(self.entry.result or {}) and not self.apart

    @property
    def is_measured(self) -> bool:
        """Whether there is a value by which rows are sorted."""
        return self.entry.result is not None and METRICS[self.metric].read(self.entry.result) is not None


def rank(entries: Sequence[Entry], metric: str = DEFAULT_METRIC) -> list[Ranked]:
    """Best first by `rule(metric)`, then the entries without a place, then those without a result in their original
    order; one table of the comparison after the other."""
    apart = extras.places().apart(entries)
    return [
        replace(row, table=name, apart=apart.get(row.entry.label, ""))
        for name, own in extras.places().tables(entries).items()
        for row in _in_one_table(own, metric, apart)
    ]


def _in_one_table(entries: Sequence[Entry], metric: str, apart: Collection[str]) -> list[Ranked]:
    how = METRICS[metric]
    sign = -1 if how.higher_first else 1
    values = {id(entry): how.read(entry.result) if entry.result else None for entry in entries}
    measured = [entry for entry in entries if values[id(entry)] is not None]
    measured.sort(key=lambda entry: (entry.label in apart, sign * (values[id(entry)] or 0.0)))
    # The error of 1 % is that of the whole table, and each of these rows is one of its comparisons.
    rivals = sum(entry.label not in apart and recorded.is_ranked(entry.result or {}) for entry in measured) - 1
    ranked: list[Ranked] = []
    leader: Ranked | None = None
    placed = 0
    for entry in measured:
        is_unranked = how.times is not None and not recorded.is_ranked(entry.result or {})
        if is_unranked or entry.label in apart:
            ranked.append(Ranked(entry, metric=metric))
            continue
        placed += 1
        # A row is compared with the first of its group: ties of neighbours would chain rows that differ.
        beside = None if leader is None else _beside(leader, entry, how, rivals)
        ranked.append(beside or Ranked(entry, placed, metric=metric))
        leader = leader if beside else ranked[-1]
    # One row that is not judged may be before all others of its group.
    unjudged = {row.may_be for row in ranked} - {None}
    ranked = [
        replace(row, place=None, tied=False, may_be=row.place) if row.place in unjudged else row for row in ranked
    ]
    return ranked + [Ranked(entry, metric=metric) for entry in entries if values[id(entry)] is None]


def _beside(leader: Ranked, entry: Entry, how: Metric, rivals: int) -> Ranked | None:
    """The entry in the group of this first row, if it may be as good; else None."""
    best, other = leader.entry.result or {}, entry.result or {}
    tie = Ranked(entry, leader.place, tied=True, metric=leader.metric)
    if how.times is None:
        return tie if how.read(best) == how.read(other) else None
    found = compare(other, best, how.times, family=rivals)
    if found.verdict is SpeedVerdict.slower:
        return None
    # Ranges that lie apart are no tie, even if nobody would choose by so small a difference.
    one, two = (of_rounds(how.times(result)) for result in (best, other))
    are_apart = one.high < two.low
    if are_apart and found.low > 1:
        return None
    if found.hidden <= JUDGED and not are_apart:
        return replace(tie, hidden=found.hidden)
    more = found.more_rounds(JUDGED)
    return replace(tie, place=None, tied=False, hidden=found.hidden, may_be=leader.place, more_rounds=more)


HEADER = (
    *("place", "point", "tokens/s", "95 % range", "vs best", "step ms"),
    *("states/rank", "peak/rank", "sent/step", "loss last"),
)
RANGE, STEPS = "95 % range", "p10-p90"
# The order in which a narrow terminal leaves columns out, and the columns of metrics that may sort the rows.
DROPS = ("step ms", "sent/step", "states/rank", "loss last", "others", "vs best", "peak/rank")
SHOWN_IN = {
    **{"step_ms": "step ms", "peak_bytes": "peak/rank", "states_bytes": "states/rank"},
    **{"loss_last": "loss last", "perplexity": "perplexity"},
}


def by_table(ranked: Sequence[Ranked]) -> dict[str, list[Ranked]]:
    """The rows of each table, by its name."""
    return grouped((row.table, row) for row in ranked)


def tables(ranked: Sequence[Ranked]) -> dict[str, Table]:
    """The tables of the comparison, by their names; one without a name where all rows are in one."""
    whole = table(ranked)
    found = grouped(zip((row.table for row in ranked), whole.rows, strict=True))
    return {name: whole._replace(rows=tuple(rows)) for name, rows in found.items()} or {"": whole}


def fastest(ranked: Sequence[Ranked]) -> dict[str, float]:
    """The tokens/s of the fastest row of each table whose speed can be compared, by the name of the table; else 0."""
    found = dict.fromkeys((row.table for row in ranked), 0.0)
    for row in ranked:
        if row.has_speed:
            found[row.table] = max(found[row.table], tokens_per_second(row.entry.result or {}))
    return found


def table(ranked: Sequence[Ranked]) -> Table:
    """The comparison, one row per point. A failed point's row has its state; the reason is under the table."""
    results = [row.entry.result for row in ranked if row.entry.result]
    best = fastest(ranked)
    # Without rounds the range is that of the steps, which says nothing about the next measurement.
    in_rounds = any(map(recorded.is_ranked, results))
    header: tuple[str, ...] = HEADER if in_rounds else tuple(STEPS if name == RANGE else name for name in HEADER)
    rows = [_cells(row, best[row.table], in_rounds=in_rounds) for row in ranked]
    entries = [row.entry for row in ranked]
    more: dict[str, Sequence[str]] = {}
    if any(entry.is_loaded for entry in entries):
        more["others"] = list(map(_load_cell, entries))
    if trains(ranked):
        more["loss held out"] = [loss((one.result or {}).get("loss", {}).get("validation")) for one in entries]
    more |= {column.title: column.texts for column in extras.columns(entries) if column.on_screen}
    if any(entry.is_reused for entry in entries):
        more["reused from"] = list(map(_reused_from, entries))
    cells = tuple((*row, *(texts[number] for texts in more.values())) for number, row in enumerate(rows))
    kept = (SHOWN_IN[ranked[0].metric],) if ranked and ranked[0].metric in SHOWN_IN else ()
    return Table((*header, *more), cells, names=2, drops=DROPS, kept=kept)


def _reused_from(entry: Entry) -> str:
    """The time of a reused row, short enough for a table on a terminal, and its other versions; `reused` adds the
    year."""
    return ", ".join([clock(entry, "%m-%d %H:%M"), *made_with(entry)]) if entry.is_reused else ""


def made_with(entry: Entry) -> list[str]:
    """What a reused row was made with that a run of the sweep would not be, such as "torch 2.13.0+cpu"."""
    return [f"{name} {both['then']}" for name, both in entry.differs.items()]


def clock(entry: Entry, form: str) -> str:
    """When the entry was measured, in the form of time.strftime."""
    return "at an unknown time" if entry.measured_at is None else time.strftime(form, time.localtime(entry.measured_at))


def _load_cell(entry: Entry) -> str:
    return ABSENT if entry.others_share is None else f"{100 * entry.others_share:.0f} %"


def _cells(ranked: Ranked, best: float, *, in_rounds: bool) -> tuple[str, ...]:
    entry = ranked.entry
    if entry.result is None:
        return (ABSENT, entry.label, entry.state, *[ABSENT] * (len(HEADER) - 3))
    steps: dict[str, float] = entry.result["throughput"]["tokens_per_second"]
    share = "best" if steps["median"] == best else change_text(steps["median"] / best) if best else ABSENT
    share = share if ranked.has_speed else ABSENT
    known = speed(entry.result)
    low, high = (known.low, known.high) if known else (steps["p10"], steps["p90"])
    return (
        ABSENT if ranked.place is None else f"{'= ' if ranked.tied else ''}{ranked.place}",
        entry.label,
        digits(steps["median"]),
        ABSENT if in_rounds and known is None else f"{digits(low)}-{digits(high)}",
        share,
        digits(step_ms(entry.result)),
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


def conclusion(ranked: Sequence[Ranked]) -> str:
    """Names the best point of each table, or reports a tie, or says that nothing is ranked."""
    found = by_table(ranked)
    if set(found) <= {""}:
        return _conclusion(ranked)
    return "; ".join(f"{name}: {_conclusion(rows)}" for name, rows in found.items())


def _conclusion(rows: Sequence[Ranked]) -> str:
    ranked = [row for row in rows if not row.apart]
    if not any(row.is_measured for row in ranked):
        apart = ", ".join(f"{row.entry.label} ({row.apart})" for row in rows if row.apart)
        return f"no point has a place: {apart}" if apart else "no point has a result"
    word = "fastest" if ranked[0].metric == DEFAULT_METRIC else f"best by {METRICS[ranked[0].metric].words}"
    word += _of_how_many(ranked)
    if unjudged := [row for row in ranked if row.may_be == 1]:
        names = ", ".join(row.entry.label for row in unjudged)
        return f"not ranked: {why_unjudged(unjudged)}; the {word} is one of {names}"
    placed = [row for row in ranked if row.place is not None]
    if not placed:
        rounds = {len(recorded.used_rounds(row.entry.result or {})) or 1 for row in ranked if row.is_measured}
        found = " or ".join(map(str, sorted(rounds)))
        text = f"not ranked: each point was measured in {found} round{'' if rounds == {1} else 's'}, and differences "
        more = f"{STANDARD} has more"
        if evaluates(ranked) or trains(ranked):
            metric = "perplexity" if evaluates(ranked) else OF_TRAINING
            more = f"{'an evaluation' if evaluates(ranked) else 'a training'} has one: rank_by {metric}"
        return f"{text}between speeds show from {LEAST}; {more}"
    best = placed[0].entry
    ties = [row.entry for row in placed[1:] if row.tied and row.place == 1]
    if not ties:
        return f"{word}: {best.label}"
    group = [best, *ties]
    names = ", ".join(entry.label for entry in group)
    states = {entry.label: states_bytes(entry.result or {}) for entry in group}
    least = [label for label, held in states.items() if held == min(states.values())]
    smallest = f"; {least[0]} has the smallest model states" if len(least) == 1 else ""
    hidden = max(row.hidden for row in placed if row.tied and row.place == 1)
    least_seen = f"; a difference of up to {100 * hidden:.0f} % would not show"
    unseen = least_seen if round(100 * hidden) > 100 * EQUAL else ""
    return f"{word}: a tie of {names}{smallest}{unseen}"


def why_unjudged(rows: Sequence[Ranked]) -> str:
    """Why these rows share no place: what their rounds would show, and how many more would show enough."""
    hidden, more = max(row.hidden for row in rows), max(row.more_rounds for row in rows)
    unseen = "show no difference" if hidden > 1 else f"show differences from {math.ceil(100 * hidden)} % only"
    return f"these rounds would {unseen}; {many(more, 'more round')} show {100 * JUDGED:.0f} %"


def evaluates(ranked: Sequence[Ranked]) -> bool:
    """Whether the points held weights and were not trained."""
    return any("perplexity" in row.entry.result["loss"] for row in ranked if row.entry.result)


def trains(ranked: Sequence[Ranked]) -> bool:
    """Whether the points were trained to an end."""
    return any(row.entry.result.get("training") for row in ranked if row.entry.result)


def _of_how_many(ranked: Sequence[Ranked]) -> str:
    """How many points have an answer, if some do not: the first of these need not be the best of all."""
    left = sum(not RunState(row.entry.state).answered for row in ranked)
    return f" of the {len(ranked) - left} of {len(ranked)} points that have an answer" if left else ""


def next_after_sweep(ranked: Sequence[Ranked]) -> str:
    """A useful next command after a sweep: measure the best point longer, or run a failed point alone."""
    if not ranked:
        return program()
    best = next((one for one in ranked if one.place == 1), ranked[0])  # the first table may have no place to give
    entry = best.entry
    if best.place == 1 and (own := extras.places().next_command(entry)):
        return str(own)
    if entry.result is None:
        return run_command(entry.overrides)
    if entry.result.get("training") and entry.config:
        return trained.next_commands(entry.overrides, entry.config, entry.result)[0]
    return longer(entry.overrides, evaluates="perplexity" in entry.result["loss"])


def standard(overrides: Sequence[str]) -> list[str]:
    """The overrides with measure=standard. Steps that were given would override its own."""
    keys = ("measure", *(f"measure.{key}" for key in ("steps", "warmup_steps", "rounds", "min_s")))
    return [*without_key(overrides, *keys), STANDARD]


def with_more_rounds(command: Sequence[str], ranked: Sequence[Ranked]) -> list[str]:
    """The command that measures points which are not judged in as many rounds as judge them."""
    row = max(ranked, key=lambda row: row.more_rounds)
    measure, measured = row.entry.config["measure"], recorded.used_rounds(row.entry.result or {})
    rounds, steps = len(measured) + row.more_rounds, math.ceil(measure["steps"] / measure["rounds"])
    kept = without_key(command, "measure.steps", "measure.rounds")
    return [*kept, f"measure.rounds={rounds}", f"measure.steps={rounds * steps}"]


def longer(overrides: Sequence[str], *, evaluates: bool) -> str:
    """The command that measures a point longer; after an evaluation text from the same weights, because
    measure=standard would train them."""
    if not evaluates:
        return run_command(standard(overrides))
    kept = [word for word in without_key(overrides, "sweeps") if not word.lstrip("+~").startswith(OF_EVALUATION)]
    # Synthetic data need no tokenizer, and with no other data the model may have none.
    prompt = "tokens=5,6,7" if "data=synthetic" in overrides else "prompt=Once"
    return f"{program()} generate {shlex.join([*kept, prompt])}"
