from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from points import make_config

from orchestrator.record import EventTail, append_event, new_attempt, point_id, read_json, settle, write_json_atomic
from orchestrator.run_state import MOVES, RunState
from orchestrator.schema import to_dict
from zero_runtime.process_identity import mark


def test_the_id_ignores_where_a_run_goes_and_how_it_is_tracked(tmp_path: Path) -> None:
    config = to_dict(make_config(tmp_path))
    other = to_dict(make_config(tmp_path / "elsewhere", limit_min=5))
    other["tracking"]["uri"] = "http://somewhere"
    assert point_id(config, 2, "cpu") == point_id(other, 2, "cpu")


@pytest.mark.parametrize("change", [("zero", "stage"), ("batch", "micro"), ("resources", "threads")])
def test_the_id_moves_with_whatever_changes_the_measurement(tmp_path: Path, change: tuple[str, str]) -> None:
    config, other = to_dict(make_config(tmp_path)), to_dict(make_config(tmp_path))
    other[change[0]][change[1]] += 1
    assert point_id(config, 2, "cpu") != point_id(other, 2, "cpu")


def test_the_id_moves_with_world_and_hardware_and_not_with_the_order_of_keys(tmp_path: Path) -> None:
    config = to_dict(make_config(tmp_path))
    turned = dict(reversed(config.items()))
    assert point_id(config, 2, "cpu") == point_id(turned, 2, "cpu")
    assert len({point_id(config, 2, "cpu"), point_id(config, 3, "cpu"), point_id(config, 2, "H200")}) == 3


def test_every_try_at_a_point_has_its_own_folder_and_what_was_hashed_lies_beside(tmp_path: Path) -> None:
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


def test_a_state_moves_only_along_the_table_and_is_written_with_its_reason(tmp_path: Path) -> None:
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


def test_every_state_that_is_not_final_can_end_badly() -> None:
    for state in RunState:
        if not state.final:
            assert {RunState.error, RunState.cancelled} <= MOVES[state]


def test_a_tail_gives_every_event_once_and_never_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = EventTail(path)
    assert tail.read_new() == []
    append_event(path, {"event": "ready"})
    with path.open("a") as file:
        file.write('{"event": "st')
    assert tail.read_new() == [{"event": "ready"}]
    with path.open("a") as file:
        file.write('ep", "text": "Ψ"}\n')
    assert tail.read_new() == [{"event": "step", "text": "Ψ"}]
    assert tail.read_new() == []


def test_an_attempt_whose_owner_is_gone_is_lost_or_what_its_result_says(tmp_path: Path) -> None:
    for result, state in ((False, RunState.lost), (True, RunState.ok)):
        attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
        attempt.move(RunState.starting)
        attempt.move(RunState.running)
        assert settle(attempt.paths) is RunState.running, "this process owns it"
        facts = json.loads(attempt.paths.state.read_text())
        facts["owner"]["started"] = "0@an earlier boot"
        attempt.paths.state.write_text(json.dumps(facts))
        if result:
            write_json_atomic(attempt.paths.result, {})
        assert settle(attempt.paths) is state


def test_a_record_of_an_older_version_can_be_read(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    write_json_atomic(attempt.paths.state, {"state": "killed", "time": 1.0, "label": "a", "point": attempt.point})
    assert settle(attempt.paths) is RunState.lost


def test_provenance_is_recorded_and_is_no_part_of_the_identity(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    facts = json.loads(attempt.paths.provenance.read_text())
    assert {"commit", "dirty", "packages", "command", "variables"} <= facts.keys()
    assert "torch" in facts["packages"]
    identity = json.loads((attempt.paths.root.parents[1] / "identity.json").read_text())
    assert not identity.keys() & facts.keys()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path], "nor does it leave what it began"
    assert read_json(tmp_path / "absent.json") is None


def test_what_a_killed_process_began_to_write_goes_at_the_next_attempt(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = mark(child.pid)
    child.kill()
    child.wait()
    config = to_dict(make_config(tmp_path))
    first = new_attempt(tmp_path, config, "a", "cpu").paths.root
    point = first.parents[1]
    for folder in (first, point):
        (folder / f".state.json.{dead}.tmp").touch()
        (folder / f".state.json.{mark()}.tmp").touch()
    new_attempt(tmp_path, config, "a", "cpu")
    assert {path.name for path in point.rglob("*.tmp")} == {f".state.json.{mark()}.tmp"}
