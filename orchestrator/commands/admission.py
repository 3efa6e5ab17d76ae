"""Admits a single run: predicts its memory, shows it before the ranks start, and refuses a run that cannot fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config.schema import RunConfig
from orchestrator.planning.point import Point
from orchestrator.planning.predictor import NOT_ASKED, predictor
from orchestrator.records.run_record import Attempt
from orchestrator.records.run_state import RunState
from orchestrator.report import summary
from orchestrator.report.screen import Screen
from orchestrator.report.summary import Row


@dataclass(frozen=True)
class Admission:
    """How a single run is admitted. prune: refuse a run that cannot fit. within_s: how long its start, and then the
    search for settings that fit, may wait for the process that counts. ranks_per_node: None for those of the
    configuration."""

    prune: bool = True
    within_s: float = 45.0
    ranks_per_node: int | None = None

    def admits(self, point: Point, attempt: Attempt, screen: Screen, *, quiet: bool = False) -> bool:
        """Whether the run may start. If it may not, the attempt is recorded as pruned, as a point of a sweep is.

        A run whose memory cannot be predicted may start. quiet: shows no progress.
        """
        placed = replace(point, config=self._on_its_nodes(point))
        unknown: dict[str, str] = {}
        with screen.passing(quiet=quiet) as tell:
            found = predictor().predict([placed], tell, within_s=self.within_s, unknown=unknown).get(point.label)
        text = f"nothing: {unknown.get(point.label, NOT_ASKED)}" if found is None else found.expected
        screen.rows([Row("predicted", text)])
        if found is None or not found.cannot_fit:
            return True
        if not self.prune:
            screen.warn(found.cannot_fit)
            return True
        reason, fixes = found.cannot_fit, list(found.fixes)
        attempt.move(RunState.pruned, message=reason, predicted=found.record, remedies=fixes)
        screen.failure(point.label, RunState.pruned.value, reason, (), "")
        return False

    def _on_its_nodes(self, point: Point) -> RunConfig:
        """The configuration with the nodes on which another launcher has started its ranks."""
        config = point.config
        if self.ranks_per_node is None:
            return config
        nodes = max(config.resources.ranks // self.ranks_per_node, 1)
        return replace(config, resources=replace(config.resources, nodes=nodes))


def next_rows(point: Point, attempt: Attempt) -> list[Row]:
    """The next commands after a refusal: with the first setting that would fit, and as it was typed."""
    found = attempt.facts.get("remedies")
    rows = (
        [Row("next", summary.changed_command(point.overrides, found[0]))] if isinstance(found, list) and found else []
    )
    return [
        *rows,
        Row("" if rows else "next", f"{summary.run_command(point.overrides)} --prune off     # runs it anyway"),
    ]
