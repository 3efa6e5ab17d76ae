"""`zlab search`: Optuna proposes values within ranges and lists, each trial is a point, and all are one sweep."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.commands import sweep as sweep_command
from orchestrator.commands import watch_sweep
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.compose.settable import read_tree
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, INTERRUPTED
from orchestrator.launch.cluster import cluster_of
from orchestrator.planning.point import Point
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import here
from orchestrator.records import sweep_record
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report import comparison, ranking, sweep_table
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, plan_rows, run_command
from orchestrator.text.extras import install_line
from orchestrator.text.paths import program, verb
from orchestrator.text.units import many
from orchestrator.wings.optuna import space, trials
from orchestrator.wings.optuna.space import SearchLine
from orchestrator.wings.optuna.trials import Asked, Trial

FLAGS = ("--config-dir",)  # besides those of the parser
SAME_FAILURES = 3  # so many trials in a row without a value, for the same reason, end a search
LEARNING = ("optimizer.", "scheduler.")  # settings that change the loss, and no speed
FEW_STEPS = 100  # with fewer, the rate that falls fastest wins, which a longer training may not bear


def main(argv: Sequence[str]) -> int:
    """The exit code of a sweep with all trials; 130 if it was interrupted."""
    asked, words = parser().parse_known_args(argv)
    typed = arguments.split(words)
    wrong = [f"search has no {flag}      see: {program()} search --help" for flag in typed.flags if flag not in FLAGS]
    if problems := [*typed.problems, *wrong]:
        raise Refusal(problems)
    line = space.read(typed.overrides, read_tree(typed.flags.get("--config-dir")).keys)
    first = _checked(line, typed.folders())
    line = _completed(line, first)
    if problem := ranking.metric_problem(line.by):
        raise Refusal([problem.replace("rank_by: ", f"by={line.by}: ", 1)])
    os.umask(0o077)  # only the user can read what the runs write
    command = ("search", *typed.folders(), *typed.overrides)
    settings = Asked(line.by, asked.retry, tuple(typed.folders()), line.fixed, _identity(line), command)
    search = Search(line, settings, first.config, Screen(make_console(on_stderr=asked.json)))
    try:
        search.run()
    except KeyboardInterrupt:
        search.stopped(f"{program()} {shlex.join(command)}")
        return INTERRUPTED
    return search.conclude(as_json=asked.json)


def parser() -> VerbParser:
    parser = verb_parser(
        "search",
        "Searches the best values: Optuna proposes each trial from the results of the earlier ones. A range is A..B, "
        f"on a log scale if B is at least {space.LOG_FROM} times A; a list is A,B,C. All trials are one sweep, with "
        "one table and report. The same line typed again continues a search that was stopped.",
    )
    parser.usage = f"{program()} search [-h] key=A..B | key=A,B,C ... [group=option | key=value ...] [n=20] [by=METRIC]"
    parser.epilog = (
        "n=20: trials. at_once=1: trials that are proposed together, and run side by side where there is room. by: "
        f"one of {' '.join(ranking.METRICS)}; default: {ranking.DEFAULT_METRIC} with {ranking.STANDARD}, or the loss "
        f"if settings of the optimizer are searched. example: {program()} search optimizer.lr=1e-5..1e-3 n=20"
    )
    parser.add_argument("--retry", default="", metavar="STATES", help="trials to run again, such as error,oom")
    add_json(parser)
    return parser


def _checked(line: SearchLine, folders: Sequence[str]) -> Point:
    """One point of the search. Refusal: a word is wrong, also one of a list or an end of a range, or all points are."""
    first = line.words([one.ends[0] for one in line.searched])
    points: list[Point] = []
    problems: list[str] = []
    for one in line.searched:
        others = [word for word in first if word.partition("=")[0] != one.key]
        words = ["-m", *folders, *others, f"{one.key}={','.join(one.ends)}"]
        found, broken = judged(composed(arguments.split(words)), here())
        points += [point for point in found if isinstance(point, Point)]
        problems += broken
    if not points:
        raise Refusal(list(dict.fromkeys(problems)))
    return points[0]


def _completed(line: SearchLine, point: Point) -> SearchLine:
    """The line with its metric, and with rounds for a speed: those of a quick measurement rank nothing."""
    is_trained = point.config.trains_to_the_end and point.config.measure.validation_batches != 0
    learns = any(one.key.startswith(LEARNING) for one in line.searched)
    usual = ranking.OF_TRAINING if is_trained else "loss_last" if learns else ranking.DEFAULT_METRIC
    by = line.by or usual
    is_open = not any(word.startswith("measure") for word in line.fixed)
    is_speed = by in ranking.METRICS and ranking.METRICS[by].times is not None
    more = (ranking.STANDARD,) if is_speed and is_open else ()
    return line._replace(by=by, fixed=(*line.fixed, *more))


def _identity(line: SearchLine) -> str:
    """The same for the same search, however many trials it is to have."""
    return hashlib.sha256(repr((sorted(line.fixed), line.searched, line.by)).encode()).hexdigest()[:10]


class Search:
    """A search that is under way: its trials so far, in the order in which they were proposed."""

    def __init__(self, line: SearchLine, asked: Asked, config: RunConfig, screen: Screen) -> None:
        """config: of one trial."""
        self._line, self._asked, self._config, self._screen = line, asked, config, screen
        self._known: dict[tuple[str, ...], Trial] = {}
        self._told: set[Path | None] = set()  # folders of the trials that an earlier command has measured

    @property
    def sweep(self) -> SweepPaths | None:
        """The records of all trials; None before the first batch."""
        there = sweep_record.all_sweeps(self._config.output)
        return next((one for one in there if sweep_record.is_sweep(one, "", self._asked.study)), None)

    def run(self) -> None:
        """Returns when there are as many trials as were asked for, or no new ones to propose."""
        try:
            from orchestrator.wings.optuna.proposals import proposed
        except ImportError as error:
            raise Refusal([f"search needs Optuna ({error}): {install_line('optuna')}"]) from None
        higher_first = ranking.METRICS[self._line.by].higher_first
        order = "higher" if higher_first else "lower"
        self._screen.say(f"{many(self._line.trials, 'trial')} by {self._line.by}, {order} first", "bold")
        about = [row for row in plan_rows(self._config, "") if row.name in ("model", "data")]
        self._screen.rows([*(Row(one.key, one.described()) for one in self._line.searched), *about])
        for warning in self._warnings(higher_first=higher_first):
            self._screen.warn(warning)
        if earlier := self._recorded():
            self._screen.say(f"continues after {many(len(earlier), 'trial')}")
            self._measure(earlier)
        while (left := self._line.trials - len(self._known)) > 0 and not self._fails():
            new = proposed(self._line, self._known, min(left, self._line.at_once), higher_first=higher_first)
            if not new:
                self._screen.say("Optuna proposes nothing new: the search ends")
                break
            self._measure(new)

    def _warnings(self, *, higher_first: bool) -> Iterator[str]:
        """Warnings about questions that the trials cannot answer, before they start."""
        keys, by, steps = [one.key for one in self._line.searched], self._line.by, self._config.steps()
        yield from (f"{word} is replaced by the values that are searched" for word in self._line.replaced)
        if not higher_first and any(key.startswith("batch.") for key in keys):
            yield f"trials with more tokens a step have an easier {by}: search the batch by=tokens_per_second"
        learned = [key for key in keys if key.startswith(LEARNING)]
        if by.startswith("loss") and learned and steps is not None and steps < FEW_STEPS:
            more = "measure=train train.max_steps=500 makes more"
            yield f"each trial makes {many(steps, 'step')}, too few to choose {' and '.join(learned)} by; {more}"

    def _recorded(self) -> list[tuple[str, ...]]:
        """The values of the trials of an earlier command."""
        if self.sweep is None:
            return []
        if cluster_of(self.sweep).runs(self.sweep):
            raise Refusal([f"this search is running already      watch it: {verb('watch', self.sweep.root)}"])
        standings = sweep_record.standings(self.sweep)
        self._told = {one.attempt.root for one in standings if one.attempt and one.result}
        searched = self._line.searched
        rows = [dict(word.partition("=")[::2] for word in one.planned.overrides) for one in standings]
        # The path of a model is recorded as other words: such a trial is proposed again, and its answer is kept.
        known = [row for row in rows if all(row.get(one.key, "") in (one.values or row.values()) for one in searched)]
        return [tuple(row[one.key] for one in searched) for row in known]

    def _measure(self, new: Sequence[tuple[str, ...]]) -> None:
        """Runs the new trials, as more points of the sweep, and prints a line for each that has no earlier answer."""
        before = len(self._known)
        order = list(dict.fromkeys([*self._known, *new]))
        lines = [self._line.words(values) for values in order]
        outcomes = trials.measure(lines, self._asked, self._screen)
        self._known = dict(zip(order, outcomes, strict=True))
        for number, trial in enumerate(list(self._known.values())[before:], before + 1):
            if trial.folder in self._told:
                continue
            known = trial.value is not None
            value = f"{self._line.by} {trial.value:,.6g}" if known else sweep_table.shortened(trial.message)
            self._screen.say(f"trial {number}: {trial.label}: {sweep_table.word(trial.state)}: {value}{self._best()}")

    def _best(self) -> str:
        found = [trial.value for trial in self._known.values() if trial.value is not None]
        values = [value for value in found if math.isfinite(value)]
        best = max if ranking.METRICS[self._line.by].higher_first else min
        return f"   (best {best(values):,.6g})" if values else ""

    def _fails(self) -> bool:
        """Whether the last trials have no value for the same reason; says so."""
        last = list(self._known.values())[-SAME_FAILURES:]
        if len(last) < SAME_FAILURES or len({(trial.value, trial.message) for trial in last}) > 1:
            return False
        if last[0].value is not None or last[0].diverged:  # a diverged trial is an answer: the worst
            return False
        self._screen.warn(f"the search ends: {SAME_FAILURES} trials in a row have no value for the same reason")
        return True

    def stopped(self, command: str) -> None:
        """Says after an interrupt how far the search is, and how it continues."""
        standings = [] if self.sweep is None else sweep_record.standings(self.sweep)
        self._screen.closing([Row("stopped", sweep_table.counts(standings)), Row("next", f"{command}     # continues")])

    def conclude(self, *, as_json: bool) -> int:
        """Shows all trials, the best first, and the command that runs the best one for longer."""
        sweep = self.sweep
        if sweep is None:
            raise Refusal(list(dict.fromkeys(trial.message for trial in self._known.values())))
        code = watch_sweep.conclude(sweep, self._screen)
        sweep_command.track_kept(sweep)
        ranked = comparison.ranked(sweep)
        *rows, proposed = sweep_command.next_rows(sweep)
        if ranked[0].place == 1:
            rows += [Row("failed", proposed.text)] if code == FAILED else []
            proposed = Row("next", _longer(ranked))
        self._screen.closing([*rows, proposed])
        if as_json:
            print(sweep_table.document(sweep, sweep_record.standings(sweep)))
        return code


def _longer(ranked: Sequence[ranking.Ranked]) -> str:
    """The command that runs the best trial for longer: to an end, if it has rounds or was chosen by its loss."""
    best = ranked[0].entry
    is_learned = ranked[0].metric.startswith("loss") and not (ranking.trains(ranked) or ranking.evaluates(ranked))
    if ranking.STANDARD not in best.overrides and not is_learned:
        return ranking.next_after_sweep(ranked)
    kept = [word for word in ranking.standard(best.overrides) if word != ranking.STANDARD]
    return run_command([*kept, "measure=train", "train.max_steps=1000", "checkpoint=sharded"])
