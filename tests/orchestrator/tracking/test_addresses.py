"""Addresses of stores, and the page: pure text, whatever characters are in a path."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from points import make_config
from stub_worker import make_result, step_event

from orchestrator.commands import ui as dashboard
from orchestrator.records.run_record import store_path
from orchestrator.tracking import chart_page, names, schema_version
from orchestrator.tracking.feed import store_uri


def test_a_page_of_many_settings_and_points_is_no_longer_than_a_tag() -> None:
    settings = [f"optimizer.setting_with_a_long_name_{number}" for number in range(40)]
    assert len(chart_page.view(settings, "2026-11-23_21-24-57_a_long_name_of_a_sweep", 200)) < 20_000


def test_every_chart_shows_a_metric_that_is_logged() -> None:
    config = make_config(Path("outputs"))
    validation = names.step_metrics({"event": "validation", "step": 1, "loss": 5.3})
    logged = {**names.step_metrics(step_event(1, 0)), **validation, **names.summary_metrics(make_result(config))}
    drawn = set(re.findall(r'"(?:metricKey|key)": "([^"]+)"', chart_page.view()))
    assert drawn
    assert drawn - {"memory/allocated_mib"} <= set(logged), "which is of GPUs"


def test_points_of_a_sweep_differ_in_their_colours() -> None:
    colours = [chart_page.colour_of(number) for number in range(chart_page.MOST_RUNS)]
    assert len(set(colours)) == len(colours)
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_metric_names_are_valid_in_mlflow_and_non_finite_values_are_left_out() -> None:
    result = make_result(make_config(Path("outputs")))
    result["loss"]["last"] = float("inf")
    found = names.summary_metrics(result)
    assert "loss_last" not in found
    assert "peak_allocated_mib" not in found
    assert all(re.fullmatch(r"[\w\-.:/ ]+", name) for name in found)


def test_the_store_is_the_configured_one_then_the_environments_then_a_file_in_the_output(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    asked = replace(config, tracking=replace(config.tracking, uri="http://asked"))
    environ = {"MLFLOW_TRACKING_URI": "http://mine"}
    assert store_uri(asked, tmp_path, environ) == "http://asked"
    assert store_uri(config, tmp_path, environ) == "http://mine"
    assert store_uri(config, tmp_path, {}) == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_stores_uri_names_its_file_whatever_characters_are_in_the_path(tmp_path: Path) -> None:
    from sqlalchemy.engine import make_url

    for name in ("plain", "a#1", "a?b=c", "a%20b", "50%", "tab\t", "line\n", "sp ace", "ünï", "'\"$;&=+@:"):
        if "?" not in name or names.decodes():
            assert make_url(names.local_uri(tmp_path / name)).database == str(store_path(tmp_path / name))
    assert names.local_uri("/a b#ü") == "sqlite:////a b#ü/mlflow.db"


@pytest.mark.parametrize("decodes", [True, False])
def test_a_path_that_sqlalchemy_2_0_would_cut_is_refused(
    decodes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "decodes", lambda: decodes)
    told = schema_version.problem(names.local_uri(tmp_path / "a?b")) or ""
    assert ("expected SQLAlchemy 2.1 for a path with '?'" in told) is not decodes
    made = tmp_path / "50%25"
    made.mkdir()
    with sqlite3.connect(store_path(made)) as store:
        store.execute("CREATE TABLE alembic_version (version_num TEXT)")
        store.execute("INSERT INTO alembic_version VALUES ('ffff')")
    assert "its tables have version ffff" in (schema_version.problem(names.local_uri(made)) or "")


def test_the_dashboard_finds_its_experiments_whatever_characters_are_in_the_path(tmp_path: Path) -> None:
    output = tmp_path / "a#1?b%20c\n"
    output.mkdir()
    with sqlite3.connect(store_path(output)) as store:
        store.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT, lifecycle_stage TEXT)")
        store.execute("CREATE TABLE experiment_tags (key TEXT, value TEXT, experiment_id INTEGER)")
        store.execute("INSERT INTO experiments VALUES (3, 'zlab/tiny', 'active')")
    assert dashboard.links(store_path(output)) == [dashboard.Page("zlab/tiny", "3", "zlab")]
