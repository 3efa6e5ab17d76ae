"""Which row to take: of those that fit one, a second, and what decided between them. Pure.

[Note: what decides]
Rows for which torch's allocator lacks room are left out as long as there are others. Speeds decide where they can: the
fastest row is taken unless another's range reaches into its own. Rows whose ranges overlap cannot be told apart, and
neither can a row whose speed is not known; of these the one with the least work beside the model's own is taken, in the
order of fit_rows.order_key. An estimate with an offload has no range of its own: it is at least as uncertain as one
without, whose range is taken for it. Machines are compared by the same ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from orchestrator.config.hardware import GpuNode
from orchestrator.config.schema import LossKind, RunConfig
from orchestrator.report.summary import Row
from orchestrator.text.paths import program
from orchestrator.text.units import size
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict.choice import Candidate
from orchestrator.wings.predict.fit_rows import RECOMPUTED, Fit, best, order_key, surest
from orchestrator.wings.predict.fit_words import Length, length_text, machine
from orchestrator.wings.predict.prediction import hardware_name
from orchestrator.wings.predict.rough_time import lacking
from orchestrator.wings.predict.speed import interval

AGAIN = {"by_operation": "computes cheap operations again", "every_nth": "computes some blocks again"}


class Taken(NamedTuple):
    """The row to take, the second choice (None if there is no other), and what decided: by_speed is whether speeds did;
    why_not: why they did not; empty if they did."""

    first: Candidate
    second: Candidate | None
    by_speed: bool
    why_not: str = ""


def of_fits(fits: Sequence[Fit], hardware: str) -> Taken:
    """Choose from settled rows that fit, at least one, each at its largest micro-batch. A tensor group over several
    nodes waits for the network in each layer: it is taken if nothing else fits."""
    rows = surest(fits)
    inside = [one for one in rows if one.config.parallel.tp <= one.ranks_per_node]
    return taken([Candidate(one, one.micro, one.speed(hardware)) for one in inside or rows])


def of_machines(fits: Sequence[Fit]) -> list[Taken]:
    """The choice of each machine for which one of these rows, see fit_rows.settled, fits."""
    machines: dict[GpuNode, list[Fit]] = {}
    for one in fits:
        machines.setdefault(one.config.hardware, []).append(one)
    found = [_compared(rows) for rows in machines.values()]
    return [of_fits(rows, hardware_name(rows[0].config)) for rows in found if rows]


def _compared(fits: Sequence[Fit]) -> list[Fit]:
    """The rows of a machine that no other makes needless, and one that is needless if there is but one."""
    found = best(fits)
    others = (one.settled() for one in fits if one.micro and one.label != found[0].label)
    return [*found, *islice((one for one in others if not one.tight), len(found) == 1)]


def taken(rows: Sequence[Candidate]) -> Taken:
    """Of rows that fit, at least one. See [Note: what decides]."""
    near, by_speed, why_not = _near(rows)
    left = [one for one in rows if one is not near[0]]
    if not left:
        return Taken(near[0], None, by_speed, why_not)
    second = near[1] if len(near) > 1 else _near(left)[0][0]
    return Taken(near[0], second, by_speed, why_not)


def _near(rows: Sequence[Candidate]) -> tuple[list[Candidate], bool, str]:
    """The rows that speeds do not tell from the fastest, the least work first; whether speeds left one alone; and why
    they did not."""
    known = [(found, one) for one in rows if (found := interval(one.speed)) is not None]
    if not known:
        return _by_work(rows), False, _unknown(rows)
    least = max(known, key=lambda pair: pair[1].tokens_per_second)[0][0]
    near = [one for one in rows if (found := interval(one.speed)) is None or found[1] >= least]
    if len(near) == 1:
        return near, True, ""
    lacks = len(known) < len(near)
    return _by_work(near), False, "not every speed is known" if lacks else "the fastest cannot be told apart"


def _by_work(rows: Sequence[Candidate]) -> list[Candidate]:
    return sorted(rows, key=lambda one: order_key(one.fit.at(one.micro)))


def _unknown(rows: Sequence[Candidate]) -> str:
    outside = {one.speed.outside for one in rows if one.speed is not None} - {""}
    if outside:
        return f"no speed is known here (no published run with {', '.join(sorted(outside))} to base one on)"
    if rows[0].config.hardware.is_described:
        return f"no speed is known here (the data sheet lacks {' and '.join(lacking(rows[0].config)) or 'a number'})"
    return f"no speed is known here ({program()} calibrate measures it)"


def work_text(fit: Fit) -> str:
    """What a step of the row does beside the model's own work."""
    kind = str(fit.config.recompute.kind)
    unknown = "; this preset does not know yours (hardware.host_memory_gib=N)" * fit.host_unknown
    found = [f"needs {size(fit.host_of_node)} of host RAM per node{unknown}"] * (fit.host_bytes > 0)
    found += [f"keeps {size(fit.scratch_bytes * fit.ranks_per_node)} in scratch files"] * (fit.scratch_bytes > 0)
    found += [AGAIN.get(kind, "computes every block again")] * (RECOMPUTED[kind] > 0)
    found += ["takes the loss in tiles"] * (fit.config.loss.kind is LossKind.tiled)
    return "; ".join(found) or "nothing is offloaded or computed again"


def why_second(choice: Taken) -> str:
    """Why the second choice is not the first."""
    first, second = choice.first, choice.second
    assert second is not None, "there is a second choice"
    if choice.by_speed and second.speed is not None:
        slower = 1 - second.tokens_per_second / first.tokens_per_second
        return f"{slower:.0%} slower by prediction"
    fits = [one.fit.at(one.micro) for one in (first, second)]
    at = next((place for place, pair in enumerate(zip(*map(order_key, fits), strict=True)) if pair[0] != pair[1]), None)
    mine, theirs = (size(round(one.sent_per_token)) for one in fits)
    fewer = f"its micro-batch is smaller, the first has {first.micro}"
    reasons = {3: fewer, 5: f"sends {theirs} a token, the first {mine}", 6: fewer}
    return "as much to do" if at is None else reasons.get(at, work_text(fits[1]))


def decided(choice: Taken) -> str:
    """What decided between the two."""
    if choice.second is None:
        return "no other row is to be compared"
    if choice.by_speed:
        return "the speed: no other row's range reaches that of the first"
    return f"{choice.why_not}, so the row with the least extra work wins"


def described(one: Candidate) -> str:
    """The row with its micro-batch, the tokens or images of a step, and its speed."""
    speed = "" if one.speed is None or one.speed.outside else f", {one.speed.text} tokens/s"
    micro = f"micro-batch {one.micro}{' (tight)' * bool(one.fit.tight)}"
    return f"{one.fit.label}, {micro}, {amount(one.config)} a step{speed}"


def amount(config: RunConfig) -> str:
    """The tokens or images of a step of all ranks, such as "4,096 tokens"."""
    return sample_of(config).amount(config.batch.global_size)


def rows(choice: Taken, job: Length | None = None) -> list[Row]:
    """The three lines; two if there is no second choice. With a job one more, what it takes with each."""
    found = [Row("take", f"{described(choice.first)}: {work_text(choice.first.fit)}")]
    if choice.second is not None:
        found.append(Row("second", f"{described(choice.second)}: {why_second(choice)}"))
    found.append(Row("decided", decided(choice)))
    return [*found, *(Row("job", text) for text in job_texts(choice.first, job))]


def job_texts(one: Candidate, job: Length | None) -> list[str]:
    """The hours of the job, and what they cost; empty without a job."""
    return [] if job is None else [length_text(job, one.config, interval(one.speed))]


def fastest_machine(choices: Sequence[Taken]) -> Taken:
    """The choice of the machine whose row is the fastest by prediction; the first if no speed is known."""
    known = [one for one in choices if interval(one.first.speed) is not None]
    return max(known, key=lambda one: one.first.tokens_per_second) if known else choices[0]


def rows_of_machines(choices: Sequence[Taken], job: Length | None) -> list[Row]:
    """The row to take on each of several machines, the job there, and what decided between the machines."""
    found, fastest = [], fastest_machine(choices).first
    for choice in choices:
        one = choice.first
        found.append(Row("take", "; ".join([f"{described(one)}: {work_text(one.fit)}", *job_texts(one, job)])))
    known = {one.first: ends for one in choices if (ends := interval(one.first.speed)) is not None}
    near = [one.fit.label for one, ends in known.items() if ends[1] >= known[fastest][0]]
    if not known:
        why = "no machine is the first, because no speed is known"
    elif len(near) == 1:
        why = f"{near[0]}: no other known range of speed reaches its own"
    else:
        why = f"{' and '.join(near)} cannot be told apart: their ranges of speed overlap"
    unknown = "; the others cannot be compared" * (0 < len(known) < len(choices))
    return [*found, Row("decided", why + unknown)]


def documents(choices: Sequence[Taken], job: Length | None) -> list[dict[str, Any]]:
    """The choice of each machine as plain data, for other programs."""
    found = []
    for choice in choices:
        one, second = choice.first, choice.second and choice.second.fit.label
        row = {"machine": machine(one.config), "label": one.fit.label, "micro": one.micro, "second": second}
        told = {"decided": decided(choice), "job": "".join(job_texts(one, job))}
        found.append({**row, "overrides": list(one.overrides), **told})
    return found
