"""Prints the plan, the progress, the summary and the comparison; plain lines if the output is not a terminal."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.config.schema import RunConfig
from orchestrator.records.sweep_record import Planned
from orchestrator.report import cautions, extras, named_apart, ranking, summary, sweep_table
from orchestrator.report.narrow import narrowed
from orchestrator.report.progress import RECENT, phase, step_line, step_numbers
from orchestrator.report.ranking import Ranked
from orchestrator.report.summary import Row, Table
from orchestrator.text.units import duration, loss, many

PLAIN_WIDTH = 10_000  # characters of a line in a pipe or file: no table is as wide
PLAIN_EVERY_S = 2.0
_FILLED = re.compile(r"(?: |\x1b\[[\d;]*m)+(?=\n)")  # blanks and styles before the end of a line


def make_console(*, on_stderr: bool = False) -> Console:
    """A console for stdout or stderr. Output that is not a terminal is cut and wrapped only where COLUMNS is set."""
    console = Console(stderr=on_stderr, highlight=False)
    if not console.file.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        console.width = PLAIN_WIDTH
    return console


class Screen:
    """Writes to one console. No method blocks."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or make_console()
        self.console.file = cast("IO[str]", _Unfilled(self.console.file))
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._bar: _Bar | None = None

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=not self.live)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}", "yellow")

    @contextmanager
    def passing(self, *, quiet: bool = False) -> Iterator[Callable[[str], None] | None]:
        """Yields what shows a line of progress, None if `quiet`. On a terminal a line replaces the one before, and
        none is left at the end; without a terminal each is printed once, without the number of what is done."""
        if quiet or not self.live:
            told: set[str] = set()

            def once(text: str) -> None:
                state = re.sub(r"\d+ of ", "", text)
                if state not in told:
                    self.say(state)
                told.add(state)

            yield None if quiet else once
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as live:
            yield lambda text: live.update(Text(text, style="dim"), refresh=True)

    def sweep_plan(self, planned: Sequence[Planned], folder: str) -> None:
        """Shows the decision about each point before anything starts."""
        self.say(f"{many(len(planned), 'point')}, records in {folder}", "bold")
        self.rows(sweep_table.plan_rows(planned))

    def table(self, table: Table) -> None:
        """Prints a table. On a terminal that is too narrow it has fewer columns, and a line names those left out."""
        self.console.print(self.drawn(table))

    def drawn(self, table: Table, styles: Sequence[str] = ()) -> Group:
        """The table, with the line about columns that were left out. styles: one for each row, or none."""
        found = narrowed(table, width := self.console.width)
        text = f"left out at {width} columns: {', '.join(found.left_out)}; `| cat` without COLUMNS shows all"
        line = [Text(text, style="dim")] if found.left_out else []
        return Group(_table(found.table, styles, wraps_names=not found.fits), *line)

    def plan(self, label: str, config: RunConfig, folder: str) -> None:
        """Shows the configuration of the run that is about to start."""
        rows = summary.plan_rows(config, folder)
        if self.live:
            panel = Panel(_grid(rows), title=f" {label} ", title_align="left", border_style="cyan", expand=False)
            self.console.print(panel)
        else:
            self.say(f"== {label}")
            self.rows(rows)

    def begin(self, config: RunConfig) -> None:
        """Starts the progress display, which `end` stops."""
        self._bar = _Bar(self.console, config.steps(), live=self.live)

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows one event of metrics.jsonl."""
        if self._bar is not None:
            self._bar.event(event)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def success(self, result: Mapping[str, Any], note: str, config: Mapping[str, Any]) -> None:
        """Prints the summary of one run. config: as it is recorded."""
        self.console.print()
        self.rows(summary.speed_rows(result))
        for table in (summary.phase_table(result), summary.memory_table(result)):
            self.console.print()
            self.table(table)
        self.console.print()
        talk = [*summary.communication_rows(result), *summary.dtype_rows(result)]
        learned = [*summary.learning_rows(result), *summary.training_rows(result)]
        used = extras.rows(result, config)
        self.rows([*talk, *learned, *used, *summary.checkpoint_rows(result), summary.machine_row(result)])
        for warning in filter(None, (note, cautions.load_text(result))):
            self.warn(warning)

    def failure(self, label: str, state: str, message: str, log: Sequence[str], path: str) -> None:
        """Prints how a run failed, with the last lines of the log that shows the cause; without lines, its path."""
        self.console.print()
        self.say(f"{label}: {state}: {message}", "bold red")
        if log:
            self.say(f"the last lines of {path}:", "dim")
            for line in log:
                self.say(f"  {line}")
        elif path:
            self.say(f"its traceback is in {path}", "dim")

    def comparison(self, ranked: Sequence[Ranked]) -> None:
        """Prints the table of a sweep, its order, and the conclusions."""
        self.console.print()
        for name, table in ranking.tables(ranked).items():
            if name:
                self.say(f"{name}:", "bold")
            self.table(table)
        self.say(ranking.rule(ranked[0].metric), "dim")
        for line in (*cautions.reused(ranked), *cautions.without_place(ranked)):
            self.say(line)
        for line in cautions.failures(ranked):
            self.say(line, "red")
        for line in cautions.warnings(ranked):
            self.warn(line)
        self.say(ranking.conclusion(ranked), "bold")
        for line in (*named_apart.lines(ranked), *extras.places().notes([row.entry for row in ranked])):
            self.say(line)

    def closing(self, rows: Sequence[Row]) -> None:
        """Prints paths and the next command. Lines are never wrapped, so that they can be copied."""
        self.console.print()
        self._lines(rows)

    def rows(self, rows: Sequence[Row]) -> None:
        """Prints names on the left. Without a terminal each row is one line, however long, for grep and for copying."""
        if self.live:
            self.console.print(_grid(rows))
        else:
            self._lines(rows)

    def _lines(self, rows: Sequence[Row]) -> None:
        width = max((len(row.name) for row in rows), default=0)
        for row in rows:
            name = Text(f"{row.name:<{width}}  ", style="bold")
            self.console.print(name.append(row.text, style="not bold"), soft_wrap=True)


class _Unfilled:
    """A stream without the blanks that fill a line, which copied text would have."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_FILLED.sub(lambda found: found[0].replace(" ", ""), text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Bar:
    """The progress of one run: a bar on a terminal, else a line every few seconds."""

    def __init__(self, console: Console, steps: int | None, *, live: bool) -> None:
        self._console, self._steps = console, steps
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._last_line = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)  # milliseconds of the latest steps
        if live:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._progress.add_task("starting ranks", total=steps, numbers="")
            self._progress.start()
        else:
            console.print(Text("starting ranks"))

    def event(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self._say(f"ready: {summary.ready_text(event)}")
            if event.get("warning"):
                self._say(f"note: {event['warning']}")
        elif kind == "resumed":
            self._say(summary.resumed_text(event))
        elif kind == "passed_over":
            self._say(f"warning: passed over {event['path']}: {event['why']}")
        elif kind == "step" and not event.get("earlier"):  # earlier steps of a resumed run are in its record already
            self._step(event)
        elif kind == "extending":
            self._say(f"measuring {len(event['rounds'])} further rounds, as measure.min_s asks")
        elif kind == "repeating":
            rounds = ", ".join(map(str, event["rounds"]))
            self._say(f"measuring again, because other processes took a notable share of the cores: round {rounds}")
        elif kind == "validation" and not event.get("earlier"):
            best = ", the lowest so far" if event.get("best") else ""
            self._say(f"validation loss {loss(event['loss'])} at step {event['step']}{best}")

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _say(self, text: str) -> None:
        self._console.print(Text(text))

    def _step(self, event: Mapping[str, Any]) -> None:
        self._steps = event.get("of") or self._steps
        if self._progress is not None:
            self._progress.update(
                self._task,
                description=phase(event),
                completed=event["step"],
                total=self._steps,
                numbers=self._numbers(event),
            )
            return
        now = time.monotonic()
        if event["step"] in (1, self._steps) or now - self._last_line >= PLAIN_EVERY_S:
            self._last_line = now
            self._say(step_line(event, self._steps))

    def _numbers(self, event: Mapping[str, Any]) -> str:
        self._recent.append(event["step_ms"])
        left_s = ((self._steps or event["step"]) - event["step"]) * statistics.median(self._recent) / 1e3
        return step_numbers(event) + (f"  {duration(left_s)} left" if left_s > 0 else "")


def _grid(rows: Sequence[Row]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(Text(row.name), Text(row.text))
    return grid


def _table(table: Table, styles: Sequence[str] = (), *, wraps_names: bool = False) -> RichTable:
    rich = RichTable(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(table.header):
        is_name, is_text = index < table.names, name in table.texts
        wraps = is_text or (is_name and wraps_names)
        rich.add_column(name, justify="left" if is_name or is_text else "right", no_wrap=not wraps, overflow="fold")
    for number, row in enumerate(table.rows):
        rich.add_row(*[Text(cell, style=styles[number] if styles else "") for cell in row])
    return rich
