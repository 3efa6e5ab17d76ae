"""Fits the shares of the data sheets to published step times, and prints how well they predict a source left out.

`python benchmarks/published_shares.py [--write]`. The runs are those of `published/speeds.csv` that a prediction
answers. The shares are one table for all runs; for a generation of GPUs with three sources, products and attention have
their own. Nothing belongs to a case. The numbers printed are those of zero_runtime/predict/timing/data_sheet.py, where
they are copied by hand. `--write` writes results/published_shares_DATE.md. Needs no GPU; traces of models are kept in
the user's cache.

[Note: the fit]
The logarithms of the shares minimise the sum of w * huber(log(predicted / published) / SPREAD), and of the squared
distance of each share from that of its sources, in units of how far sources differ (PRIORS). A source of n runs
weighs as much as the square root of n. A source that is left out is left out whole. A run is predicted with the norms
and the attention kernels that its engine had: those of the first FlashAttention reach a share of their own, which no
step of this runtime has.

[Note: the range]
A run of a new source differs from its prediction by what its source has in common, and by what is its own. From the
errors of the sources that were left out, each source counted alike: the variance of their means, and the mean variance
within a source. The range is the prediction interval of Student's t for one more source, with one degree of freedom
less than there are sources. Its check leaves a source out twice: the range is that of the others, each predicted
without both.
"""

from __future__ import annotations

import argparse
import bisect
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from statistics import mean, median, variance
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.published_speed import FIRST, Row, kendall_of, runs, traced  # noqa: E402
from orchestrator.config.schema import RunConfig  # noqa: E402
from orchestrator.wings.predict import rough_time  # noqa: E402
from orchestrator.wings.predict.step import ConfigMemory  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.predict.memory.activation_count import Trace  # noqa: E402
from zero_runtime.predict.memory.counted_unit import CountRules  # noqa: E402
from zero_runtime.predict.timing.data_sheet import Efficiencies, Peaks, generation, segment_s, step_costs  # noqa: E402
from zero_runtime.predict.timing.step_time import step_time  # noqa: E402
from zero_runtime.predict.timing.work import Work  # noqa: E402
from zero_runtime.state_bytes import UnitSize  # noqa: E402

SPREAD = 0.1  # an error from which on a run pulls no more than proportionally: about that of one source within itself
FEWEST_SOURCES = 3  # of a generation of GPUs that has shares of its own
HELD = 0.8  # of the runs, by the range
FEW = (3, 4)  # micro-batches of a step that is replayed
GRID = {"network": (0.1, 0.3, 0.9), "messages": (1.0, 8.0, 24.0)}


class Prior(NamedTuple):
    """What sources say of a share, and by which factor they differ."""

    value: float
    factor: float


# The sources are in data_sheet.py. What none states (kernels, messages, hiding, stragglers) may move by a factor of 3.
PRIORS = {
    "products": Prior(0.75, 1.15),
    "attention": Prior(0.50, 1.3),
    "older": Prior(0.62, 1.3),
    "memory": Prior(0.80, 1.1),
    "traffic": Prior(0.8, 1.5),
    "kernel_s": Prior(5e-6, 3.0),
    "links": Prior(0.80, 1.3),
    "network": Prior(0.5, 2.0),
    "messages": Prior(3.0, 3.0),
    "unhidden": Prior(0.1, 3.0),
    "stragglers": Prior(0.01, 3.0),
}
# A generation's, as a share of that of the others: Hopper's best products reach 80 % where Ampere's reach 86 %, and
# FlashAttention-2 35 % where it reaches 50 %.
OWN = {"products": Prior(0.93, 1.15), "attention": Prior(0.7, 1.4)}
TOP = {
    "products": 0.95,
    "attention": 0.95,
    "memory": 0.95,
    "older": 1.0,
    "links": 0.95,
    "network": 0.95,
    "unhidden": 1.0,
}  # the most


@dataclass(frozen=True)
class Fitted(Efficiencies):
    """older: what attention kernels of the first FlashAttention reach, as a share of `attention`. They reach 30 to 50 %
    forward and 25 to 35 % backward on an A100, where the second reaches up to 73 % and 63 % (arXiv 2307.08691)."""

    older: float = 1.0


@dataclass(eq=False)
class Case:
    """A published run: its step in seconds, and what a prediction of it is made from."""

    row: Row
    memory: ConfigMemory
    trace: Trace
    units: Sequence[tuple[UnitSize, MixedPrecision]]
    rules: CountRules
    works: Sequence[Work]

    @cached_property
    def published_s(self) -> float:
        return float(self.row["step_s"])

    @property
    def config(self) -> RunConfig:
        return self.memory.config

    @cached_property
    def source(self) -> str:
        return self.row["table"]

    @cached_property
    def generation(self) -> str:
        return generation(self.config.hardware.gpu or "")

    @cached_property
    def _peaks(self) -> Peaks:
        peaks = rough_time.peaks_of(self.config)
        assert peaks is not None
        return peaks

    @cached_property
    def _counted(self) -> Counter[Work]:
        return Counter(self.works)

    def tensor_s(self, shares: Efficiencies) -> float:
        """The messages of tensor parallelism, for which the ranks wait."""
        return rough_time.tensor_s(self.memory, self._peaks, shares)

    def model_s(self, shares: Efficiencies) -> float:
        """The model's own work in a step."""
        once = sum(count * segment_s(work, self._peaks, shares) for work, count in self._counted.items())
        return once * self.rules.micro_batches

    def rest_s(self, shares: Efficiencies) -> tuple[float, float]:
        """All other time of a step of one rank, replayed: without what is hidden beside computing, and that alone.

        From the third on all micro-batches are alike, so that a step of many is a straight line through two of few.
        """
        count = self.rules.micro_batches
        if count <= FEW[1]:
            return self._replayed_s(shares, count)
        few, more = (self._replayed_s(shares, one) for one in FEW)
        times = (count - FEW[0]) / (FEW[1] - FEW[0])
        return few[0] + (more[0] - few[0]) * times, few[1] + (more[1] - few[1]) * times

    def _replayed_s(self, shares: Efficiencies, count: int) -> tuple[float, float]:
        layout = rough_time.data_layout(self.config, self.rules.group_ranks)
        segments = [segment_s(work, self._peaks, shares) for work in self.works]
        rules, found = replace(self.rules, micro_batches=count), []
        for unhidden in (0.0, 1.0):
            some = replace(shares, unhidden=unhidden)
            costs = step_costs(self._peaks, layout, rough_time.element_bytes(self.config), some)
            time = step_time(self.trace, self.units, rules, segments, costs, prefetch=self.config.zero.prefetch)
            found.append(time.total_s - time.model_s)
        return found[0], found[1] - found[0]

    def total_s(self, shares: Efficiencies) -> float:
        """The time of a step, replayed."""
        rest, hidden = self.rest_s(shares)
        whole = self.model_s(shares) + self.tensor_s(shares) + rest + shares.unhidden * hidden
        return whole * shares.slowest(self.config.resources.nodes)


class Quick:
    """Cases whose collectives were replayed on GRID at these shares; between its points, straight lines over
    logarithms. On one node the collectives hardly depend on them, and are replayed once."""

    def __init__(self, cases: Sequence[Case], at: Mapping[str, Efficiencies]) -> None:
        self.cases, self._rests = cases, {}
        for case in cases:
            shares = at[case.generation]
            if case.config.resources.nodes == 1:
                self._rests[case] = np.array(case.rest_s(shares))
                continue
            self._rests[case] = np.array(
                [
                    [case.rest_s(replace(shares, network=network, messages=messages)) for messages in GRID["messages"]]
                    for network in GRID["network"]
                ]
            )

    def total_s(self, case: Case, shares: Efficiencies) -> float:
        """About `Case.total_s`."""
        rest, hidden = self._rest(case, shares)
        whole = case.model_s(shares) + case.tensor_s(shares) + rest + shares.unhidden * hidden
        return float(whole * shares.slowest(case.config.resources.nodes))

    def _rest(self, case: Case, shares: Efficiencies) -> np.ndarray:
        values = self._rests[case]
        if values.ndim == 1:
            return values
        for name in GRID:  # the first axis is interpolated away, then the next
            points, at = GRID[name], getattr(shares, name)
            place = min(max(bisect.bisect_left(points, at), 1), len(points) - 1)
            low, high = points[place - 1], points[place]
            share = min(max(math.log(at / low) / math.log(high / low), 0.0), 1.0)
            values = values[place - 1] * (1 - share) + values[place] * share
        return values


Table = Mapping[str, Fitted]  # by generation; "" for those without shares of their own


def fitted(quick: Quick, cases: Sequence[Case]) -> Table:
    """The shares that these cases give, see [Note: the fit]."""
    own = own_generations(cases)
    names = [*PRIORS, *((generation, name) for generation in own for name in OWN)]
    counts = Counter(case.source for case in cases)
    weights = np.array([counts[case.source] ** -0.25 for case in cases])  # squared by the loss
    spreads = np.log([prior.factor for prior in PRIORS.values()] + [prior.factor for prior in OWN.values()] * len(own))
    values = np.log([prior.value for prior in PRIORS.values()])
    published = np.log([case.published_s for case in cases])

    def table_of(moved: np.ndarray) -> Table:
        logs = moved * spreads
        shares = {
            name: min(math.exp(values[place] + logs[place]), TOP.get(name, math.inf))
            for place, name in enumerate(PRIORS)
        }
        found = {"": Fitted(**shares)}
        for place, name in enumerate(names[len(PRIORS) :], len(PRIORS)):
            generation, share = name
            one = found.get(generation, found[""])
            moved_to = getattr(one, share) * OWN[share].value * math.exp(logs[place])
            found[generation] = replace(one, **{share: min(moved_to, TOP[share])})
        return found

    def residuals(moved: np.ndarray) -> np.ndarray:
        shares = table_of(moved)
        predicted = np.log([quick.total_s(case, of_case(shares, case)) for case in cases])
        errors = np.abs(predicted - published) / SPREAD
        huber = np.where(errors < 1, errors**2, 2 * errors - 1)  # the square of the residual
        return np.concatenate([np.sign(predicted - published) * np.sqrt(huber) * weights, moved])

    return table_of(least_squares(residuals, np.zeros(len(names)), bounds=(-4, 4), diff_step=1e-3).x)


def own_generations(cases: Sequence[Case]) -> list[str]:
    """The generations of GPUs with enough sources among the cases."""
    sources: dict[str, set[str]] = {}
    for case in cases:
        sources.setdefault(case.generation, set()).add(case.source)
    return sorted(name for name, found in sources.items() if name and len(found) >= FEWEST_SOURCES)


def of_case(shares: Table, case: Case) -> Fitted:
    """The shares of the case's GPU, with those of its attention kernels."""
    found = shares.get(case.generation, shares[""])
    return replace(found, attention=found.attention * found.older) if case.row["kernels"] == FIRST else found


@dataclass(frozen=True)
class LeftOutSource:
    """Runs of a source predicted by shares from the other sources: log(predicted / published) of each."""

    cases: Sequence[Case]
    errors: Sequence[float]

    def score(self) -> str:
        """Cells of a row: runs, median error, bias, worst, Kendall's tau and its pairs."""
        shares = [math.exp(error) - 1 for error in self.errors]
        tau, pairs = self.tau()
        cells = [str(len(shares)), f"{median(map(abs, shares)):.1%}", f"{median(shares):+.1%}"]
        return " | ".join([*cells, f"{max(shares, key=abs):+.0%}", f"{tau:.2f}" if pairs else "-", str(pairs)])

    def tau(self) -> tuple[float, int]:
        speeds = []
        for case, error in zip(self.cases, self.errors, strict=True):
            batch = case.config.batch
            tokens = batch.micro * (batch.accumulation or 1) * batch.seq
            group = (case.source, case.row["model"], case.row["device"])
            speeds.append((group, tokens / case.published_s, tokens / (case.published_s * math.exp(error))))
        return kendall_of(speeds)


def left_out_of(quick: Quick, cases: Sequence[Case]) -> dict[str, LeftOutSource]:
    """Each source predicted by the shares of the others."""
    found = {}
    for source in sorted({case.source for case in cases}):
        shares = fitted(quick, [case for case in cases if case.source != source])
        mine = [case for case in cases if case.source == source]
        found[source] = LeftOutSource(mine, [_error(quick, case, shares) for case in mine])
    return found


def _error(quick: Quick, case: Case, shares: Table) -> float:
    return math.log(quick.total_s(case, of_case(shares, case)) / case.published_s)


def range_of(sources: Sequence[LeftOutSource]) -> tuple[float, float]:
    """The factors of a predicted time between which HELD of the published ones of one more source are expected, see
    [Note: the range]. At least two sources, one of them with two runs."""
    means = [mean(-error for error in one.errors) for one in sources]
    within = mean(variance(one.errors) for one in sources if len(one.errors) > 1)
    count = len(sources)
    spread = math.sqrt(variance(means) * (1 + 1 / count) + within)
    half = float(student.ppf((1 + HELD) / 2, count - 1)) * spread
    return math.exp(mean(means) - half), math.exp(mean(means) + half)


def held_by(one: LeftOutSource, ends: tuple[float, float]) -> int:
    """How many runs are in the range."""
    return sum(ends[0] <= math.exp(-error) <= ends[1] for error in one.errors)


def checked(quick: Quick, cases: Sequence[Case]) -> dict[str, tuple[int, int]]:
    """For each source the runs in the range that the others give, and all its runs."""
    found = {}
    for source in sorted({case.source for case in cases}):
        others = [case for case in cases if case.source != source]
        ends = range_of(list(left_out_of(quick, others).values()))
        shares = fitted(quick, others)
        mine = [case for case in cases if case.source == source]
        one = LeftOutSource(mine, [_error(quick, case, shares) for case in mine])
        found[source] = (held_by(one, ends), len(mine))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write results/published_shares_DATE.md")
    write = parser.parse_args().write
    lines = list(report(known_cases(runs())))
    print("\n".join(lines))
    if write:
        target = Path(__file__).with_name("results") / f"published_shares_{date.today()}.md"
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def known_cases(rows: Sequence[Row]) -> list[Case]:
    """The rows for which a prediction shows a number."""
    by_case = traced(rows)
    found = []
    for row in rows:
        run = by_case.get(row["case"])
        config, memory = (None, None) if run is None else (run.config, run.memory)
        time = None if memory is None else rough_time.estimate(memory, rough_time.shares_of(memory.config))
        if config is None or memory is None or time is None or rough_time.outside(config, time):
            continue
        part, work = memory.part(config.batch.micro), memory.work(config.batch.micro)
        assert part is not None
        assert work is not None
        trace = part.linear.trace
        works = work.in_order([(kind, unit) for _, kind, unit in trace.marks])
        assert works is not None, "the work is that of this trace"
        found.append(Case(row, memory, Trace(marks=trace.marks), memory.units, memory.rules, works))
    return found


def report(cases: Sequence[Case]) -> Iterator[str]:
    """The lines of the report."""
    start = {name: rough_time.fitted_shares("") for name in {case.generation for case in cases}}
    quick = Quick(cases, start)
    shares, left, held = fitted(quick, cases), left_out_of(quick, cases), checked(quick, cases)
    ends = range_of(list(left.values()))
    yield "# Shares of data sheets, fitted to published step times"
    yield ""
    yield "`python benchmarks/published_shares.py --write` writes this file; its docstring has the method. Each source"
    yield "is predicted by shares that were fitted to the other sources. An error is that of the step's time, the bias"
    yield "the median of the signed errors; Kendall's tau ranks the throughput of a GPU within a source, model and GPU."
    yield from ("", "## The table", "", "| share | assumed | all GPUs | " + " | ".join(sorted(shares)[1:]) + " |")
    yield "|---" * (2 + len(shares)) + "|"
    for name, prior in PRIORS.items():
        cells = [f"{getattr(shares[key], name):.3g}" if key == "" or name in OWN else "" for key in sorted(shares)]
        yield f"| {name} | {prior.value:.3g}, by a factor of {prior.factor:g} | {' | '.join(cells)} |"
    yield ""
    yield f"The range is {ends[0]:.3f} to {ends[1]:.3f} of the predicted time."
    yield from ("", "## Sources left out", "")
    yield "| source | runs | median error | bias | worst | tau | pairs | in the range | in the range of the others |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for source, one in left.items():
        yield f"| {source} | {one.score()} | {held_by(one, ends)} | {held[source][0]} of {held[source][1]} |"
    every = LeftOutSource(
        [case for one in left.values() for case in one.cases], [error for one in left.values() for error in one.errors]
    )
    inside = f"{held_by(every, ends)} | {sum(pair[0] for pair in held.values())} of {len(every.errors)}"
    yield f"| all | {every.score()} | {inside} |"
    yield from ("", "## Within the fit", "", "| source | GPU | runs | median error | bias | worst | tau | pairs |")
    yield "|---|---|---|---|---|---|---|---|"
    for source, device in sorted({(case.source, case.row["device"]) for case in cases}):
        mine = [case for case in cases if (case.source, case.row["device"]) == (source, device)]
        exact = [math.log(case.total_s(of_case(shares, case)) / case.published_s) for case in mine]
        yield f"| {source} | {device} | {LeftOutSource(mine, exact).score()} |"
    yield from (
        "",
        "## All runs",
        "",
        "| source | run | GPU | published s | left out | fitted |",
        "|---|---|---|---|---|---|",
    )
    for one in left.values():
        for case, error in zip(one.cases, one.errors, strict=True):
            within = math.exp(_error(quick, case, shares)) - 1
            name = f"{case.source} | {case.row['case']} | {case.row['device']} | {case.published_s:.3g}"
            yield f"| {name} | {math.exp(error) - 1:+.0%} | {within:+.0%} |"


if __name__ == "__main__":
    main()
