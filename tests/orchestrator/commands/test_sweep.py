"""Complete sweeps of the stub worker keep measured results, run only the rest, and lose or leave behind nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness.patience import HANG_S, wait_until
from points import STUB
from rich.console import Console
from sweep_runs import COMMAND, attempts, left_behind, points, states, the_sweep

from orchestrator import cli
from orchestrator.commands import verbs
from orchestrator.commands.sweep import SweepRequest, run_quietly, run_sweep, watch
from orchestrator.config.strict import Broken
from orchestrator.machine import hardware
from orchestrator.planning.point import Refused, Wishes
from orchestrator.records import sweep_record
from orchestrator.records.record_file import read_json
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report import comparison
from orchestrator.report.screen import Screen
from orchestrator.text.paths import program

HERE = Path(__file__).parents[1]
FAST = {"STUB_STEP_S": "0.0"}


@pytest.fixture(autouse=True)
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("ZLAB_LOCKS", str(tmp_path / "locks"))


def run(output: Path, micros: list[int], wishes: Wishes | None = None, **more: object) -> tuple[int, str, SweepPaths]:
    """Runs a sweep over micro-batches. Returns its exit code, its output and its records."""
    out = io.StringIO()
    request = SweepRequest(
        "batch", points(output, micros), ("sweeps=batch",), wishes or Wishes(), predicts=False, entry=STUB
    )
    request = replace(request, **more)  # type: ignore[arg-type]
    code = run_sweep(request, hardware.detect(), Screen(Console(file=out, width=300)))
    return code, out.getvalue(), sweep_record.all_sweeps(output)[0]


def test_repeating_a_command_keeps_measured_results_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, sweep = run(tmp_path, [1, 2])
    assert (code, states(sweep)) == (0, ["ok", "ok"])
    assert "micro1: ok" in shown
    assert len(attempts(tmp_path)) == 2
    code, shown, again = run(tmp_path, [1, 2])
    assert (code, states(again), again.root, "earlier" in shown) == (0, ["cached", "cached"], sweep.root, False)
    assert ("\nreused  2   micro1, micro2: measured on " in shown, "cached" in shown) == (True, False)
    assert (len(attempts(tmp_path)), {one.message for one in sweep_record.standings(again)}) == (2, {""})
    request = SweepRequest("batch", points(tmp_path, [1, 2]), ("sweeps=batch",), predicts=False, entry=STUB)
    assert run_sweep(replace(request, as_json=True), hardware.detect()) == 0
    told = capsys.readouterr()
    found = [(one["state"], one["result"] is not None) for one in json.loads(told.out)["points"]]
    assert found == [("cached", True)] * 2
    assert "sorted by median tokens/s" in told.err
    for last in ("ok", "cached"):
        code, shown, wider = run(tmp_path, [1, 2, 4])
        assert (code, states(wider), wider.root != sweep.root) == (0, ["cached", "cached", last], True)
        assert "2 of 3 rows were measured earlier: micro1 measured " in shown
    run(tmp_path, [1, 2], Wishes(fresh=True))
    assert len(attempts(tmp_path)) == 5


def test_a_failed_point_is_a_row_and_is_retried_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZLAB_FAULT", "raise@step2:rank0")
    code, shown, sweep = run(tmp_path, [1])
    assert (code, states(sweep)) == (1, ["error"])
    assert f"retry {sweep.name} --output {tmp_path} --retry error" in shown
    monkeypatch.delenv("ZLAB_FAULT")
    code, _, sweep = run(tmp_path, [1])
    assert (code, states(sweep), len(attempts(tmp_path))) == (1, ["error"], 1)
    code, _, sweep = run(tmp_path, [1], Wishes(retry=frozenset({RunState.error})))
    assert (code, states(sweep), len(attempts(tmp_path))) == (0, ["ok"], 2)


def test_out_of_memory_counts_as_a_result_and_larger_micro_batches_are_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_LACKING_MICRO", "4")
    code, shown, sweep = run(tmp_path, [1, 4, 8, 16], points=points(tmp_path, [1, 4, 8, 16], exclusive=True))
    assert (code, states(sweep)) == (0, ["ok", "oom", "pruned", "pruned"])
    assert "micro4: oom: rank 0: out of memory in forward of step 1" in shown
    assert "micro4, which is smaller, was out of memory" in shown
    assert (read_json(attempts(tmp_path)[0] / "state.json") or {})["state"] in ("ok", "oom")
    # The next plan prunes the larger point before anything starts.
    code, _, sweep = run(tmp_path, [1, 4, 32])
    assert (code, states(sweep)) == (0, ["cached", "oom", "pruned"])
    code, _, sweep = run(tmp_path, [4, 16], Wishes(prune=False))
    assert (code, states(sweep)) == (0, ["oom", "ok"])


def test_a_plan_groups_refused_points_by_reason_and_reports_when_nothing_is_left(tmp_path: Path) -> None:
    found = points(tmp_path, [1, 2])
    refused = [Refused(f"r{number}", (), (Broken(f"rule {number % 10}"),)) for number in range(12)]
    code, shown, _ = run(tmp_path, [], points=(*found, *refused))
    assert code == 0
    code, shown, _ = run(tmp_path, [], points=(*found, *refused), plan_only=True)
    assert "r0, r10: rule 0" in shown
    assert "and 2 more; --json lists all of them" in shown
    assert "nothing is left to run" in shown


@pytest.mark.full
def test_a_slow_rank_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLAB_FAULT", "slow@step6:rank0")
    code, _, sweep = run(tmp_path, [1])
    assert (code, states(sweep)) == (0, ["ok"])


def test_the_exit_code_is_4_if_no_point_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_LACKING_MICRO", "4")
    code, shown, _ = run(tmp_path, [4])
    assert code == comparison.NOTHING_FITS
    assert "no point has a result" in shown


def test_three_equal_failures_in_a_row_stop_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLAB_FAULT", "raise@step1:rank0")
    micros = [1, 2, 3, 4, 5]
    code, shown, sweep = run(tmp_path, micros, points=points(tmp_path, micros, exclusive=True))
    assert (code, states(sweep)) == (1, ["error"] * 3 + ["cancelled"] * 2)
    assert "3 points in a row failed in the same way" in shown


@pytest.mark.full
def test_three_equal_failures_stop_the_queue_after_a_different_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZLAB_FAULT", "raise@step1:rank0")
    monkeypatch.setenv("STUB_ODD_MICRO", "1")
    micros = [1, 2, 3, 4, 5]
    code, _, sweep = run(tmp_path, micros, points=points(tmp_path, micros, exclusive=True))
    assert (code, states(sweep)) == (1, ["error"] * 4 + ["cancelled"])


def test_a_refused_point_is_a_row_with_its_fix(tmp_path: Path) -> None:
    broken = (Broken("offload.params=cpu needs zero=stage3", "", ("a=b",)),)
    refused = [Refused(label, ("zero=stage0",), broken) for label in ("one", "two")]
    code, shown, sweep = run(tmp_path, [1], points=(*points(tmp_path, [1]), *refused))
    assert (code, states(sweep)) == (0, ["ok", "refused", "refused"])
    assert "2 points, one, two: refused: offload.params=cpu needs zero=stage3" in shown
    assert shown.count("fix: a=b") == 2, "once in the plan, once at the end"


@pytest.mark.full
def test_points_run_in_parallel_if_slots_are_free_and_one_at_a_time_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_STEP_S", "0.1")
    for folder, exclusive, overlap in (("side", False, True), ("one", True, False)):
        output = tmp_path / folder
        code, _, sweep = run(output, [1, 2], points=points(output, [1, 2], exclusive=exclusive))
        assert code == 0
        events = [json.loads(line) for line in sweep.events.read_text().splitlines()]
        order = [event["event"] for event in events if "label" in event]
        beside = overlap and hardware.usable_cores() >= 2
        assert (order[:2] == ["started", "started"]) is beside
        slots = [event["slots"] for event in events if event["event"] == "started"]
        assert all(len(one) == 1 for one in slots)
        assert (slots[0] != slots[1]) is beside


@pytest.mark.full
def test_damaged_records_of_one_point_stop_neither_the_sweep_nor_other_points(tmp_path: Path) -> None:
    process = start(tmp_path, [1, 2], step_s=0.4)
    attempt = AttemptPaths(wait_until(lambda: next(iter(running(tmp_path)), None)))
    # From now on the rank writes its record only once more, when it ends.
    wait_until(lambda: (read_json(attempt.rank_record(0)) or {}).get("state") == "running")
    (sweep,) = sweep_record.all_sweeps(tmp_path)
    for file in (attempt.metrics, sweep.requests, sweep.events):
        with file.open("ab") as lines:
            lines.write(b'garbage\n{"do": 3, "event": 3}\n{"do": "cancel", "labels": 3, "event": "ended"}\n{"torn": ')
    attempt.rank_record(0).write_text('{"torn": ')
    attempt.exits.write_text("[]")
    shown, _ = process.communicate(timeout=HANG_S)
    assert (process.returncode, states(sweep)) == (0, ["ok", "ok"]), shown
    for file in (attempt.metrics, sweep.requests, attempt.rank_record(0)):
        assert f"warning: {file}: " in shown


# ---- stopped in the middle -------------------------------------------------------------------------------------------


def start(
    output: Path, micros: list[int], *, detach: bool = False, step_s: float = 0.1, **streams: Any
) -> subprocess.Popen[str]:
    path = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    text = COMMAND.format(path=path, output=str(output), micros=micros, detach=detach)
    environment = {**os.environ, "STUB_STEP_S": str(step_s)}
    streams = streams or {"stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", text], text=True, env=environment, **streams)


def measured(output: Path) -> int:
    return len(list(output.glob("points/*/attempts/*/result.json")))


def running(output: Path) -> list[Path]:
    return [one for one in attempts(output) if (read_json(one / "state.json") or {}).get("state") == "running"]


def stop_in_the_middle(output: Path) -> int:
    """Stops a running rank that has not written its result yet with SIGSTOP. Returns the pid of the stopped process."""
    return wait_until(lambda: next(filter(None, map(stopped, running(output))), None))


def stopped(attempt: Path) -> int | None:
    paths = AttemptPaths(attempt)
    pid = (read_json(paths.rank_record(0)) or {}).get("pid")
    if pid is None:
        return None
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.kill(pid, signal.SIGSTOP)
        status = wait_until(lambda: {psutil.Process(pid).status()} & {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE})
        if status == {psutil.STATUS_STOPPED} and not paths.result.exists():
            return pid
        os.kill(pid, signal.SIGCONT)
    return None


@pytest.mark.full
def test_a_sweep_killed_twice_in_the_middle_loses_no_result_and_repeats_none(tmp_path: Path) -> None:
    """The controller of a sweep of 6 points gets SIGKILL; after the sweep is started again, a rank gets it."""
    micros = list(range(1, 7))
    command = start(tmp_path, micros)
    wait_until(lambda: measured(tmp_path) >= 2)
    stop_in_the_middle(tmp_path)
    controller = sweep_record.controller_pid(the_sweep(tmp_path))
    assert controller is not None
    os.kill(controller, signal.SIGKILL)
    assert command.wait(timeout=HANG_S) == 1
    command.communicate()
    wait_until(lambda: left_behind(tmp_path) == [])
    after = states(the_sweep(tmp_path))
    assert "lost" in after
    assert "queued" in after
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("points/*/attempts/*/result.json")}

    command = start(tmp_path, micros)
    wait_until(lambda: measured(tmp_path) >= len(before) + 1)
    os.kill(stop_in_the_middle(tmp_path), signal.SIGKILL)
    assert command.wait(timeout=HANG_S) == 1
    command.communicate()
    assert left_behind(tmp_path) == []
    assert states(the_sweep(tmp_path)).count("error") == 1
    code, _, sweep = run(tmp_path, micros, Wishes(retry=frozenset({RunState.error})))
    assert (code, set(states(sweep)) <= {"ok", "cached"}) == (0, True)
    results = list(tmp_path.glob("points/*/attempts/*/result.json"))
    assert len(results) == len(micros), "one result a point: none lost, none repeated"
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())


@pytest.mark.full
def test_of_two_equal_sweeps_started_together_one_runs_and_both_succeed(tmp_path: Path) -> None:
    """The test holds the start lock until both commands wait for it, so both have planned before one starts."""
    with sweep_record.only_starter(tmp_path):
        twins = [start(tmp_path, [1, 2]) for _ in range(2)]
        wait_until(lambda: all(str(tmp_path / "sweeps" / ".lock") in opened(twin.pid) for twin in twins))
    shown = [twin.communicate(timeout=HANG_S)[0] for twin in twins]
    assert [twin.returncode for twin in twins] == [0, 0], shown
    assert not any("ended early" in text for text in shown)
    assert sum("this sweep is running already" in text for text in shown) == 1
    assert len(attempts(tmp_path)) == 2
    assert len(sweep_record.all_sweeps(tmp_path)) == 1


def opened(pid: int) -> set[str]:
    return {one.path for one in psutil.Process(pid).open_files()}


@pytest.mark.full
def test_a_command_whose_controller_finds_a_running_one_watches_that_one(tmp_path: Path) -> None:
    first = start(tmp_path, [1, 2], step_s=0.2)
    wait_until(lambda: bool(running(tmp_path)))
    sweep = the_sweep(tmp_path)
    with sweep_record.only_controller(sweep) as alone:
        assert not alone
    late = subprocess.Popen([sys.executable, "-m", "orchestrator.launch.controller", str(sweep.root), "--entry", STUB])
    out = io.StringIO()
    code = watch(sweep, Screen(Console(file=out, width=200)), late)
    assert (late.returncode, code) == (sweep_record.TAKEN, 0)
    assert "ended early" not in out.getvalue()
    assert states(sweep) == ["ok", "ok"]
    assert first.wait(HANG_S) == 0
    first.communicate()


def test_an_interrupt_without_a_terminal_cancels_everything(tmp_path: Path) -> None:
    command = start(tmp_path, [1, 2, 3, 4], step_s=5)
    wait_until(lambda: bool(running(tmp_path)))
    command.send_signal(signal.SIGINT)
    shown, _ = command.communicate(timeout=HANG_S)
    assert command.returncode == 130
    assert left_behind(tmp_path) == []
    assert "cancelled" in states(the_sweep(tmp_path))
    assert f"resume {the_sweep(tmp_path).name}" in shown


class Person:
    """Stands in for a user at a terminal: reads the output and types answers."""

    def __init__(self) -> None:
        self._end, self.terminal = pty.openpty()
        self._seen = b""
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(self._end, 4096):
                self._seen += chunk

    @property
    def seen(self) -> str:
        return self._seen.decode(errors="replace")

    def answers(self, text: str, question: int) -> None:
        """Types the text once the question has been printed for the `question`-th time."""
        wait_until(lambda: self.seen.count("[d]etach") == question)
        os.write(self._end, f"{text}\n".encode())


@pytest.mark.full
@pytest.mark.parametrize("answer", ["detach", "wait", "cancel"])
def test_at_a_terminal_an_interrupt_asks_and_follows_the_answer(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = Person()
    monkeypatch.setenv("COLUMNS", "120")
    command = start(tmp_path, [1, 2, 3, 4, 5], stdin=person.terminal, stdout=person.terminal, stderr=person.terminal)
    wait_until(lambda: measured(tmp_path) >= 1 and bool(running(tmp_path)))
    command.send_signal(signal.SIGINT)
    person.answers("", 1)  # an empty answer: the sweep continues
    wait_until(lambda: "Ctrl-C:" in person.seen.rpartition("[d]etach")[2])
    command.send_signal(signal.SIGINT)
    person.answers(answer, 2)
    assert command.wait(timeout=HANG_S) == 130
    wait_until(lambda: left_behind(tmp_path) == [])
    found = states(the_sweep(tmp_path))
    started = {(read_json(one / "state.json") or {})["state"] for one in attempts(tmp_path)}
    assert "ok" in found
    assert ("cancelled" in found) == (answer != "detach")
    assert started == {"ok"} or answer == "cancel"
    assert "Ctrl-C: detach, wait or cancel" in person.seen


@pytest.mark.full
def test_a_sweep_ends_with_its_command_unless_it_was_detached(tmp_path: Path) -> None:
    command = start(tmp_path / "a", [1, 2, 3, 4])
    wait_until(lambda: bool(running(tmp_path / "a")))
    command.kill()
    command.communicate()
    wait_until(lambda: left_behind(tmp_path / "a") == [])
    assert "cancelled" in states(the_sweep(tmp_path / "a"))

    command = start(tmp_path / "b", [1, 2], detach=True)
    shown, _ = command.communicate(timeout=HANG_S)
    assert command.returncode == 0
    assert " watch " in shown
    wait_until(lambda: set(states(the_sweep(tmp_path / "b"))) == {"ok"})


@pytest.mark.full
def test_a_request_for_a_running_sweep_waits_for_it_and_repeats_no_point(tmp_path: Path) -> None:
    start(tmp_path, [1, 2, 3], detach=True).communicate(timeout=HANG_S)
    wait_until(lambda: bool(running(tmp_path)))
    request = SweepRequest("batch", points(tmp_path, [1, 2, 3]), ("sweeps=batch",), predicts=False, entry=STUB)
    sweep = run_quietly(request, hardware.detect())
    assert set(states(sweep)) == {"ok"}
    assert len(attempts(tmp_path)) == 3


def test_verbs_work_from_another_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, [1, 2, 3, 4, 5, 6], detach=True).communicate(timeout=HANG_S)
    wait_until(lambda: bool(running(tmp_path)))
    first = running(tmp_path)[0]
    wait_until(lambda: (first / "rank0.log").exists())
    there = ["--output", str(tmp_path)]
    assert verbs.main(["status", *there, "--json"]) == comparison.INCOMPLETE
    told = json.loads(capsys.readouterr().out)
    assert told["running"] is True
    assert [one["label"] for one in told["points"]] == [f"micro{micro}" for micro in range(1, 7)]
    label = (read_json(first / "state.json") or {})["label"]
    assert verbs.main(["logs", "last", label, *there]) == 0
    assert "rank 0 of 1, pid" in capsys.readouterr().out
    assert verbs.main(["cancel", "last", "micro6", *there]) == 0
    assert "cancelled 1 point of" in capsys.readouterr().out
    assert verbs.main(["cancel", *there]) == 0
    wait_until(lambda: left_behind(tmp_path) == [])
    assert states(the_sweep(tmp_path)).count("cancelled") >= 3
    assert verbs.main(["list", *there]) == 0
    assert "cancelled" in capsys.readouterr().out
    assert verbs.main(["report", *there]) == comparison.INCOMPLETE
    shown = capsys.readouterr().out
    assert "sorted by median tokens/s" in shown
    assert "report.md" in shown
    for verb in ("report", "cancel", "watch"):
        verbs.main([verb, *there, "--json"])
        told = json.loads(capsys.readouterr().out)
        assert (len(told["points"]), told["rank_by"], told["running"]) == (6, "tokens_per_second", False)
    assert verbs.main(["status", *there]) == comparison.INCOMPLETE
    assert "points left" in capsys.readouterr().out


def test_resume_runs_a_sweep_in_the_folder_where_it_was_typed_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"command": ["zero=stge1", "data.path=a b"], "folder": str(tmp_path)}
    sweep = sweep_record.open_sweep(tmp_path / "out", "stages", [], facts)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["resume", sweep.name, "--output", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert f"in {tmp_path}: {program()} zero=stge1 'data.path=a b'" in told
    assert "Did you mean 'stage1'" in told
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(
    ("words", "told"),
    [(["status"], "there is no sweep in"), (["retry", "--retry", "ok"], "--retry ok: expected some of")],
)
def test_missing_sweeps_and_invalid_retry_states_are_reported(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--output", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
