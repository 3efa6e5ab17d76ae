from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from points import config_of_line, make_config
from stub_worker import make_result

from orchestrator.config.schema import to_dict
from orchestrator.planning.rules import data as data_rules
from orchestrator.records import run_record
from orchestrator.records.record_file import read_json, require_json, write_json_atomic
from orchestrator.records.run_record import (
    Attempt,
    all_attempts,
    attempts_at,
    new_attempt,
    point_id,
    settle,
    this_process,
)
from orchestrator.records.run_state import MOVES, RunState
from orchestrator.records.sweep_record import Planned, open_sweep
from zero_runtime.process_identity import mark


def test_the_id_ignores_the_output_folder_the_time_limit_and_tracking(tmp_path: Path) -> None:
    config = to_dict(make_config(tmp_path))
    other = to_dict(make_config(tmp_path / "elsewhere", limit_min=5))
    other["tracking"]["uri"] = "http://somewhere"
    assert point_id(config, 2, "cpu") == point_id(other, 2, "cpu")


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("", "zero=stage2"),
        ("zero=stage3", "zero.stage=3"),
        ("optimizer.lr=3e-3 resources.ranks=2", "resources.ranks=2 optimizer.lr=0.003"),
        ("optimizer.clip_norm=1", "optimizer.clip_norm=1.0"),
        ("adapter=lora", "adapter=lora adapter.targets=all-linear"),
        ("batch.accumulation=2", "batch.global_size=16"),
        ("checkpoint=sharded", "checkpoint=sharded checkpoint.keep_last=5 checkpoint.keep_every=9"),
    ],
)
def test_two_spellings_of_a_measurement_have_one_id(monkeypatch: pytest.MonkeyPatch, line: str, other: str) -> None:
    monkeypatch.setattr(data_rules, "is_installed", lambda _: True)
    assert id_of(line) == id_of(other)


def test_each_setting_that_affects_the_measurement_gives_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_rules, "is_installed", lambda _: True)
    lines = (
        *("", "zero=stage3", "optimizer=muon", "optimizer=lamb", "optimizer=adamw8bit", "optimizer=torch"),
        *("optimizer.state_dtype=bf16", "optimizer=lamb optimizer.correction=rate", "scheduler=one_cycle"),
        *("precision=fp16", "parallel=tp2", "zero.reduce_dtype=int4", "offload=optimizer_cpu", "comm=gloo"),
        *("checkpoint=sharded", "recompute=by_operation", "adapter=lora", "measure.rounds=3"),
        *("measure=eval zero=stage0", "measure=train train.max_steps=9 train.eval_every=3"),
    )
    assert len({id_of(line) for line in lines}) == len(lines)


def id_of(line: str) -> str:
    """The id of a command line's point on a CPU."""
    config = config_of_line(line)
    return point_id(to_dict(config), config.ranks, "cpu")


@pytest.mark.parametrize("change", [("zero", "stage"), ("batch", "micro"), ("resources", "threads")])
def test_the_id_changes_with_settings_that_affect_the_measurement(tmp_path: Path, change: tuple[str, str]) -> None:
    config, other = to_dict(make_config(tmp_path)), to_dict(make_config(tmp_path))
    other[change[0]][change[1]] += 1
    assert point_id(config, 2, "cpu") != point_id(other, 2, "cpu")


def test_the_id_depends_on_world_size_and_hardware_but_not_on_the_order_of_keys(tmp_path: Path) -> None:
    config = to_dict(make_config(tmp_path))
    turned = dict(reversed(config.items()))
    assert point_id(config, 2, "cpu") == point_id(turned, 2, "cpu")
    assert len({point_id(config, 2, "cpu"), point_id(config, 3, "cpu"), point_id(config, 2, "H200")}) == 3


def test_every_attempt_has_its_own_folder_and_its_point_stores_what_was_hashed(tmp_path: Path) -> None:
    config = to_dict(make_config(tmp_path))
    first, second = (new_attempt(tmp_path, config, "a", "cpu") for _ in range(2))
    assert [one.paths.root.name for one in (first, second)] == ["01", "02"]
    point = first.paths.root.parents[1]
    identity = read_json(point / "identity.json")
    assert identity is not None
    assert point.name == identity["point"] == first.point
    assert "output" in identity["ignored"]
    assert "output" not in identity["config"]
    assert read_json(first.paths.config) == config


def test_a_state_changes_only_as_the_table_allows_and_is_written_with_its_reason(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    with pytest.raises(AssertionError, match="from queued to ok"):
        attempt.move(RunState.ok)
    attempt.move(RunState.starting)
    attempt.move(RunState.error, rank=1, message="why")
    state = read_json(attempt.paths.state)
    assert state is not None
    assert (state["state"], state["rank"], state["message"]) == ("error", 1, "why")
    with pytest.raises(AssertionError):
        attempt.move(RunState.running)


def test_every_state_that_is_not_final_can_become_error_or_cancelled() -> None:
    for state in RunState:
        if not state.final:
            assert {RunState.error, RunState.cancelled} <= MOVES[state]


def disown(attempt: Attempt) -> None:
    """Changes the record as if the process that owns the attempt had ended."""
    facts = read_json(attempt.paths.state)
    assert facts is not None
    write_json_atomic(attempt.paths.state, {**facts, "owner": {**facts["owner"], "pid": 2**22 + 1}})


def test_an_attempt_whose_owner_ended_is_ok_if_it_has_a_result_and_lost_otherwise(tmp_path: Path) -> None:
    for result, state in ((False, RunState.lost), (True, RunState.ok)):
        attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
        attempt.move(RunState.starting)
        attempt.move(RunState.running)
        assert settle(attempt.paths) is RunState.running, "this process owns it"
        disown(attempt)
        rank = {"rank": 0, "state": "running", "time": 1.0, **this_process()}
        write_json_atomic(attempt.paths.rank_record(0), rank)
        assert settle(attempt.paths) is RunState.running, "its rank has not ended yet, and may write the result"
        write_json_atomic(attempt.paths.rank_record(0), {**rank, "pid": 2**22 + 1})
        if result:
            write_json_atomic(attempt.paths.result, make_result(make_config(tmp_path)))
        assert settle(attempt.paths) is state


def test_provenance_is_recorded_and_is_no_part_of_the_identity(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    facts = require_json(attempt.paths.provenance)
    assert {"commit", "dirty", "packages", "command", "variables"} <= facts.keys()
    assert "torch" in facts["packages"]
    identity = require_json(attempt.paths.root.parents[1] / "identity.json")
    assert not identity.keys() & facts.keys()


def test_an_attempt_whose_owner_ended_is_lost_if_its_result_is_invalid(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    attempt.move(RunState.starting)
    disown(attempt)
    attempt.paths.result.write_text("{}")
    assert settle(attempt.paths) is RunState.lost
    assert f"{attempt.paths.result}: expected" in Attempt.reopen(attempt.paths).message


def test_the_state_of_an_attempt_is_returned_even_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, data: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    disown(attempt)
    monkeypatch.setattr(run_record, "write_json_atomic", refused)
    assert settle(attempt.paths) is RunState.lost


def test_a_new_attempt_sets_aside_bad_records_of_earlier_attempts_and_keeps_their_results(tmp_path: Path) -> None:
    config = to_dict(make_config(tmp_path))
    torn, good = (new_attempt(tmp_path, config, "a", "cpu") for _ in range(2))
    write_json_atomic(torn.paths.result, make_result(make_config(tmp_path)))
    torn.paths.state.write_text("")
    assert attempts_at(tmp_path, good.point) == [good.paths]
    third = new_attempt(tmp_path, config, "a", "cpu")
    assert third.paths.root.name == "03"
    assert len(list(torn.paths.root.glob("state.json.*.bad"))) == 1
    assert torn.paths.result.exists()
    assert all_attempts(tmp_path, good.point) == [third.paths, good.paths]


def test_a_new_attempt_settles_earlier_attempts_whose_command_was_killed(tmp_path: Path) -> None:
    config = to_dict(make_config(tmp_path))
    first = new_attempt(tmp_path, config, "a", "cpu")
    first.move(RunState.starting)
    disown(first)
    new_attempt(tmp_path, config, "a", "cpu")
    assert Attempt.reopen(first.paths).state is RunState.lost


def ended_mark() -> str:
    """The mark of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = mark(child.pid)
    child.kill()
    child.wait()
    return dead


def test_temporary_files_of_a_killed_process_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """At the next attempt, and at the next sweep even if it reuses the point's result and creates no attempt."""
    dead = ended_mark()
    config = to_dict(make_config(tmp_path))
    first = new_attempt(tmp_path, config, "a", "cpu")
    point = first.paths.root.parents[1]
    kept = Planned("a", (), RunState.cached, first.point, config, attempt=str(first.paths.root))
    for start in (
        lambda: new_attempt(tmp_path, config, "a", "cpu"),
        lambda: open_sweep(tmp_path, "sweep", [kept], {}),
    ):
        for folder in (first.paths.root, point):
            (folder / f".state.json.{dead}.tmp").touch()
            (folder / f".state.json.{mark()}.tmp").touch()
        start()
        assert {path.name for path in point.rglob("*.tmp")} == {f".state.json.{mark()}.tmp"}


def test_the_folder_of_a_sweep_killed_before_its_first_record_is_removed_at_the_next_start(
    tmp_path: Path,
) -> None:
    unrecorded, used = tmp_path / "sweeps" / "unrecorded", tmp_path / "sweeps" / "used"
    for folder in (unrecorded, used):
        folder.mkdir(parents=True)
        (folder / f".sweep.json.{ended_mark()}.tmp").touch()
    (used / "mine").touch()
    sweep = open_sweep(tmp_path, "sweep", [], {})
    assert set((tmp_path / "sweeps").iterdir()) == {sweep.root, used}
    assert [path.name for path in used.iterdir()] == ["mine"]


def test_what_a_killed_command_left_of_a_sweeps_files_and_pictures_is_removed_at_the_next_start(tmp_path: Path) -> None:
    sweep = open_sweep(tmp_path, "sweep", [], {})
    sweep.pictures.mkdir()
    for folder in (sweep.root, sweep.pictures):
        (folder / f".file.{ended_mark()}.tmp").touch()
    assert open_sweep(tmp_path, "sweep", [], {}) == sweep
    assert list(tmp_path.rglob("*.tmp")) == []
