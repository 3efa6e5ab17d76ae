"""A point is refused for what its line chose, where its configuration alone does not show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene

LAPTOP = Scene(Hardware(cores=2, cpu="cpu"))
REPLACED = (
    "measure=train trains to train.max_steps or train.epochs, and measure.steps would only measure so many, found 4"
)


@pytest.mark.parametrize("end", ["", " train.max_steps=20"])
@pytest.mark.parametrize("steps", ["measure.steps=4", "sweeps=short"])
def test_training_with_a_number_of_steps_to_measure_is_refused_and_each_fix_resolves_it(
    steps: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "short.yaml").write_text("base: {measure.steps: 4}\naxes: {zero: [stage1]}\n")
    monkeypatch.chdir(tmp_path)

    def wrong(line: str) -> list[str]:
        return checked_points(composed(arguments.split(line.split())), LAPTOP)[1]

    found = [one for one in wrong(f"{steps} measure=train{end}") if one.startswith("measure=train")]
    assert found == [f"{REPLACED}      fix: measure.steps=null   or   measure=quick"]
    assert wrong(f"{steps} measure=train measure.steps=null train.max_steps=20") == []
    assert wrong(f"{steps} measure=quick") == []
