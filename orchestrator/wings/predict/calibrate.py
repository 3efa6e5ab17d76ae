"""`zlab calibrate`: measures on this machine what predicted step times are made from, and predicts with it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.commands import rank_job
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.cluster import ClusterKind
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, INTERRUPTED, OK
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
BUDGET_S = 100.0  # of measuring; the start of the ranks takes the rest of two minutes
LIMIT_S = 600.0
GOES_ON = "what was measured is kept"
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
        predictions = predicted(points, screen, fresh=asked.fresh, quiet=asked.json)
    except CalibrationError as error:
        complain(f"error: nothing was measured: {error}")
        return FAILED
    except KeyboardInterrupt:
        again = shlex.join(["calibrate", *(word for word in argv if word != "--fresh")])
        screen.closing([Row("next", f"{program()} {again}     # {GOES_ON}")])
        return INTERRUPTED
    if asked.json:
        found = [_document(point, predictions.get(point.label)) for point in points]
        print(json.dumps(found, ensure_ascii=False))
    else:
        rows = [_row(point.label, predictions.get(point.label)) for point in points]
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


def predicted(points: Sequence[Point], screen: Screen, *, fresh: bool, quiet: bool) -> dict[str, PointPrediction]:
    """The predictions of the points by label, after what they need and is not known was measured, with `fresh` all."""
    configs, name = [point.config for point in points], hardware_name(points[0].config)
    if fresh:
        speed.forget(configs, name)
    in_rounds(configs, name, screen, quiet=quiet)
    with screen.passing(quiet=quiet) as tell:
        return prediction.predictions(points, tell)


def in_rounds(configs: Sequence[RunConfig], name: str, screen: Screen, *, quiet: bool = False) -> None:
    """Measures what predictions of these configurations lack, a round after the other: at least one, and up to
    speed.ROUNDS as the time allows. Says what was measured, and warns of load. Each answer is kept when it is there, so
    that after an interruption the same call goes on. name: of the hardware. CalibrationError if ranks fail."""
    began, shares = time.monotonic(), [0.0]
    jobs = left = speed.missing(configs, name)
    rounds = parts = 0
    with screen.passing(quiet=quiet) as tell:
        # As long as the rounds so far, another one must not take too long.
        while left and (past_s := time.monotonic() - began) * (rounds + 1) <= BUDGET_S * max(rounds, 1):
            found = measure(left, name, tell or (lambda _text: None), budget_s=BUDGET_S - past_s, on_load=shares.append)
            parts = max(parts, found)
            if found < len(left):
                break
            rounds, left = rounds + 1, speed.missing(configs, name)
    if not jobs:
        return
    what = f"{many(parts, 'part')} of a step in {many(max(rounds, 1), 'round')}"
    more = f"; the time did not suffice for {len(jobs) - parts} more" if rounds == 0 else ""
    screen.say(f"measured {what}, {time.monotonic() - began:.0f} s{more}")
    if max(shares) >= NOTABLE_SHARE:
        screen.warn(f"other processes took up to {max(shares):.0%} of the cores while this was measured")


def _row(label: str, found: PointPrediction | None) -> tuple[str, ...]:
    if found is None or found.speed is None:
        return (label, *[ABSENT] * (len(HEADER) - 1))
    step = found.speed.time
    rounds = ABSENT if found.speed.within is None else found.speed.text
    parts = (
        step.model_s,
        step.exposed_s + step.slowed_s + step.control_s,
        step.runtime_s,
        step.update_s,
        step.surplus_s,
    )
    in_ms = (digits(1e3 * one) for one in (step.total_s, *parts))
    return (label, digits(found.speed.tokens_per_second), rounds, *in_ms)


def _document(point: Point, found: PointPrediction | None) -> dict[str, Any]:
    known = None if found is None else found.speed
    return {
        "label": point.label,
        "overrides": list(point.overrides),
        "speed": known and known.to_dict(),
        "rounds": known and known.within,
    }


def measure(
    jobs: Sequence[TimingJob],
    hardware: str,
    told: Tell,
    budget_s: float = BUDGET_S,
    on_load: Callable[[float], None] = lambda _share: None,
) -> int:
    """Measures the jobs, with one start of ranks for each number of ranks and threads. Keeps each answer when it is
    there; returns how many there are. on_load: called with the share of the cores that other processes took. Call it
    from the main thread."""
    by_key, done = {job.key: job for job in jobs}, 0

    def on_events(events: Sequence[dict[str, Any]]) -> None:
        nonlocal done
        speed.store(hardware, [(by_key[event["key"]], event["answer"]) for event in events])
        done += len(events)
        told(f"measuring {done} of {len(jobs)}")

    groups: dict[str, list[TimingJob]] = {}
    for job in jobs:
        groups.setdefault(json.dumps(speed.place_of(job.config), sort_keys=True), []).append(job)
    for group in groups.values():
        began = time.monotonic()
        asked = {"calibration.json": {"budget_s": budget_s, "jobs": [job.plain() for job in group]}}
        try:
            found = rank_job.run(group[0].config, ENTRY, asked, told, on_events, limit_s=LIMIT_S)
        except rank_job.RanksFailed as error:
            raise CalibrationError(str(error)) from None
        if found["others_share"] is not None:
            on_load(found["others_share"])
        budget_s -= time.monotonic() - began
    return done
