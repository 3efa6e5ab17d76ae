"""A run shows the peak that its plan predicted, and counts it itself if there was no plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from points import config_of

from orchestrator.config.schema import Loss, LossKind
from orchestrator.planning.point import Point
from orchestrator.wings.predict import predicted, prediction


@pytest.mark.full
def test_the_peak_of_a_run_is_that_of_its_plan_and_is_shown_first_if_there_was_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_of(4, every=None)
    assert predicted.planned(config) == {}
    found = predicted.known(config)
    (plan,) = prediction.predictions([Point("a", config)]).values()
    assert plan.peak is not None
    assert plan.activations is not None
    expected = {"activations_predicted_bytes": plan.activations.kept, "peak_predicted_bytes": plan.peak.total}
    assert found == expected
    assert predicted.planned(config) == expected


def test_a_run_says_why_its_activations_were_not_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_of(4, every=None)
    # Logits that the model scales after its head cannot be computed in tiles.
    scaled = replace(
        config.model, name="scaled", model_type="cohere", config=config.model.config | {"pad_token_id": None}
    )
    found = predicted.known(replace(config, model=scaled, loss=Loss(LossKind.tiled)))
    assert list(found) == ["activations_unknown"]
    assert "use loss=full" in found["activations_unknown"]
