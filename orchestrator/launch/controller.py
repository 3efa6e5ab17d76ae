"""Runs a sweep on this machine in a separate process, so that the terminal that started it can be closed.

`python -m orchestrator.launch.controller FOLDER` reads the plan in the sweep's folder and records its progress there.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from orchestrator.config.schema import Device, from_dict
from orchestrator.launch.local_run import PointRun
from orchestrator.launch.rank import ENTRY
from orchestrator.machine import hardware, slots
from orchestrator.machine.processes import is_alive, signals_ignored, started
from orchestrator.plan import decision
from orchestrator.plan.point import Point
from orchestrator.records import record_file
from orchestrator.records.record_file import BadRecord, EventTail, explained, read_or_warn, write_json_atomic
from orchestrator.records.record_shapes import REQUESTS
from orchestrator.records.run_record import new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import TAKEN, Planned, SweepPaths, only_controller, plan_of, tell
from orchestrator.report import comparison
from orchestrator.tracking.feed import Tracker, experiment_name, start_tracker

LOOK_S = 0.2
# After this many consecutive failures with the same message, the next point is expected to fail the same way.
SAME_FAILURES = 3


class Controller:
    """Starts the points of the plan as slots become free. Its state is on disk, so it may be killed at any time."""

    def __init__(self, sweep: SweepPaths, entry: str, viewer: tuple[int, str] | None) -> None:
        self._sweep, self._entry, self._viewer = sweep, entry, viewer
        facts = read_or_warn(sweep.sweep) or {}
        self._prune, self._exclusive = bool(facts.get("prune", True)), bool(facts.get("exclusive", False))
        self._waiting = [point for point in plan_of(sweep) if point.decision is RunState.queued]
        self._configs = {point.label: from_dict(point.config) for point in self._waiting}
        self._running: dict[str, tuple[Planned, PointRun, slots.Lease]] = {}
        self._pools: dict[Device, slots.SlotPool] = {}
        self._requests = EventTail(sweep.requests, REQUESTS)
        self._failures: list[str] = []
        self._reported_waiting = ""
        self._tracker = Tracker()

    def run(self) -> None:
        """Returns when no point waits or runs. No process of the sweep is left then, nor after an interrupt."""
        if self._waiting:
            self._tracker = start_tracker(self._configs[self._waiting[0].label], self._sweep.output)
            self._tracker.wait_for_store()
        try:
            while self._waiting or self._running:
                self._hear_requests()
                self._look()
                self._start()
                for warning in self._tracker.warnings():
                    tell(self._sweep, "warning", text=warning)
                time.sleep(LOOK_S)
        finally:
            self._conclude()

    def _conclude(self) -> None:
        """Ends the sweep. The tracker is closed even if nothing can be written anymore."""
        try:
            self._cancel("the sweep's controller was stopped")
            files = comparison.write(self._sweep)
            if experiment := self._experiment():
                self._tracker.summary(experiment, self._sweep.name, comparison.markdown(self._sweep), files)
        finally:
            self._tracker.close()
        for warning in self._tracker.warnings():
            tell(self._sweep, "warning", text=warning)
        tell(self._sweep, "end")

    def _experiment(self) -> str:
        configs = [point.config for point in plan_of(self._sweep) if point.config]
        return experiment_name(from_dict(configs[0])) if configs else ""

    # ---- requests from other commands ---------------------------------------------------------------------------

    def _hear_requests(self) -> None:
        for request in self._requests.read_new():
            if request["do"] == "detach":
                self._viewer = None
            elif request["do"] == "drain":
                self._drop(self._waiting, "the queue was dropped")
            elif request["do"] == "cancel":
                self._cancel("it was cancelled", request.get("labels"))
        if self._viewer is not None and not is_alive(*self._viewer):
            self._cancel("the terminal that it ran in was closed")

    def _cancel(self, why: str, labels: Sequence[str] | None = None) -> None:
        """Cancels the running and waiting points; with `labels`, only those points."""
        dropped = [point for point in self._waiting if labels is None or point.label in labels]
        with contextlib.ExitStack() as ends:  # if one end cannot be recorded, as on a full disk, the others still end
            for label in [label for label in self._running if labels is None or label in labels]:
                ends.callback(self._stop, label, why)
            ends.callback(self._drop, dropped, why)

    def _stop(self, label: str, why: str) -> None:
        planned, run, lease = self._running.pop(label)
        with lease:
            run.cancel(why)
        self._tracker.end(run.attempt)
        tell(self._sweep, "ended", label=planned.label, attempt=str(run.attempt.paths.root), slots=[])

    def _drop(self, planned: Sequence[Planned], why: str, state: RunState = RunState.cancelled) -> None:
        for point in list(planned):
            self._waiting.remove(point)
            tell(self._sweep, "decided", label=point.label, state=state.value, reason=why)

    # ---- running points ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        for label, (planned, run, lease) in list(self._running.items()):
            run.new_events()
            verdict = run.look()
            if verdict is None:
                continue
            del self._running[label]
            lease.release()
            self._tracker.end(run.attempt)
            tell(self._sweep, "ended", label=label, attempt=str(run.attempt.paths.root), slots=_names(lease))
            self._learn(planned, verdict.state, verdict.message)

    def _learn(self, planned: Planned, state: RunState, message: str) -> None:
        """Drops waiting points after a failure: larger points after out of memory, all after repeated failures."""
        if state in (RunState.oom, RunState.oom_host) and self._prune:
            larger = [point for point in self._waiting if decision.outgrown(point, planned.config)]
            self._drop(larger, decision.smaller_failed(planned.label), RunState.pruned)
        self._failures = [*self._failures, message][-SAME_FAILURES:] if state is RunState.error else []
        if len(self._failures) == SAME_FAILURES and len(set(self._failures)) == 1:
            self._drop(self._waiting, f"{SAME_FAILURES} points in a row failed in the same way: {message}")

    def _start(self) -> None:
        """Starts every waiting point whose slots are free, in plan order; in exclusive mode, one at a time."""
        too_many: dict[Device, int] = {}  # per device, a number of slots that was not free in this call
        for planned in list(self._waiting):
            if self._exclusive and self._running:
                return
            resources = self._configs[planned.label].resources
            count = slots.wanted(resources)
            if count >= too_many.get(resources.device, count + 1):
                continue
            pool = self._pool_of(resources.device)
            lease = pool.take(count)
            if lease is None:
                too_many[resources.device] = count
                self._tell_waiting(pool)
                continue
            busy = slots.busy_gpus(lease.slots) if lease.gpus is not None else []
            if busy:
                lease.release()
                self._drop([planned], f"its GPUs are in use: {'; '.join(busy)}; end those, or leave the GPUs out of "
                           "CUDA_VISIBLE_DEVICES")  # fmt: skip
                continue
            self._begin(planned, lease)

    def _pool_of(self, device: Device) -> slots.SlotPool:
        if device not in self._pools:
            self._pools[device] = slots.pool_of(device)  # asks nvidia-smi
        return self._pools[device]

    def _tell_waiting(self, pool: slots.SlotPool) -> None:
        """Warns that the sweep waits for slots of another command; once for each set of holders."""
        holders = "; ".join(pool.holders()) if not self._running else ""
        if holders and holders != self._reported_waiting:
            tell(self._sweep, "warning", text=f"waiting for slots that another command holds: {holders}")
        self._reported_waiting = holders

    def _begin(self, planned: Planned, lease: slots.Lease) -> None:
        self._waiting.remove(planned)
        config = self._configs[planned.label]
        point = Point(planned.label, config, planned.overrides)
        attempt = new_attempt(
            self._sweep.output, planned.config, planned.label, hardware.detect().name(config.resources.device)
        )
        self._tracker.begin(attempt, experiment_name(config), self._sweep.name)
        where = {"label": planned.label, "attempt": str(attempt.paths.root), "slots": _names(lease)}
        tell(self._sweep, "started", **where)
        try:
            run = PointRun(point, attempt, self._entry, lease.gpus)
        except Exception as error:  # this point is lost, the others continue
            attempt.move(RunState.error, rank=0, message=f"could not be started: {type(error).__name__}: {error}")
            self._tracker.end(attempt)
            lease.release()
            tell(self._sweep, "ended", **where)
            return
        self._running[planned.label] = (planned, run, lease)


class _Warnings(logging.Handler):
    """Sends warnings about records to the viewers of the sweep instead of the controller's log."""

    def __init__(self, sweep: SweepPaths) -> None:
        super().__init__()
        self._sweep = sweep

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            tell(self._sweep, "warning", text=record.getMessage().removeprefix("warning: "))


def _names(lease: slots.Lease) -> list[str]:
    return [slot.visible or slot.name.removeprefix("core") for slot in lease.slots]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.launch.controller")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--entry", default=ENTRY)
    parser.add_argument("--viewer", type=int, default=None, help="end when this process does, unless asked to detach")
    arguments = parser.parse_args(argv)
    sweep = SweepPaths(arguments.folder)

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    os.umask(0o077)  # only the user can read the files, also if a notebook started the controller
    signal.signal(signal.SIGTERM, stop)
    with only_controller(sweep) as alone:
        if not alone:
            return TAKEN
        write_json_atomic(sweep.controller, {"pid": os.getpid(), "started": started(os.getpid())})
        began = started(arguments.viewer) if arguments.viewer is not None else None
        viewer = (arguments.viewer, began or "") if arguments.viewer is not None else None
        record_file.logger.addHandler(_Warnings(sweep))
        record_file.logger.propagate = False
        try:
            Controller(sweep, arguments.entry, viewer).run()
        except KeyboardInterrupt:
            with signals_ignored():
                return 130
        except (BadRecord, OSError) as error:
            print(f"error: {explained(error)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
