"""`zlab calibrate`: measures on this machine what predicted step times are made from, and predicts with it."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.commands import rank_job
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.cluster import ClusterKind
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, OK
from orchestrator.planning.point import Point
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import here
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.rounds.recorded import NOTABLE_SHARE
from orchestrator.text.paths import program
from orchestrator.text.streams import complain
from orchestrator.text.units import ABSENT, digits, many
from orchestrator.wings.predict import prediction, speed
from orchestrator.wings.predict.fit import names, refuse_evaluations
from orchestrator.wings.predict.point_prediction import PointPrediction
from orchestrator.wings.predict.prediction import hardware_name
from orchestrator.wings.predict.speed import TimingJob

# What is tried of each group that the command line leaves open.
AXES = {"zero": "stage0,stage1,stage2,stage3"}
FLAGS = ("--multirun", "--config-dir", "--max-points")  # that a line of calibrate may have; all others start runs
HEADER = ("point", "tokens/s", "rounds", "step ms", "model", "waiting", "copies", "update", "other")
ENTRY = "orchestrator.wings.predict.calibrate_rank:run_rank"
ROUNDS = 3  # each with ranks of its own: what differs between two starts is in the range
BUDGET_S = 100.0  # of measuring; the start of the ranks takes the rest of two minutes
LIMIT_S = 600.0
Predictions = dict[str, PointPrediction]
Spans = dict[str, tuple[float, float]]
Tell = Callable[[str], None]


class CalibrationError(RuntimeError):
    """The ranks that measure have failed; the message says why."""


def main(argv: Sequence[str]) -> int:
    """Prints the predicted speed of the points. Returns 0, or 1 if nothing could be measured."""
    asked, words = parser().parse_known_args(argv)
    points = local_points(words, AXES, "calibrate")
    refuse_evaluations(points, "calibrate measures")
    screen = Screen(make_console(on_stderr=asked.json))
    try:
        predictions, spans = predicted(points, screen, fresh=asked.fresh, quiet=asked.json)
    except CalibrationError as error:
        complain(f"error: nothing was measured: {error}")
        return FAILED
    if asked.json:
        found = [_document(point, predictions.get(point.label), spans.get(point.label)) for point in points]
        print(json.dumps(found, ensure_ascii=False))
    else:
        rows = [_row(point.label, predictions.get(point.label), spans.get(point.label)) for point in points]
        screen.table(Table(HEADER, tuple(rows)))
        screen.closing([Row("next", f"{program()} {shlex.join(['-m', *words, *_axes(words), '--plan'])}")])
    return OK if any(one.speed for one in predictions.values()) else FAILED


def parser() -> VerbParser:
    parser = verb_parser(
        "calibrate",
        "Measures on this machine what the predicted speed of a configuration is made from: the model's blocks, "
        "collectives, copies and updates. About a minute, at most two, and once for each kind of model, batch, "
        "precision and number of ranks. Then --plan and fit show tokens per second.",
    )
    parser.usage = f"{program()} calibrate [-h] [group=option | key=value ...] [--fresh] [--json]"
    parser.epilog = f"example: {program()} calibrate model=llama_tiny precision=fp32,bf16 batch.micro=4,8"
    parser.add_argument("--fresh", action="store_true", help="measure again what is known already")
    add_json(parser)
    return parser


def local_points(words: Sequence[str], axes: Mapping[str, str], verb_name: str) -> list[Point]:
    """The valid points of the words and of the axes that they leave open, all on this machine. Refusal otherwise."""
    wrong = sorted(set(arguments.split(words).flags) - set(FLAGS))
    problems = [f"{verb_name} has no {flag}      see: {program()} {verb_name} --help" for flag in wrong]
    if problems:
        raise Refusal(problems)
    composition = composed(arguments.split(["--multirun", *words, *_axes(words, axes)]))
    found, problems = judged(composition, here())
    points = [point for point in found if isinstance(point, Point)]
    if not points:
        raise Refusal(problems)
    if any(point.config.cluster.kind is ClusterKind.slurm for point in points):
        raise Refusal([f"{verb_name} measures on this machine      fix: cluster=local, inside a job of the cluster"])
    return points


def _axes(words: Sequence[str], axes: Mapping[str, str] = AXES) -> list[str]:
    return [f"{group}={options}" for group, options in axes.items() if group not in names(words)]


class Rounds(NamedTuple):
    """What the rounds have measured. answers: by key, of each round. speeds: by label, tokens per second that each
    round alone predicts. shares: of the cores, that other processes took. done: jobs of the first round."""

    answers: dict[str, list[Any]]
    speeds: dict[str, list[float]]
    shares: list[float]
    done: int


def predicted(points: Sequence[Point], screen: Screen, *, fresh: bool, quiet: bool) -> tuple[Predictions, Spans]:
    """The predictions of the points by label, after what they need and is not known was measured; and the least and the
    most tokens per second that single rounds predict, empty if nothing was measured."""
    with screen.passing(quiet=quiet) as tell:
        return _predicted(points, screen, tell, fresh=fresh)


def _predicted(points: Sequence[Point], screen: Screen, tell: Tell | None, *, fresh: bool) -> tuple[Predictions, Spans]:
    configs, name = [point.config for point in points], hardware_name(points[0].config)
    jobs = speed.missing(configs, name, fresh=fresh)
    if not jobs:
        return prediction.predictions(points, tell), {}
    began = time.monotonic()
    found = _in_rounds(points, jobs, name, tell)
    speed.store(name, [(job, typical(found.answers[job.key])) for job in jobs if job.key in found.answers])
    what = f"{many(found.done, 'part')} of a step in {many(max(map(len, found.answers.values()), default=0), 'round')}"
    left = f"; the time did not suffice for {len(jobs) - found.done} more" if found.done < len(jobs) else ""
    screen.say(f"measured {what}, {time.monotonic() - began:.0f} s{left}")
    if (share := max(found.shares, default=0.0)) >= NOTABLE_SHARE:
        screen.warn(f"other processes took up to {share:.0%} of the cores while this was measured")
    spans = {label: (min(one), max(one)) for label, one in found.speeds.items()}
    return prediction.predictions(points, tell), spans


def _in_rounds(points: Sequence[Point], jobs: Sequence[TimingJob], name: str, tell: Tell | None) -> Rounds:
    """Measures the jobs up to ROUNDS times, and at least once; a round that the time does not suffice for is not
    used."""
    began, found = time.monotonic(), Rounds({}, {}, [], 0)
    for number in range(ROUNDS):
        past_s = time.monotonic() - began
        if past_s * (number + 1) > BUDGET_S * max(number, 1):  # as the rounds so far, another one takes too long
            break
        done = measure(jobs, name, tell or (lambda _: None), budget_s=BUDGET_S - past_s, on_load=found.shares.append)
        if number == 0:
            found = found._replace(done=done)
        elif done < len(jobs):
            break
        for job in jobs:
            if (answer := speed.stored(name, job.key)) is not None:
                found.answers.setdefault(job.key, []).append(answer)
        for label, one in prediction.predictions(points, tell).items():
            if one.speed is not None:
                found.speeds.setdefault(label, []).append(one.speed.tokens_per_second)
        if done < len(jobs):
            break
    return found


def typical(answers: Sequence[Any]) -> Any:
    """The answers of several rounds as one: the median of each measured number. Where the rounds do not have numbers at
    the same places (dict keys, lengths of lists), the last round's."""
    last = answers[-1]
    if isinstance(last, dict) and all(isinstance(one, dict) and one.keys() == last.keys() for one in answers):
        return {key: typical([one[key] for one in answers]) for key in last}
    if isinstance(last, list) and all(isinstance(one, list) and len(one) == len(last) for one in answers):
        return [typical(list(ones)) for ones in zip(*answers, strict=True)]
    return statistics.median(answers) if all(isinstance(one, float) for one in answers) else last


def _row(label: str, found: PointPrediction | None, span: tuple[float, float] | None) -> tuple[str, ...]:
    if found is None or found.speed is None:
        return (label, *[ABSENT] * (len(HEADER) - 1))
    step = found.speed.time
    rounds = ABSENT if span is None else "-".join(dict.fromkeys(map(digits, span)))
    parts = (
        step.model_s,
        step.exposed_s + step.slowed_s + step.control_s,
        step.runtime_s,
        step.update_s,
        step.surplus_s,
    )
    in_ms = (digits(1e3 * one) for one in (step.total_s, *parts))
    return (label, digits(found.speed.tokens_per_second), rounds, *in_ms)


def _document(point: Point, found: PointPrediction | None, span: tuple[float, float] | None) -> dict[str, Any]:
    known = None if found is None or found.speed is None else found.speed.to_dict()
    return {"label": point.label, "overrides": list(point.overrides), "speed": known, "rounds": span}


def measure(
    jobs: Sequence[TimingJob],
    hardware: str,
    told: Tell,
    budget_s: float = BUDGET_S,
    on_load: Callable[[float], None] = lambda _share: None,
) -> int:
    """Measures the jobs, with one start of ranks for each number of ranks and threads. Keeps the answers; returns how
    many there are. on_load: called with the share of the cores that other processes took. Call it from the main
    thread."""
    groups: dict[str, list[TimingJob]] = {}
    for job in jobs:
        groups.setdefault(json.dumps(speed.place_of(job.config), sort_keys=True), []).append(job)
    done = 0
    for group in groups.values():
        began = time.monotonic()
        answers = _measured(group, told, budget_s, on_load)
        speed.store(hardware, [(job, answers[job.key]) for job in group if job.key in answers])
        done += len(answers)
        budget_s -= time.monotonic() - began
    return done


def _measured(
    group: Sequence[TimingJob], told: Callable[[str], None], budget_s: float, on_load: Callable[[float], None]
) -> dict[str, Any]:
    count, measured = len(group), 0

    def on_events(events: int) -> None:
        nonlocal measured
        measured += events
        told(f"measured {measured} of {count}")

    asked = {"budget_s": budget_s, "jobs": [job.plain() for job in group]}
    try:
        found = rank_job.run(group[0].config, ENTRY, {"calibration.json": asked}, told, on_events, limit_s=LIMIT_S)
    except rank_job.RanksFailed as error:
        raise CalibrationError(str(error)) from None
    if found["others_share"] is not None:
        on_load(found["others_share"])
    answers: dict[str, Any] = found["answers"]
    return answers
