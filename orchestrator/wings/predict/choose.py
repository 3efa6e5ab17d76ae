"""`zlab choose`: the fastest setting that fits, from predictions, confirmed by a few short runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator import wings
from orchestrator.commands.experiment_file import write_experiment
from orchestrator.commands.sweep import SweepRequest, swept
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.cluster import ClusterKind
from orchestrator.config.engine import EngineKind
from orchestrator.config.schema import Device, to_dict
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, INCOMPLETE, OK
from orchestrator.plan.point import Point
from orchestrator.plan.points import judged
from orchestrator.plan.rules.scene import here
from orchestrator.report import comparison, ranking
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program, shown
from orchestrator.text.streams import complain
from orchestrator.text.units import ABSENT, digits, many, significant, size
from orchestrator.wings.predict import calibrate, choice, fit, speed
from orchestrator.wings.predict.choice import Candidate, ShortRun
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.prediction import hardware_name
from orchestrator.wings.predict.step import MICRO, given_micro
from orchestrator.wings.profile import costs

RUNS = 4  # most real runs
FIRST = (1, 4, 16)  # micro-batches that are predicted first
GROWTH = 4
GAIN = 1.05  # of tokens per second, for which a larger micro-batch is looked at
LONGEST_S = 2.0  # of a predicted step that a short run makes
SHOWN = 12
HEADER = ("row", "micro", "tokens/s, predicted", "tokens/s, measured", "needs/rank", "because")
FASTEST, SMALLEST = "fastest", "smallest"
ON_DRIVES = "optimizer_nvme,optimizer_param_nvme"  # what is tried when nothing fits in memory


class Outcome(NamedTuple):
    """What is chosen, the short runs by label, the labels of those that tie for the fastest, and whether the smallest
    was asked for."""

    best: Candidate
    measured: Mapping[str, ShortRun]
    tied: tuple[str, ...]
    is_smallest: bool = False

    def speed(self, one: Candidate) -> float | None:
        """The measured tokens per second of a candidate; None if it was not run."""
        run = self.measured.get(one.label)
        return None if run is None else run.median


def main(argv: Sequence[str]) -> int:
    """Prints the ranking and writes the file of the chosen setting. Returns 0, 1 if nothing fits or ran, or 3 if
    combinations are missing because they could not be counted."""
    asked, words = parser().parse_known_args(argv)
    if any(word.startswith("engine=") and word != f"engine={EngineKind.zero}" for word in words):
        code: int = wings.load(wings.CHOOSE_ENGINES)(words, asked.runs, as_json=asked.json)
        return code
    asked.runs = RUNS if asked.runs is None else asked.runs
    if asked.runs < 0:
        raise Refusal([f"--runs {asked.runs}: expected 0 or more      fix: --runs {RUNS}"])
    screen = Screen(make_console(on_stderr=asked.json))
    fits, tried, micro = _rows(words, fit.AXES)
    if not any(one.micro for one in fits) and "offload" not in fit.names(words) and _is_on_gpus(fits):
        screen.say("nothing fits with all states in memory: looking at scratch files on drives")
        fits, tried, micro = _rows(words, {**fit.AXES, "offload": ON_DRIVES})
    fitting = [one for one in fits if one.micro]
    screen.say(f"{many(len(fits), 'combination')}: {len(fitting)} fit, with a micro-batch of up to {_largest(fits)}")
    if not fitting:
        complain(f"error: nothing fits; the nearest, {fits[0].label}: {fits[0].reason}")
        return FAILED
    try:
        ranked = _ranked(fitting, micro, asked.order, screen)
    except calibrate.CalibrationError as error:
        complain(f"error: nothing was measured: {error}")
        return FAILED
    is_smallest = asked.order == SMALLEST
    if not ranked or (ranked[0].speed is None and not is_smallest):
        complain("error: the speed of no combination could be predicted      see: docs/speed.md")
        return FAILED
    finalists = ranked[: min(asked.runs, 1)] if is_smallest else choice.shortlist(ranked, asked.runs)
    is_here = not ranked[0].config.hardware.is_described
    measured, tied = _confirmed(finalists, words, screen) if is_here and asked.runs else ({}, ())
    chosen = choice.best_run(measured, tied) if measured else ranked[0].label
    best = next(one for one in ranked if one.label == chosen)
    if is_here and asked.runs and not measured:
        complain("error: none of the short runs ended with a result")
        return FAILED
    largest = max(fitting, key=lambda one: one.micro)
    _show(ranked, finalists, Outcome(best, measured, tied, is_smallest), largest, screen, asked.json)
    return OK if len(fits) == tried else INCOMPLETE


def parser() -> VerbParser:
    parser = verb_parser(
        "choose",
        "Finds the fastest stage, offload, recomputation, loss and micro-batch that fit: predicts all combinations of "
        "what the line leaves open, measures parts of a step here (as calibrate does), and confirms the best by short "
        "runs. For hardware=NAME, which need not be here, from its data sheet and without runs.",
    )
    parser.usage = f"{program()} choose [-h] [group=option | key=value ...] [--runs N] [--json]"
    parser.epilog = f"example: {program()} choose model=llama_tiny precision=fp32"
    more = "6 with engine=all or several engines, of which the best that did the same work is chosen"
    parser.add_argument("--runs", type=int, help=f"most real runs; 0 only predicts; default: {RUNS}, or {more}")
    parser.add_argument(
        "--order",
        choices=(FASTEST, SMALLEST),
        default=FASTEST,
        help="which setting that fits comes first: the fastest, or the one that needs the least memory of a rank, at "
        "micro-batch 1 unless one is given; default: fastest",
    )
    add_json(parser)
    return parser


def _is_on_gpus(fits: Sequence[Fit]) -> bool:
    return all(one.config.resources.device is Device.cuda for one in fits)


def _ranked(fits: Sequence[Fit], micro: int | None, order: str, screen: Screen) -> list[Candidate]:
    """All candidates, those to be chosen first."""
    if order == FASTEST:
        return _predicted(fits, micro, screen)
    found = [Candidate(one, micro or 1) for one in fits if (micro or 1) <= one.micro]
    return choice.smallest_first(choice.with_speeds(found, hardware_name(fits[0].config)))


def _rows(words: Sequence[str], tried: Mapping[str, str]) -> tuple[list[Fit], int, int | None]:
    """The rows of fit, of how many points they are, and the micro-batch that the words give; None if they leave it
    open. tried: options of the groups that the words leave open."""
    flags = sorted(set(arguments.split(words).flags) - set(calibrate.FLAGS))
    if flags:
        raise Refusal([f"choose has no {flag}      see: {program()} choose --help" for flag in flags])
    given = [word for word in words if word.partition("=")[0] == MICRO]
    micro = given[-1].partition("=")[2] if given else None
    if micro is not None and not (micro.isdigit() and int(micro)):
        raise Refusal([f"{given[-1]}: expected one number for choose      fix: {MICRO}=4, or leave it out"])
    left = [word for word in words if word not in given]
    axes = [f"{group}={options}" for group, options in tried.items() if group not in fit.names(left)]
    points = fit.valid_points([*left, *axes])
    if any(given_micro(point.config, point.overrides) for point in points):  # by a file of sweeps/
        raise Refusal([f"choose tries several micro-batches      fix: {MICRO}=4 on the line, not in a sweep"])
    fits = fit.fits_of(points, quiet=True)
    if any(one.config.cluster.kind is ClusterKind.slurm for one in fits):
        raise Refusal(["choose measures on this machine      fix: cluster=local, inside a job of the cluster"])
    if any(one.config.trains_to_the_end for one in fits):
        raise Refusal(["choose confirms by short runs, and measure=train trains to its end      fix: measure=standard"])
    return fits, len(points), None if micro is None else int(micro)


def _largest(fits: Sequence[Fit]) -> str:
    largest = max(fits, key=lambda one: one.micro)
    return f"{largest.micro}{'+' if largest.capped else ''}"


def _predicted(fits: Sequence[Fit], micro: int | None, screen: Screen) -> list[Candidate]:
    """All candidates, the fastest first. Larger micro-batches are looked at as long as they gain."""
    name = hardware_name(fits[0].config)
    micros = list(FIRST) if micro is None else [micro]
    largest = max(one.micro for one in fits)
    ranked = _measured(choice.candidates(fits, micros), name, screen)
    while micro is None and ranked:
        next_micro = GROWTH * micros[-1]
        if next_micro > largest or not _gains(ranked, micros):
            break
        micros.append(next_micro)
        near = [one.fit for one in choice.fastest_of_rows(ranked) if one in choice.shortlist(ranked, len(ranked))]
        more = _measured(choice.candidates(near, [next_micro]), name, screen)
        ranked = sorted([*ranked, *more], key=lambda one: -one.tokens_per_second)
    return ranked


def _gains(ranked: Sequence[Candidate], micros: Sequence[int]) -> bool:
    """Whether the largest micro-batch so far is the fastest, by enough, and its step short enough for a larger one."""
    best = ranked[0]
    smaller = max((one.tokens_per_second for one in ranked if one.micro == micros[-2]), default=0.0)
    is_faster = best.micro == micros[-1] and best.tokens_per_second > GAIN * smaller
    return best.speed is not None and is_faster and GROWTH * best.speed.time.total_s <= LONGEST_S


def _measured(found: Sequence[Candidate], name: str, screen: Screen) -> list[Candidate]:
    local = [one.config for one in found if not one.config.hardware.is_described]
    jobs = sorted(speed.missing(local, name), key=lambda job: job.config.batch.micro if job.kind == "segments" else 0)
    if jobs:
        calibrate.measure(jobs, name, lambda text: screen.say(text, "dim"))
    return choice.with_speeds(found, name)


def _confirmed(
    finalists: Sequence[Candidate], words: Sequence[str], screen: Screen
) -> tuple[dict[str, ShortRun], tuple[str, ...]]:
    """The runs that ended with a result, by label, and the labels of those that tie for the fastest; of too few rounds
    to tell, the fastest alone."""
    longer = [] if "measure" in fit.names(words) else ["measure=standard"]
    scene, points = here(), []
    for one in finalists:
        found, _ = judged(composed(arguments.split([*one.overrides, *longer])), scene)
        points += [replace(point, label=one.label) for point in found if isinstance(point, Point)]
    request = SweepRequest("choose", tuple(points), command=())
    screen.say(f"confirming {many(len(points), 'candidate')} by short runs", "bold")
    _, sweep = swept(request, scene.hardware, screen)
    rows = [] if sweep is None else [row for row in comparison.ranked(sweep) if row.is_measured]
    predicted = {one.label: one.tokens_per_second for one in finalists}
    runs = {
        row.entry.label: ShortRun(predicted[row.entry.label], value)
        for row in rows
        if row.entry.result and (value := ranking.METRICS[ranking.DEFAULT_METRIC].read(row.entry.result)) is not None
    }
    tied = [row.entry.label for row in rows if row.place == 1] or list(runs)[:1]
    return runs, tuple(tied)


def _show(
    ranked: Sequence[Candidate],
    finalists: Sequence[Candidate],
    outcome: Outcome,
    largest: Fit,
    screen: Screen,
    as_json: bool,
) -> None:
    rows, best = choice.fastest_of_rows(ranked), outcome.best
    shown_rows = list(dict.fromkeys([best, *finalists, *rows]))[:SHOWN]
    folder = Path(best.config.output).absolute() / "chosen"
    name = write_experiment(folder, best.overrides, _because(outcome))
    if as_json:
        print(json.dumps(_document(outcome, shown_rows, folder, name), ensure_ascii=False))
        return
    screen.console.print()
    table = Table(HEADER, tuple(_row(one, ranked[0], outcome) for one in shown_rows), texts=("because",))
    screen.table(_with_costs(table, shown_rows))
    left = len(rows) - len({one.fit.label for one in shown_rows})
    notes = [Row("not shown", f"{many(left, 'row')} that {'follow' if left > 1 else 'follows'}")] if left > 0 else []
    capped = "at least " if largest.capped else ""
    notes.append(Row("largest", f"micro-batch {capped}{largest.micro} fits with {largest.label}"))
    notes.append(Row("chosen", f"{best.label}: {_because(outcome)}"))
    notes.append(Row("file", shown(folder / "experiment" / f"{name}.yaml")))
    command = [program(), shlex.join(["--config-dir", shown(folder), f"experiment={name}"])]
    screen.closing([*notes, Row("next", " ".join(command))])


def _because(outcome: Outcome) -> str:
    best, measured = outcome.best, outcome.speed(outcome.best)
    if outcome.is_smallest:
        known = "no run has confirmed it" if measured is None else f"a short run had {digits(measured)} tokens/s"
        return f"the least memory of a rank of those that fit; {known}"
    if measured is None and best.speed is not None and best.speed.outside:
        return f"the first of an order that no published run supports: {best.speed.outside}"
    if measured is None:
        rough = best.speed.text if best.speed is not None else ABSENT
        return f"the fastest by prediction, {rough} tokens/s; no run has confirmed it"
    runs, found = many(len(outcome.measured), "short run"), f"{digits(measured)} tokens/s"
    if len(outcome.tied) == 1:
        return f"the fastest of {runs}, {found}"
    return f"the fastest by prediction of {len(outcome.tied)} that tie in {runs}; {found}"


def _row(one: Candidate, first: Candidate, outcome: Outcome) -> tuple[str, ...]:
    known = outcome.speed(one)
    text = choice.larger(one, first) if outcome.is_smallest else choice.reason(one, first)
    if one is outcome.best and known is not None and not outcome.is_smallest:
        text = "chosen: measured fastest" if len(outcome.tied) == 1 else "chosen: a tie, fastest by prediction"
    needs = ABSENT if one.needs is None else size(one.needs)
    predicted = ABSENT if one.speed is None else one.speed.text
    return (one.fit.label, str(one.micro), predicted, digits(known), needs, text)


def _with_costs(table: Table, rows: Sequence[Candidate]) -> Table:
    """The table with the cost of a billion tokens at the predicted speeds, if a price is set."""
    configs = [to_dict(one.config) for one in rows]
    amounts = [
        costs.predicted_cost(config, one.speed.shown if one.speed else None)
        for config, one in zip(configs, rows, strict=True)
    ]
    if all(amount is None for amount in amounts):
        return table
    name = costs.column_name({price.currency for config in configs if (price := costs.price_of(config))})
    cells = [ABSENT if amount is None else significant(amount) for amount in amounts]
    at = HEADER.index("needs/rank")
    found = tuple((*row[:at], cell, *row[at:]) for row, cell in zip(table.rows, cells, strict=True))
    return table._replace(header=(*table.header[:at], f"{name}, predicted", *table.header[at:]), rows=found)


def _document(outcome: Outcome, rows: Sequence[Candidate], folder: Path, name: str) -> dict[str, Any]:
    listed = [
        {
            "label": one.label,
            "overrides": list(one.overrides),
            "micro": one.micro,
            "predicted": None if one.speed is None else one.speed.to_dict(),
            "measured_tokens_per_second": outcome.speed(one),
        }
        for one in rows
    ]
    order = SMALLEST if outcome.is_smallest else FASTEST
    known = {"chosen": outcome.best.label, "tied": list(outcome.tied), "order": order}
    return {**known, "config_dir": str(folder), "experiment": name, "rows": listed}
