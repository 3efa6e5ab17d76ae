"""`zlab choose`: the fastest setting that fits, from predictions, confirmed by a few short runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrator import wings
from orchestrator.commands.sweep import SweepRequest, swept
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.cluster import ClusterKind
from orchestrator.config.engine import EngineKind
from orchestrator.config.schema import Device
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, INCOMPLETE, INTERRUPTED, OK
from orchestrator.launch.cluster import cluster_of
from orchestrator.planning.point import Point
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import here
from orchestrator.records import sweep_record
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report import comparison, ranking
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row
from orchestrator.text.paths import program
from orchestrator.text.streams import complain
from orchestrator.text.units import many
from orchestrator.wings.predict import calibrate, choice, fit, fit_rows, take
from orchestrator.wings.predict.choice import Candidate, ShortRun
from orchestrator.wings.predict.choose_page import FASTEST, SMALLEST, ChoosePage, Outcome
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.fit_words import job_of, with_folder
from orchestrator.wings.predict.prediction import hardware_name
from orchestrator.wings.predict.step import MICRO, given_micro
from orchestrator.wings.predict.take import Taken
from orchestrator.wings.words.machine_names import machines

RUNS = 4  # most real runs
FIRST = (1, 4, 16)  # micro-batches that are predicted first
GROWTH = 4
GAIN = 1.05  # of tokens per second, for which a larger micro-batch is looked at
LONGEST_S = 2.0  # of a predicted step that a short run makes
ON_DRIVES = "optimizer_nvme,optimizer_param_nvme"  # what is tried when nothing fits in memory


class ResultsOnly(Screen):
    """The screen of the short runs' sweep, which proposes no next command: the answer of `choose` follows."""

    def closing(self, rows: Sequence[Row]) -> None:
        super().closing([row for row in rows if row.name != "next"])


def main(argv: Sequence[str]) -> int:
    """Prints the ranking and writes the file of the chosen setting. Returns 0, 1 if nothing fits or ran, or 3 if
    combinations are missing because they could not be counted."""
    asked, words = parser().parse_known_args(argv)
    if any(word.startswith("engine=") and word != f"engine={EngineKind.zero}" for word in words):
        code: int = wings.load(wings.CHOOSE_ENGINES)(words, asked.runs, as_json=asked.json)
        return code
    length, words = job_of([one for word in words for one in with_folder(word)])
    asked.runs = RUNS if asked.runs is None else asked.runs
    if asked.runs < 0:
        raise Refusal([f"--runs {asked.runs}: expected 0 or more      fix: --runs {RUNS}"])
    screen = Screen(make_console(on_stderr=asked.json))
    fits, tried, micro = _rows(words, fit.AXES)
    if not any(one.micro for one in fits) and "offload" not in fit.names(words) and _is_on_gpus(fits):
        screen.say("nothing fits with all states in memory: looking at scratch files on drives")
        fits, tried, micro = _rows(words, {**fit.AXES, "offload": ON_DRIVES})
    fitting = fit_rows.surest(fits)
    screen.say(f"{many(len(fits), 'combination')}: {len(fitting)} fit, with a micro-batch of up to {_largest(fits)}")
    if not fitting:
        complain(f"error: nothing fits; the nearest, {fits[0].label}: {fits[0].reason}")
        return FAILED
    try:
        ranked = _ranked(fitting, micro, asked.order, screen)
    except calibrate.CalibrationError as error:
        complain(f"error: nothing was measured: {error}")
        return FAILED
    except KeyboardInterrupt:
        screen.closing([_again(argv, calibrate.GOES_ON)])
        return INTERRUPTED
    is_smallest, runs_here = asked.order == SMALLEST, _runs_here(fitting) and asked.runs
    finalists = ranked[: min(asked.runs, 1)] if is_smallest else choice.shortlist(ranked, asked.runs)
    measured: dict[str, ShortRun] = {}
    tied: tuple[str, ...] = ()
    if runs_here:
        ended, sweep = _short_runs(finalists, words, argv, screen)
        if ended is not None:
            return ended
        measured, tied = _results(finalists, sweep)
        if not measured:
            complain("error: none of the short runs ended with a result")
            return FAILED
    rows = choice.fastest_of_rows(ranked)
    best = _measured_choice(ranked, measured, tied) if measured else take.taken(rows[:1] if is_smallest else rows)
    largest = max(fitting, key=lambda one: one.micro)
    outcome = Outcome(best, measured, tied, is_smallest)
    page = ChoosePage(screen, words, length)
    page.document(ranked, finalists, outcome) if asked.json else page.show(ranked, finalists, outcome, largest)
    return OK if len(fits) == tried else INCOMPLETE


def _runs_here(fits: Sequence[Fit]) -> bool:
    """Whether short runs can confirm: on this machine, or as jobs of a cluster."""
    return _on_cluster(fits[0]) or not any(one.config.hardware.is_described for one in fits)


def _on_cluster(one: Fit) -> bool:
    return one.config.cluster.kind is ClusterKind.slurm


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
        ranked = _predicted(fits, micro, screen)
        return ranked if any(one.speed for one in ranked) else _by_work(fits, micro)
    found = [Candidate(one, micro or 1) for one in fits if (micro or 1) <= one.micro]
    return choice.smallest_first(choice.with_speeds(found, hardware_name(fits[0].config)))


def _by_work(fits: Sequence[Fit], micro: int | None) -> list[Candidate]:
    """Without a known speed: each row once, the least work first, at the given micro-batch, else at the largest, and on
    CPU ranks at one that a short run makes."""
    most = max(one.micro for one in fits) if _is_on_gpus(fits) else FIRST[-1]
    found = [Candidate(one, micro or min(one.micro, most)) for one in fit_rows.order(fits)]
    return [one for one in found if one.micro <= one.fit.micro]


def _rows(words: Sequence[str], tried: Mapping[str, str]) -> tuple[list[Fit], int, int | None]:
    """The rows of fit, of how many points they are, and the micro-batch that the words give; None if they leave it
    open. tried: options of the groups that the words leave open."""
    flags = arguments.split(words).flags
    if wrong := sorted(set(flags) - set(calibrate.FLAGS)):
        raise Refusal([f"choose has no {flag}      see: {program()} choose --help" for flag in wrong])
    given = [word for word in words if word.partition("=")[0] == MICRO]
    micro = given[-1].partition("=")[2] if given else None
    if micro is not None and not (micro.isdigit() and int(micro)):
        raise Refusal([f"{given[-1]}: expected one number for choose      fix: {MICRO}=4, or leave it out"])
    left = [word for word in words if word not in given]
    axes = [f"{group}={options}" for group, options in tried.items() if group not in fit.names(left)]
    points = fit.points_of(machines(left, flags.get("--config-dir")), axes)
    if any(given_micro(point.config, point.overrides) for point in points):  # by a file of sweeps/
        raise Refusal([f"choose tries several micro-batches      fix: {MICRO}=4 on the line, not in a sweep"])
    fits = fit.fits_of(points, quiet=True)
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
    if any(_on_cluster(one.fit) and not one.config.hardware.is_described for one in found):
        return list(found)  # what was measured here is not the speed of the cluster's nodes
    calibrate.in_rounds([one.config for one in found], name, screen)
    return choice.with_speeds(found, name)


def _short_runs(
    finalists: Sequence[Candidate], words: Sequence[str], typed: Sequence[str], screen: Screen
) -> tuple[int | None, SweepPaths | None]:
    """Runs the candidates as a sweep. The exit code with which `choose` ends, if it ends before they have.

    typed: the line, with its flags.
    """
    longer = [] if "measure" in fit.names(words) else ["measure=standard"]
    scene, points = here(), []
    for one in finalists:
        found, _ = judged(composed(arguments.split([*one.overrides, *longer])), scene)
        points += [replace(point, label=one.label) for point in found if isinstance(point, Point)]
    request = SweepRequest("choose", tuple(points), command=())
    for earlier in sweep_record.all_sweeps(request.output) if request.on_cluster else ():
        if sweep_record.is_on_cluster(earlier):
            request.cluster.look(earlier)  # the records of jobs that have ended meanwhile: no one else reads them
    screen.say(f"confirming {many(len(points), 'candidate')} by short runs", "bold")
    code, sweep = swept(request, scene.hardware, ResultsOnly(screen.console))
    if code == INTERRUPTED:
        screen.closing([_again(typed, "runs that have ended are not repeated")])
        return INTERRUPTED, sweep
    if request.on_cluster and sweep is not None and cluster_of(sweep).runs(sweep):
        screen.closing([_again(typed, "chooses when the jobs have ended")])
        return INCOMPLETE, sweep
    return None, sweep


def _again(typed: Sequence[str], why: str) -> Row:
    return Row("next", f"{program()} {shlex.join(['choose', *typed])}     # {why}")


def _results(finalists: Sequence[Candidate], sweep: SweepPaths | None) -> tuple[dict[str, ShortRun], tuple[str, ...]]:
    """The runs that ended with a result, by label, the fastest first, and the labels of those that tie for the fastest;
    none if their report does not rank them."""
    rows = [] if sweep is None else [row for row in comparison.ranked(sweep) if row.is_measured]
    predicted = {one.label: one.tokens_per_second for one in finalists}
    runs = {
        row.entry.label: ShortRun(predicted[row.entry.label], value)
        for row in rows
        if row.entry.result and (value := ranking.METRICS[ranking.DEFAULT_METRIC].read(row.entry.result)) is not None
    }
    return runs, tuple(row.entry.label for row in rows if 1 in (row.place, row.may_be))


def _measured_choice(ranked: Sequence[Candidate], measured: Mapping[str, ShortRun], tied: Sequence[str]) -> Taken:
    """The best of the short runs, and the next of them: of those that tie, else, or if none is ranked, the fastest."""
    of_label = {one.label: one for one in ranked}
    first = choice.best_run(measured, tied or list(measured)[:1])
    left = [label for label in measured if label != first]
    tied_left = [label for label in tied if label != first]
    second = (
        choice.best_run(measured, tied_left)
        if tied_left
        else max(left, key=lambda one: measured[one].median, default="")
    )
    return Taken(of_label[first], of_label.get(second), by_speed=True)
