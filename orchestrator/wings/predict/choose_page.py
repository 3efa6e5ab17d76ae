"""What `choose` prints at its end: the table, the row to take, the second, and what to type next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.commands.experiment_file import write_experiment
from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.report.screen import Screen
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program, shown
from orchestrator.text.units import ABSENT, digits, many, significant, size
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict import choice, take
from orchestrator.wings.predict.choice import Candidate, ShortRun
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.fit_words import Length, length_text, machine
from orchestrator.wings.predict.speed import Speed, interval
from orchestrator.wings.predict.step import MICRO
from orchestrator.wings.predict.take import Taken
from orchestrator.wings.profile import costs
from orchestrator.wings.words.machine_names import values

SHOWN = 12
HEADER = ("row", "micro", "tokens/s, predicted", "tokens/s, measured", "needs/rank", "because")
FASTEST, SMALLEST = "fastest", "smallest"
# By the number of runs with the first place: none has one without enough rounds, and several of them tie.
CHOSEN = ("chosen: the most tokens/s, not ranked", "chosen: measured fastest", "chosen: a tie, fastest by prediction")
DECIDED = (
    "tokens/s of too few rounds to rank: measure=standard has more",
    "the short runs",
    "the prediction, because short runs do not tell them apart",
)


class Outcome(NamedTuple):
    """What is chosen and what is second (None if nothing is), what decided, the short runs by label, the labels of
    those that tie for the fastest (none if their report does not rank them), and whether the smallest was asked for."""

    choice: Taken
    measured: Mapping[str, ShortRun]
    tied: tuple[str, ...]
    is_smallest: bool = False

    @property
    def best(self) -> Candidate:
        return self.choice.first

    def speed(self, one: Candidate) -> float | None:
        """The measured tokens per second of a candidate; None if it was not run."""
        run = self.measured.get(one.label)
        return None if run is None else run.median


class ChoosePage:
    """What `choose` prints at its end. words: the line as typed. length: what is to be trained, if the line says it."""

    def __init__(self, screen: Screen, words: Sequence[str], length: Length | None) -> None:
        self._screen, self._words, self._length = screen, words, length

    def document(self, ranked: Sequence[Candidate], finalists: Sequence[Candidate], outcome: Outcome) -> None:
        """The answer as JSON."""
        folder, name = _written(outcome)
        print(json.dumps(_document(outcome, _shown(ranked, finalists, outcome), folder, name), ensure_ascii=False))

    def show(self, ranked: Sequence[Candidate], finalists: Sequence[Candidate], outcome: Outcome, largest: Fit) -> None:
        """The table, the three lines, and what to type next."""
        rows, shown_rows = choice.fastest_of_rows(ranked), _shown(ranked, finalists, outcome)
        folder, name = _written(outcome)
        self._screen.console.print()
        table = Table(HEADER, tuple(_row(one, ranked[0], outcome) for one in shown_rows), texts=("because",))
        mfu = [ABSENT if one.speed is None else one.speed.mfu_text for one in shown_rows]
        table = _with_column(table, "tokens/s, measured", "MFU", mfu)
        self._screen.table(_with_costs(table, shown_rows))
        left = len(rows) - len({one.fit.label for one in shown_rows})
        notes = (
            [Row("not shown", f"{many(left, 'row')} that {'follow' if left > 1 else 'follows'}")] if left > 0 else []
        )
        capped = "at least " if largest.capped else ""
        notes.append(Row("largest", f"micro-batch {capped}{largest.micro} fits with {largest.label}"))
        self._screen.closing(notes)
        self._screen.closing([*_taken_rows(outcome, self._length), *_learning(outcome, self._words)])
        command = [program(), shlex.join(["--config-dir", shown(folder), f"experiment={name}"])]
        file = Row("file", shown(folder / "experiment" / f"{name}.yaml"))
        self._screen.closing([file, *self._measure(outcome), Row("next", " ".join(command))])

    def _measure(self, outcome: Outcome) -> list[Row]:
        """How to measure where no speed is known."""
        if outcome.measured or outcome.best.speed is not None or not outcome.best.config.hardware.is_described:
            return []
        words = [word for word in self._words if not word.startswith("hardware")]
        return [Row("measure", f"{program()} {shlex.join(['choose', *words])}     # on the machine with these GPUs")]


def _shown(ranked: Sequence[Candidate], finalists: Sequence[Candidate], outcome: Outcome) -> list[Candidate]:
    return list(dict.fromkeys([outcome.best, *finalists, *choice.fastest_of_rows(ranked)]))[:SHOWN]


def _written(outcome: Outcome) -> tuple[Path, str]:
    """The folder and the name of the experiment that was written."""
    folder = Path(outcome.best.config.output).absolute() / "chosen"
    return folder, write_experiment(folder, outcome.best.overrides, _because(outcome))


def _taken_rows(outcome: Outcome, length: Length | None) -> list[Row]:
    """The row to take, the second, what decided, and the job's hours."""
    if outcome.measured or outcome.is_smallest:
        found = [Row("take", f"{take.described(outcome.best)}: {_because(outcome)}")]
        if (second := outcome.choice.second) is not None and outcome.measured:
            found.append(Row("second", f"{take.described(second)}: {_behind(outcome, second)}"))
        if len(outcome.measured) > 1:
            found.append(Row("decided", _decided(outcome)))
    else:
        found = take.rows(outcome.choice)
        found[-1] = found[-1]._replace(text=f"{found[-1].text}; no run has confirmed it")
    speed_of_best = outcome.speed(outcome.best)
    ends = interval(outcome.best.speed) if speed_of_best is None else (speed_of_best, speed_of_best)
    if length is not None:
        found.append(Row("job", length_text(length, outcome.best.config, ends)))
    return found


def _decided(outcome: Outcome) -> str:
    """What decided between the short runs."""
    text, second = DECIDED[min(len(outcome.tied), 2)], outcome.choice.second
    overlap = second is not None and second.label in outcome.tied and choice.is_tie(second, outcome.best)
    return f"{text}; the ranges of the predictions overlap, too" if overlap else text


def _learning(outcome: Outcome, words: Sequence[str]) -> list[Row]:
    """What a batch that was made larger than the line's own changes."""
    before, after = outcome.best.fit.config.batch, outcome.best.config.batch
    if after.global_size <= before.global_size or MICRO in values(words):
        return []
    sample = sample_of(outcome.best.config)
    amounts = f"{sample.amount(after.global_size)} a step, {sample.amount(before.global_size)} before"
    return [Row("learning", f"{amounts}: fewer updates for as much data; the learning rate may have to change")]


def _behind(outcome: Outcome, second: Candidate) -> str:
    """How the second of the short runs compares with the first."""
    mine, first = outcome.speed(second), outcome.speed(outcome.best)
    assert mine is not None, "the second choice was run"
    assert first is not None, "the first choice was run"
    if second.label in outcome.tied:
        return f"a tie, {digits(mine)} tokens/s measured"
    behind = f"{1 - mine / first:.1%} slower, " if outcome.tied else ""
    return f"{behind}{digits(mine)} tokens/s measured"


def _with_column(table: Table, before: str, name: str, cells: Sequence[str]) -> Table:
    """The table with one more column, unless none of its cells has anything."""
    if all(cell == ABSENT for cell in cells):
        return table
    at = table.header.index(before)
    found = tuple((*row[:at], cell, *row[at:]) for row, cell in zip(table.rows, cells, strict=True))
    return table._replace(header=(*table.header[:at], name, *table.header[at:]), rows=found)


def _because(outcome: Outcome) -> str:
    measured = outcome.speed(outcome.best)
    if outcome.is_smallest:
        known = "no run has confirmed it" if measured is None else f"a short run had {digits(measured)} tokens/s"
        return f"the least memory of a rank of those that fit; {known}"
    if measured is None:
        return f"{take.decided(outcome.choice)}; no run has confirmed it"
    runs, found = many(len(outcome.measured), "short run"), f"{digits(measured)} tokens/s"
    if not outcome.tied:
        return f"the most tokens/s of {runs} with too few rounds to rank, {found}"
    if len(outcome.tied) == 1:
        return f"the fastest of {runs}, {found}"
    return f"the fastest by prediction of {len(outcome.tied)} that tie in {runs}; {found}"


def _row(one: Candidate, first: Candidate, outcome: Outcome) -> tuple[str, ...]:
    known = outcome.speed(one)
    text = choice.larger(one, first) if outcome.is_smallest else choice.reason(one, first)
    if one is outcome.best and known is not None and not outcome.is_smallest:
        text = CHOSEN[min(len(outcome.tied), 2)]
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
    name = costs.column_name({price.currency for config in configs if (price := costs.price_of(config))})
    cells = [ABSENT if amount is None else significant(amount) for amount in amounts]
    return _with_column(table, "needs/rank", f"{name}, predicted", cells)


def _document(outcome: Outcome, rows: Sequence[Candidate], folder: Path, name: str) -> dict[str, Any]:
    listed = [row_document(one.config, one.label, one.overrides, one.speed, outcome.speed(one)) for one in rows]
    order = SMALLEST if outcome.is_smallest else FASTEST
    second = outcome.choice.second
    ends = (outcome.best.label, None if second is None else second.label, outcome.tied)
    return document(outcome.best.config, ends, order, (folder, name), listed)


def row_document(
    config: RunConfig,
    label: str,
    overrides: Sequence[str],
    predicted: Speed | None,
    measured: float | None,
) -> dict[str, Any]:
    """A row of `document`. measured: tokens per second."""
    return {
        "machine": machine(config),
        "label": label,
        "overrides": list(overrides),
        "micro": config.batch.micro,
        "predicted": predicted.to_dict() if predicted else None,
        "measured_tokens_per_second": measured,
    }


def document(
    config: RunConfig,
    ends: tuple[str, str | None, Sequence[str]],
    order: str,
    written: tuple[Path, str],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What `choose --json` prints, with other engines too: docs/speed.md has the keys. ends: the labels of the chosen
    row, the second, and those that tie; written: the folder and the name of the experiment."""
    chosen, second, tied = ends
    known = {"model": config.model.name, "chosen": chosen, "second": second, "tied": list(tied), "order": order}
    folder, name = written
    return {**known, "config_dir": str(folder), "experiment": name, "rows": rows}
