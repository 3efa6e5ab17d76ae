"""On a GPU the times of a step are read during the next one; on a CPU, and before a save, immediately.

Phases are of the same steps as the speed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from points import config_of, make_config
from rank_runs import run as run_all_ranks

from orchestrator.config.schema import Measure
from orchestrator.config.state_groups import Offload
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import EventAppender, EventTail
from orchestrator.worker import train
from orchestrator.worker.listeners import RankRun
from orchestrator.worker.measure import Readings, phases_ms
from orchestrator.worker.measurement import Measurement
from orchestrator.worker.result import RunFacts
from orchestrator.worker.result_writer import ResultWriter
from zero_runtime.ledger import Ledger
from zero_runtime.offload_plan import Tier
from zero_runtime.step_report import StepReport
from zero_runtime.unit_parameters import DataState


class Clock:
    """Its laps note when they are read."""

    def __init__(self) -> None:
        self.ended, self.read = 0, list[int]()

    def end(self) -> Any:
        self.ended += 1
        number = self.ended

        def seconds() -> dict[str, float]:
            self.read.append(number)
            return {"forward": float(number)}

        return SimpleNamespace(seconds=seconds)


def run_on(device: str, folder: Path) -> tuple[RankRun, Clock]:
    """The measurement and the events of a rank, without a model."""
    clock, config = Clock(), make_config(folder)
    writer = object.__new__(ResultWriter)
    writer._config, writer._rank = config, RankInfo(0, 1, 0, "nowhere")
    writer._events = EventAppender(folder / "metrics.jsonl")
    writer._runtime = SimpleNamespace(device=SimpleNamespace(type="cpu"))  # type: ignore[assignment]
    writer.facts = RunFacts(config, *[None] * 3, 1, 2)  # type: ignore[arg-type]
    measurement = object.__new__(Measurement)
    measurement.readings, measurement._on_cuda = Readings(), device == "cuda"
    measurement._runtime = SimpleNamespace(clock=clock, reset_ledger=Ledger)  # type: ignore[assignment]
    nothing = {
        "ends": lambda step: None,
        "before_step": lambda: None,
        "begin": lambda: None,
        "end": lambda number: None,
    }
    measurement.rounds = SimpleNamespace(**nothing)  # type: ignore[assignment]
    measurement._unread, measurement._census_step, measurement._listeners = None, -1, ()
    parts: dict[str, Any] = {"measurement": measurement, "writer": writer, "config": config}
    return RankRun(**parts, **dict.fromkeys(("attempt", "rank", "runtime", "data", "loop", "saving"))), clock


def note(run: RankRun, step: int, loss: float) -> None:
    """What the loop does after a step."""
    made = report(loss)
    run.measurement.after_step(step, made, partial(run.writer.tell_step, step + 1, made, 0.1, warmup=False))


def report(loss: float) -> StepReport:
    return StepReport(loss=loss, grad_norm=1.0, skipped=False, loss_scale=1.0)


def told(folder: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["step_ms"]) for event in EventTail(folder / "metrics.jsonl").read_new()]


def test_on_a_gpu_the_host_reads_a_step_when_it_has_issued_the_next(tmp_path: Path) -> None:
    run, clock = run_on("cuda", tmp_path)
    readings = run.measurement.readings
    note(run, 0, 3.0)
    assert (clock.ended, clock.read, readings.losses) == (1, [], [3.0])
    run.measurement.read_last_step()  # as Loop.step does after the next backward
    run.measurement.read_last_step()
    assert clock.read == [1]
    note(run, 1, 2.0)
    run.measurement.read_last_step()
    assert clock.read == [1, 2]
    assert told(tmp_path) == [(1, 1000.0), (2, 2000.0)]
    assert readings.step_s == [1.0, 2.0]


def test_on_a_cpu_the_clock_of_a_step_is_read_immediately(tmp_path: Path) -> None:
    run, clock = run_on("cpu", tmp_path)
    note(run, 0, 3.0)
    assert clock.read == [1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_before_a_save_all_steps_are_in_the_record(tmp_path: Path, device: str) -> None:
    run, _ = run_on(device, tmp_path)
    for step in range(2):
        note(run, step, 3.0)
        if device == "cuda":
            run.measurement.read_last_step()
    run.measurement.read_last_step()
    assert told(tmp_path) == [(1, 1000.0), (2, 2000.0)]


def test_the_phases_are_those_of_all_steps_that_count_in_the_speed_also_in_further_rounds(tmp_path: Path) -> None:
    run, clock = run_on("cpu", tmp_path)
    clock.start = lambda: None  # type: ignore[attr-defined]
    note(run, 0, 3.0)
    run.measurement._time_rounds([(2, 2)], lambda: None)
    assert run.measurement.readings.step_s == [1.0, 2.0, 3.0]
    assert phases_ms(run.measurement.readings, 0)["forward"] == 2000.0


def test_a_run_that_fails_in_the_next_step_keeps_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = run_on("cuda", tmp_path)

    def fails(run: RankRun) -> None:
        note(run, 0, 3.0)
        raise MemoryError("in the next forward")

    monkeypatch.setattr(train, "train", fails)
    with pytest.raises(MemoryError, match="next forward"):
        train.train_and_record(run)
    assert told(tmp_path) == [(1, 1000.0)]


def watch_gathers() -> None:
    """Reference work that says 1 ms, and 2 ms if a gather of this rank is under way."""
    from orchestrator.worker.core_speed import ReferenceWork

    build, made = train.build_engine, list[Any]()

    def built(*given: Any) -> Any:
        made.append(build(*given))
        return made[-1]

    def timed_ms(work: ReferenceWork) -> float | None:
        states = [unit.parameters.state for unit in made[0].runtime.units]
        return None if work._memory is None else 1.0 + (DataState.UNSHARDING in states)

    train.build_engine = built  # type: ignore[assignment]
    ReferenceWork.timed_ms = timed_ms  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_step_sends_ends_before_the_reference_work_and_within_its_time(tmp_path: Path, stage: int) -> None:
    config = replace(config_of(6, every=None, stage=stage), measure=Measure(warmup_steps=1, steps=4, rounds=2))
    result = run_all_ranks(tmp_path, config, watch_gathers)
    assert {tuple(one["reference_ms"]) for one in result["rounds"]} == {(1.0,)}


def test_next_to_updates_in_the_background_there_is_no_reference_work(tmp_path: Path) -> None:
    config = replace(config_of(6, every=None), measure=Measure(warmup_steps=1, steps=4, rounds=2))
    result = run_all_ranks(tmp_path, replace(config, offload=Offload(optimizer=Tier.HOST)), watch_gathers)
    assert {tuple(one["reference_ms"]) for one in result["rounds"]} == {()}
