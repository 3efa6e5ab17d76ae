"""Which row to take: of those that fit one, a second, and what decided between them. Pure.

[Note: what decides]
Speeds decide where they can: the fastest row is taken unless another's range reaches into its own. Rows whose ranges
overlap are not told apart, and neither is a row whose speed is not known; of these the one with the least work beside
the model's own is taken, in the order of fit_rows.order_key. An estimate with an offload has no range of its own: it is
at least as uncertain as one without, whose range is taken for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from orchestrator.config.schema import Device, LossKind, RunConfig
from orchestrator.report.summary import Row
from orchestrator.text.paths import program
from orchestrator.text.units import size
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict.choice import Candidate
from orchestrator.wings.predict.fit_rows import RECOMPUTED, Fit, order_key
from orchestrator.wings.predict.fit_words import Length, length_text
from orchestrator.wings.predict.rough_time import lacking
from orchestrator.wings.predict.speed import interval, speed_of
from orchestrator.wings.predict.step import with_micro

AGAIN = {"by_operation": "computes cheap operations again", "every_nth": "computes some blocks again"}
WORK = "no offload, or the larger micro-batch with one; then no recomputation, less to send, a larger micro-batch"


class Taken(NamedTuple):
    """The row to take, the second choice (None if there is no other), and what decided: by_speed is whether speeds did;
    why_not: why they did not; empty if they did."""

    first: Candidate
    second: Candidate | None
    by_speed: bool
    why_not: str = ""


def of_fits(fits: Sequence[Fit], hardware: str) -> Taken:
    """Of rows that fit, at least one, each at its largest micro-batch for which the allocator has room."""
    choice = taken([Candidate(one, one.micro, one.speed(hardware)) for one in fits])
    second = choice.second and roomy(choice.second, hardware)
    return choice._replace(first=roomy(choice.first, hardware), second=second)


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
    return _by_work(near), False, "not every speed is known" if lacks else "the ranges of the fastest overlap"


def _by_work(rows: Sequence[Candidate]) -> list[Candidate]:
    return sorted(rows, key=lambda one: order_key(replace(one.fit, micro=one.micro)))


def _unknown(rows: Sequence[Candidate]) -> str:
    outside = {one.speed.outside for one in rows if one.speed is not None} - {""}
    if outside:
        return f"no speed is known: no published run is known for {', '.join(sorted(outside))}"
    if rows[0].config.hardware.is_described:
        return f"no speed is known: the data sheet lacks {' and '.join(lacking(rows[0].config)) or 'a number'}"
    return f"no speed is known: {program()} calibrate measures it here"


def roomy(one: Candidate, hardware: str) -> Candidate:
    """The candidate at the largest micro-batch whose reservations by the allocator fit as well, not its tensors alone;
    unchanged if that is its own, if none is, if it was given, or on a CPU."""
    if one.config.resources.device is not Device.cuda or one.fit.given:
        return one

    def fits(micro: int) -> bool:
        found = one.fit.memory.reserved(micro)
        return found is None or found.reserved + one.fit.overhead.most <= one.fit.limit_bytes

    if fits(one.micro) or not fits(1):
        return one
    low, high = 1, one.micro
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    smaller = replace(one.fit.memory, config=with_micro(one.fit.config, low))
    return Candidate(one.fit, low, speed_of(smaller, hardware), tight_at=one.micro)


def work_text(fit: Fit) -> str:
    """What a step of the row does beside the model's own work."""
    kind = str(fit.config.recompute.kind)
    unknown = ", of which it is not known how much there is" * fit.host_unknown
    found = [f"keeps {size(fit.host_of_node)} in a node's host memory{unknown}"] * (fit.host_bytes > 0)
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
    pairs = zip(*(order_key(replace(one.fit, micro=one.micro)) for one in (first, second)), strict=True)
    at = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    sent = f"sends {size(second.fit.sent_bytes)} in a step, the first {size(first.fit.sent_bytes)}"
    fewer = f"its micro-batch is smaller, the first has {first.micro}"
    reasons = {2: fewer, 4: sent, 5: fewer}
    return "as much to do" if at is None else reasons.get(at, work_text(second.fit))


def decided(choice: Taken) -> str:
    """What decided between the two."""
    if choice.second is None:
        return "no other row is to be compared"
    if choice.by_speed:
        return "the speed: no other row's range reaches that of the first"
    return f"the least work ({WORK}), because {choice.why_not}"


def described(one: Candidate) -> str:
    """The row with its micro-batch, the tokens or images of a step, and its speed."""
    speed = "" if one.speed is None or one.speed.outside else f", {one.speed.text} tokens/s"
    room = f" (with {one.tight_at} torch's allocator lacks room)" if one.tight_at else ""
    return f"{one.fit.label}, micro-batch {one.micro}{room}, {amount(one.config)} a step{speed}"


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


def best_machine(choices: Sequence[Taken]) -> Taken:
    """The choice of the machine whose row is the fastest by prediction; the first if no speed is known."""
    known = [one for one in choices if interval(one.first.speed) is not None]
    return max(known, key=lambda one: one.first.tokens_per_second) if known else choices[0]


def rows_of_machines(choices: Sequence[Taken], best: Taken, job: Length | None) -> list[Row]:
    """The row to take on each of several machines, the job there, and what decided between the machines."""
    found = []
    for choice in choices:
        one = choice.first
        found.append(Row("take", "; ".join([f"{described(one)}: {work_text(one.fit)}", *job_texts(one, job)])))
    known = {one.first: ends for one in choices if (ends := interval(one.first.speed)) is not None}
    name = best.first.fit.label
    if not known:
        why = "no machine is the first, because no speed is known"
    elif len(known) < len(choices):
        why = f"{name} is the fastest of those whose speed is known; the others cannot be compared"
    elif all(ends[1] < known[best.first][0] for one, ends in known.items() if one is not best.first):
        why = f"{name}: its range of speed lies above those of the other machines"
    else:
        why = f"{name} is the fastest by prediction, but ranges overlap: it is not told from the next"
    return [*found, Row("decided", why)]
