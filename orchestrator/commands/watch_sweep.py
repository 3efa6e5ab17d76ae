"""Watches a sweep from any terminal: a live table, or without a terminal one line per change. Reads records only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from enum import Enum

from rich.console import Group
from rich.live import Live
from rich.text import Text

from orchestrator import wings
from orchestrator.launch.cluster import cluster_of
from orchestrator.records.record_file import EventTail, read_or_warn
from orchestrator.records.record_shapes import SWEEP, SWEEP_EVENTS
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Standing, SweepPaths, controller_pid, is_on_cluster, standings
from orchestrator.report import comparison, sweep_table
from orchestrator.report.screen import Screen
from orchestrator.text.units import ABSENT

LOOK_S, CLUSTER_LOOK_S = 0.5, 5.0
SAY_EVERY_S = 30.0


def pause_s(sweep: SweepPaths) -> float:
    """How long a watcher waits between two looks. A scheduler must not be asked often."""
    return CLUSTER_LOOK_S if is_on_cluster(sweep) else LOOK_S


class Choice(Enum):
    """The user's choices at Ctrl-C."""

    DETACH = "d"
    WAIT = "w"
    CANCEL = "c"
    GO_ON = ""


class SweepWatch:
    """Shows a sweep until all its points have ended."""

    def __init__(
        self,
        sweep: SweepPaths,
        screen: Screen,
        alive: Callable[[], bool] | None = None,
        *,
        leaving: str = "stop",
        says_points: bool = True,
    ) -> None:
        """`alive`: whether the controller of a sweep on this machine still runs. `leaving`: what Ctrl-C does.
        `says_points`: without a terminal, whether changes of points are printed besides warnings."""
        self._leaving, self._says_points, self._has_looked = leaving, says_points, False
        self._sweep, self._screen = sweep, screen
        self._alive = alive or (lambda: controller_pid(sweep) is not None)
        self._cluster, self._is_sent = cluster_of(sweep), is_on_cluster(sweep)
        self._every_s = pause_s(sweep)
        self._events = EventTail(sweep.events, SWEEP_EVENTS)
        self._shown: dict[str, str] = {}
        # The clock of the sweep, by whichever command it is watched.
        self._begun = (read_or_warn(sweep.sweep, SWEEP) or {}).get("time", time.time())
        self._said = time.monotonic()
        self._ended, self._waits = False, ""  # for which slots, in words

    def until_end(self) -> None:
        """Returns when the controller has ended. The caller handles KeyboardInterrupt."""
        if not self._screen.live:
            while self._look() is not None:
                time.sleep(self._every_s)
            return
        with Live(console=self._screen.console, refresh_per_second=4, transient=True) as live:
            while (current := self._look()) is not None:
                live.update(self._table(current))
                time.sleep(self._every_s)

    def _look(self) -> list[Standing] | None:
        """The state of each point; None when the sweep has ended."""
        # Checked before the records are read: a controller that has ended writes nothing more.
        over = not self._is_sent and (self._ended or not self._alive())
        events = self._events.read_new()
        if not self._has_looked:  # a search has told the events of its earlier trials
            ends = [at for at, event in enumerate(events, start=1) if event["event"] == "end"]
            events, self._has_looked = events[ends[-1] if ends else 0 :], True
        for event in events:
            if event["event"] == "warning":
                self._screen.warn(event["text"])
            elif event["event"] in ("slots", "started"):
                self._waits = event.get("text", "")
                if self._waits and not self._screen.live:
                    self._screen.say(self._waits)
            self._ended = self._ended or event["event"] == "end"
        current = self._cluster.look(self._sweep)
        over = over or (self._is_sent and all(point.state.final for point in current))
        if not self._screen.live and self._says_points:
            self._say_changes(current)
        return None if over else current

    def _say_changes(self, current: list[Standing]) -> None:
        now = time.monotonic()
        cancelled: dict[str, list[str]] = {}
        for point in current:
            line = _line(point)
            if self._shown.get(point.label) != line and point.state not in (RunState.queued, RunState.starting):
                self._shown[point.label] = line
                self._said = now
                if point.state is RunState.refused:
                    continue  # the plan has said it, and the comparison does
                if point.state is RunState.cancelled:
                    cancelled.setdefault(line.removeprefix(point.label), []).append(point.label)
                else:
                    self._screen.say(line)
        for what, labels in cancelled.items():  # a queue that is cancelled is one line
            self._screen.say(f"{labels[0] if len(labels) == 1 else f'{len(labels)} points'}{what}")
        if now - self._said > SAY_EVERY_S:
            self._screen.say(": ".join(filter(None, [sweep_table.counts(current), sweep_table.running_text(current)])))
            self._said = now

    def _table(self, current: list[Standing]) -> Group:
        elapsed = time.strftime("%H:%M:%S", time.gmtime(max(0, time.time() - self._begun)))
        gpus = "" if self._is_sent else wings.load(wings.GPUS)()  # a cluster's GPUs are not this machine's
        title = f"{self._sweep.name}   done {sum(one.state.final for one in current)}/{len(current)}   {elapsed}{gpus}"
        leave = "   ".join(filter(None, [sweep_table.left_text(current), f"Ctrl-C: {self._leaving}"]))
        gap = "   " if len(title) + len(leave) + 3 <= self._screen.console.width else "\n"
        rows, room = current, max(5, self._screen.console.height - 6)
        if len(rows) > room:  # running points first, then queued ones, then those that have ended
            rows = sorted(current, key=lambda point: (point.state.final, point.state is RunState.queued))[:room]
        styles = [sweep_table.STYLES.get(point.state, "red") for point in rows]
        table = self._screen.drawn(sweep_table.standing_table(rows), styles)
        waits = [Text(self._waits, style="yellow")] if self._waits else []
        # Not the table's own title, which is cut at its width.
        return Group(Text(f"{title}{gap}{leave}", style="italic"), *waits, table)


def _line(point: Standing) -> str:
    """One state change of one point as a log line, without numbers that keep changing."""
    row = sweep_table.standing_row(point)
    if point.state.measured:
        return f"{point.label}: {point.state.value}  {row[5]} tokens/s, peak {row[4]} a rank"
    if point.state is RunState.running:
        where = "" if row[2] == ABSENT else f" on {row[2]}"
        return f"{point.label}: running{where}"
    return f"{point.label}: {point.state.value}" + (f": {point.message}" if point.message else "")


def ask_at_interrupt(current: list[Standing]) -> Choice:
    """Asks the user on a terminal. Without one an interrupt cancels the sweep, so that nothing is left running."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return Choice.CANCEL
    print(f"\n{sweep_table.counts(current)}.")
    print(
        "[d]etach: continue without this terminal   [w]ait for running points, drop the queue   "
        "[c]ancel all   [Enter] continue"
    )
    while True:
        try:
            answer = input("> ").strip().lower()[:1]
        except (EOFError, KeyboardInterrupt):
            return Choice.CANCEL
        if answer in [choice.value for choice in Choice]:
            return Choice(answer)
        print(f"expected d, w, c or Enter, found {answer}")


def conclude(sweep: SweepPaths, screen: Screen, *, with_png: bool = False, writes: bool = True) -> int:
    """Writes the report, unless it is written, and shows the comparison and the reasons of failures. Returns the exit
    code of the sweep."""
    if writes:
        comparison.write(sweep, with_png=with_png)
    current = standings(sweep)
    screen.comparison(comparison.ranked(sweep))
    return comparison.exit_code(current)
