"""A sweep in MLflow, from its records: its page, the runs of points whose answers were kept, and its summary run."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.records.record_file import read_or_warn
from orchestrator.records.record_shapes import STATE, SWEEP
from orchestrator.records.run_record import AttemptPaths, settle
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, Standing, SweepPaths, standings
from orchestrator.report import comparison, ranking, sweep_table
from orchestrator.tracking import chart_page, names
from orchestrator.tracking.followed_run import FollowedRun, RunNames, is_complete, open_run
from orchestrator.tracking.store import MlflowStore
from orchestrator.tracking.sweep_names import SweepNames


class SweepRuns:
    """The runs of one sweep in a store. `tags`: of the command that writes them. BadRecord without a readable plan."""

    def __init__(self, store: MlflowStore, sweep: SweepPaths, tags: Mapping[str, str]) -> None:
        self._store, self._sweep, self._tags = store, sweep, tags
        self._names = SweepNames(sweep)
        self.experiment = self._names.experiment

    def prepare(self) -> None:
        """Writes the page of the sweep."""
        page = chart_page.view(tuple(self._names.levels), self._sweep.name, len(self._names.points))
        self._store.describe(self.experiment, {chart_page.tag_of(self._sweep.name): page})

    def missing(self) -> Iterator[tuple[Standing, bool]]:
        """The ended points whose runs are not complete, and whether each has a run."""
        there = {run.data.tags.get(names.ATTEMPT): run for run in self._runs()}
        for standing in standings(self._sweep):
            if standing.attempt is None or not standing.state.final:
                continue
            run = there.get(str(standing.attempt.root))
            if run is None or not is_complete(run, standing.attempt):
                yield standing, run is not None

    def end_replaced(self) -> None:
        """Ends the runs that were cut off, also those of attempts that others have replaced."""
        for run in self._runs():
            attempt = AttemptPaths(Path(run.data.tags.get(names.ATTEMPT, "nowhere")))
            if run.info.status == "RUNNING" and attempt.state.exists() and settle(attempt).final:
                FollowedRun(self._store, run.info.run_id, attempt).finish()

    def _runs(self) -> Iterator[Any]:
        mine = {names.SWEEP: self._sweep.name, names.KIND: "point"}
        return self._store.runs(self.experiment, mine, searched_by=names.SWEEP)

    def write(self, standing: Standing) -> None:
        """Writes the run of an ended point."""
        assert standing.attempt is not None
        kept = _kept_since(standing.planned, standing.attempt)
        self.open(standing.label, standing.attempt, kept).finish()

    def open(self, label: str, attempt: AttemptPaths, kept: str = "") -> FollowedRun:
        """Opens the run of a point. kept: the date of an answer that an earlier command had."""
        # The files that a point reads may have changed between the plan and its start: the attempt knows what it read.
        point = (read_or_warn(attempt.state, STATE) or {}).get("point") or self._names.points[label]
        varied = self._names.values_of(label)
        colour = chart_page.colour_of(list(self._names.points).index(label))
        named = RunNames(self.experiment, label, point, self._sweep.name, varied, kept, colour)
        return open_run(self._store, attempt, named, self._tags)

    def summarize(self) -> tuple[str, bool]:
        """Writes the summary run with the files of the report that are there, and describes the experiment.

        Returns its id, and whether it is new. A second writing changes the same run.
        """
        mine = {names.KIND: "summary", names.SWEEP: self._sweep.name}
        known = self._store.run_of(self.experiment, mine, searched_by=names.SWEEP)
        name = f"summary of {self._sweep.name}"
        run = known or self._store.create_run(self.experiment, name, {**self._tags, **mine})
        table, facts = comparison.markdown(self._sweep), self._facts()
        self._store.set_tags(run, {names.NOTE: table, **facts})
        self._store.log_params(run, {key: ", ".join(levels) for key, levels in self._names.levels.items()})
        for path in (self._sweep.page, self._sweep.picture, self._sweep.report, self._sweep.results):
            if path.is_file():
                self._store.client.log_artifact(run, str(path))
        for path in sorted(self._sweep.pictures.glob("[!.]*")):  # a killed controller may have left parts of others
            self._store.client.log_artifact(run, str(path), self._sweep.pictures.name)
        if self._store.client.get_run(run).info.status != "FINISHED":
            self._store.client.set_terminated(run, status="FINISHED")
        self._store.describe(self.experiment, {names.NOTE: f"{_sentence(facts)}\n\n{table}"})
        return run, known is None

    def _facts(self) -> dict[str, str]:
        record = read_or_warn(self._sweep.sweep, SWEEP) or {}
        ranked = comparison.ranked(self._sweep)
        counts = Counter(sweep_table.word(RunState(row.entry.state)) for row in ranked)
        best = {
            name: ", ".join(row.entry.label for row in rows if row.place == 1)
            for name, rows in ranking.by_table(ranked).items()
        }
        winners = "; ".join(f"{name}: {labels}" if name else labels for name, labels in best.items() if labels)
        return {
            names.COMMAND: shlex.join(record.get("command") or ()) or "a batch that a program proposed",
            names.COUNTS: ", ".join(f"{count} {state}" for state, count in counts.items()),
            names.RANK_BY: record.get("rank_by") or ranking.DEFAULT_METRIC,
            **({names.BEST: winners} if winners else {}),
        }


def _sentence(facts: Mapping[str, str]) -> str:
    best = f"; first by {facts[names.RANK_BY]}: {facts[names.BEST]}" if names.BEST in facts else ""
    return f"`{facts[names.COMMAND]}`: {facts[names.COUNTS]}{best}"


def _kept_since(planned: Planned, attempt: AttemptPaths) -> str:
    """The date of an answer that an earlier command had; empty for a point that this sweep ran."""
    if planned.decision is RunState.queued:
        return ""
    ended = (read_or_warn(attempt.state, STATE) or {}).get("time", 0)
    return time.strftime("%Y-%m-%d", time.localtime(ended))
