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

from orchestrator.config.schema import CheckpointKind, Device, from_dict
from orchestrator.launch.lane import Lane, too_large_together
from orchestrator.launch.local_run import PointRun
from orchestrator.launch.rank import ENTRY
from orchestrator.launch.verdict import Verdict
from orchestrator.machine import hardware, slots
from orchestrator.machine.processes import is_alive, signals_ignored, started
from orchestrator.planning import decision
from orchestrator.planning.point import Point
from orchestrator.records import record_file
from orchestrator.records.record_file import BadRecord, EventTail, explained, read_or_warn, write_json_atomic
from orchestrator.records.record_shapes import REQUESTS
from orchestrator.records.run_record import new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import TAKEN, Planned, SweepPaths, only_controller, plan_of, tell
from orchestrator.report import comparison
from orchestrator.rounds.order import TurnOrder
from orchestrator.tracking.feed import Tracker, start_tracker

LOOK_S = 0.1
IDLE_LOOK_S = 2.0  # for ranks that wait for their turn: looking at many of them would be a load of its own
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
        self._lanes: list[Lane] = []
        self._sessions = 0
        self._alone: set[str] = set()  # points that are measured without the ranks of others beside them
        self._pools: dict[Device, slots.SlotPool] = {}
        self._requests = EventTail(sweep.requests, REQUESTS)
        self._failures: list[str] = []
        self._tracker = Tracker()

    def run(self) -> None:
        """Returns when no point waits or runs. No process of the sweep is left then, nor after an interrupt."""
        if self._waiting:
            config = self._configs[self._waiting[0].label]
            self._tracker = start_tracker(config, self._sweep.output, self._sweep)
            self._tracker.wait_for_store()
        try:
            while self._waiting or self._lanes:
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
            for lane in self._lanes:
                lane.lease.release()
            # The tracker only reads the sweep's folder: if it is killed, it leaves no half-written file there.
            comparison.write(self._sweep, with_png=self._tracker.pid is not None)
        finally:
            self._tracker.close()
        for warning in self._tracker.warnings():
            tell(self._sweep, "warning", text=warning)
        tell(self._sweep, "end")

    # ---- requests from other commands ---------------------------------------------------------------------------

    def _hear_requests(self) -> None:
        for request in self._requests.read_new():
            if request["do"] == "detach":
                self._viewer = None
            elif request["do"] == "drain":
                self._drop(self._waiting, "the queue was dropped")
            elif request["do"] == "cancel":
                self._cancel("by request", request.get("labels"))
        if self._viewer is not None and not is_alive(*self._viewer):
            self._cancel("the terminal that it ran in was closed")

    def _cancel(self, why: str, labels: Sequence[str] | None = None) -> None:
        """Cancels the running and waiting points; with `labels`, only those points."""
        dropped = [point for point in self._waiting if labels is None or point.label in labels]
        with contextlib.ExitStack() as ends:  # if one end cannot be recorded, as on a full disk, the others still end
            for lane in self._lanes:
                for label in [label for label in lane.order.names if labels is None or label in labels]:
                    ends.callback(self._stop, lane, label, why)
            ends.callback(self._drop, dropped, why)

    def _stop(self, lane: Lane, label: str, why: str) -> None:
        """Ends a point of a lane. One that waits for its next turn without ranks keeps what it has measured."""
        run = lane.runs.get(label)
        try:
            if run is not None:
                run.cancel(why)
        finally:
            lane.leave(label)
        if run is not None:
            tell(self._sweep, "ended", label=label, attempt=str(run.attempt.paths.root), slots=[])

    def _drop(self, planned: Sequence[Planned], why: str, state: RunState = RunState.cancelled) -> None:
        for point in list(planned):
            self._waiting.remove(point)
            tell(self._sweep, "decided", label=point.label, state=state.value, reason=why)

    # ---- running points ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        for lane in list(self._lanes):
            due = time.monotonic() - lane.looked_at > IDLE_LOOK_S
            lane.looked_at = time.monotonic() if due else lane.looked_at
            for label, run in list(lane.runs.items()):
                if label != lane.active and not due:
                    continue
                run.new_events()
                verdict = run.look()
                if verdict is not None:
                    self._ended(lane, label, run, verdict)
                elif lane.active == label and run.waits:
                    lane.end_turn()
            self._next_turn(lane)
            if not lane.order.names:
                lane.lease.release()
                self._lanes.remove(lane)

    def _ended(self, lane: Lane, label: str, run: PointRun, verdict: Verdict) -> None:
        """The ranks of a point have ended, in its turn or while it waited."""
        if lane.active == label:
            lane.end_turn()
        del lane.runs[label]
        tell(self._sweep, "ended", label=label, attempt=str(run.attempt.paths.root), slots=lane.names)
        # Where ranks do not stay alive, each turn is an attempt: the point goes on in its next one.
        if verdict.state.measured and lane.goes_on(label, run.attempt):
            lane.attempts[label] = run.attempt
            return
        planned, is_crowded = lane.points[label], bool(lane.runs)
        lane.leave(label)
        if verdict.state in (RunState.oom, RunState.oom_host) and is_crowded:
            # The ranks that wait hold memory too, so this says nothing of the point alone.
            self._alone.add(label)
            self._waiting.append(planned)
            tell(self._sweep, "warning", text=f"{label} was out of memory beside the ranks of other points, which wait "
                 "for their turns: it is measured once more without them")  # fmt: skip
            return
        self._learn(planned, verdict.state, verdict.message)

    def _next_turn(self, lane: Lane) -> None:
        """Lets the next point of the lane run, unless one runs. A point that was dropped meanwhile is passed over."""
        while lane.active is None and (label := lane.order.next()) is not None:
            planned, run = lane.points[label], lane.runs.get(label)
            if run is not None:
                lane.active = label
                run.grant_turn([other.session for other in lane.runs.values() if other is not run])
            elif planned in self._waiting or label in lane.attempts:
                lane.active = label
                self._begin(lane, planned)
            else:
                lane.leave(label)

    def _learn(self, planned: Planned, state: RunState, message: str) -> None:
        """Drops waiting points after a failure: larger points after out of memory, all after repeated failures."""
        if state in (RunState.oom, RunState.oom_host) and self._prune:
            larger = [point for point in self._waiting if decision.outgrown(point, planned.config)]
            self._drop(larger, decision.smaller_failed(planned.label), RunState.pruned)
        self._failures = [*self._failures, message][-SAME_FAILURES:] if state is RunState.error else []
        if len(self._failures) == SAME_FAILURES and len(set(self._failures)) == 1:
            self._drop(self._waiting, f"{SAME_FAILURES} points in a row failed in the same way: {message}")

    def _start(self) -> None:
        """Opens a lane for every waiting point whose slots are free, in plan order; in exclusive mode, one at a time.

        Points that are measured in rounds share lanes, so that they take turns.
        """
        too_many: dict[Device, int] = {}  # per device, a number of slots that was not free in this call
        for planned in list(self._waiting):
            if self._exclusive and self._lanes:
                return
            if planned not in self._waiting or self._is_in_lane(planned.label):
                continue
            if planned.label in self._alone and self._lanes:
                continue  # until the ranks of all others have ended
            device = self._configs[planned.label].resources.device
            pool = self._pool_of(device)
            mates, count = self._mates(planned, pool)
            # Points that need fewer slots overtake one that waits for more: slots that stand idle measure nothing.
            if count >= too_many.get(device, count + 1):
                continue
            lease = pool.take(count)
            if lease is None:
                too_many[device] = count
                self._tell_waiting(pool)
                continue
            busy = slots.busy_gpus(lease.slots) if lease.gpus is not None else []
            if busy:
                lease.release()
                self._drop(mates, f"its GPUs are in use: {'; '.join(busy)}; end those, or leave the GPUs out of "
                           "CUDA_VISIBLE_DEVICES")  # fmt: skip
                continue
            lane = self._lane(mates, lease)
            self._lanes.append(lane)
            self._next_turn(lane)

    def _mates(self, planned: Planned, pool: slots.SlotPool) -> tuple[list[Planned], int]:
        """The waiting points that take turns with this one on the same slots, itself included, and how many slots they
        need. If there are GPUs for several lanes, the points are divided among them."""
        own = self._configs[planned.label]
        if not self._takes_turns(planned):
            return [planned], slots.wanted(own.resources)
        free = [point for point in self._waiting if self._takes_turns(point) and not self._is_in_lane(point.label)]
        kind = own.resources.device, own.measure.rounds
        configs = [(point, self._configs[point.label]) for point in free]
        group = [point for point, one in configs if (one.resources.device, one.measure.rounds) == kind]
        count = max(slots.wanted(self._configs[point.label].resources) for point in group)
        # Points on the same cores' memory and caches would be a load to each other; GPUs are apart.
        is_alone = self._exclusive or own.resources.device is Device.cpu
        room = 1 if is_alone else max(1, len(pool.slots) // max(count, 1))
        return group[: -(-len(group) // room)], count

    def _is_in_lane(self, label: str) -> bool:
        return any(label in lane.order.names for lane in self._lanes)

    def _takes_turns(self, planned: Planned) -> bool:
        return self._configs[planned.label].measure.rounds > 1 and planned.label not in self._alone

    def _lane(self, points: Sequence[Planned], lease: slots.Lease) -> Lane:
        why = too_large_together(points) if len(points) > 1 else ""
        saving = [point for point in points if self._configs[point.label].checkpoint.kind is not CheckpointKind.none]
        if why and saving:  # an attempt would go on from the checkpoint of the one before
            points = saving[:1]
            text = f"{points[0].label} takes no turns with other points, because it saves checkpoints and {why}"
            tell(self._sweep, "warning", text=text)
        elif why:
            text = f"the ranks of {len(points)} points are started again for each round, because {why}"
            tell(self._sweep, "warning", text=text)
        self._sessions += 1
        session = f"{self._sweep.name} {os.getpid()} {time.time():.0f} {self._sessions}"
        return Lane(
            lease,
            {point.label: point for point in points},
            TurnOrder([point.label for point in points]),
            session,
            warm=not why,
            rounds=self._configs[points[0].label].measure.rounds,
        )

    def _pool_of(self, device: Device) -> slots.SlotPool:
        if device not in self._pools:
            self._pools[device] = slots.pool_of(device, f"sweep {self._sweep.name}")  # asks nvidia-smi
        return self._pools[device]

    def _tell_waiting(self, pool: slots.SlotPool) -> None:
        """Tells now and then that the sweep waits for slots of another command."""
        if not self._lanes and (text := pool.waiting_text()):
            tell(self._sweep, "slots", text=text)

    def _begin(self, lane: Lane, planned: Planned) -> None:
        """Starts the ranks of a point in its lane."""
        label, config = planned.label, self._configs[planned.label]
        if planned in self._waiting:
            self._waiting.remove(planned)
        attempt = new_attempt(
            self._sweep.output, planned.config, label, hardware.detect().name(config.resources.device)
        )
        where = {"label": label, "attempt": str(attempt.paths.root), "slots": lane.names}
        tell(self._sweep, "started", **where)
        try:
            lane.prepare(label, attempt)
            gpus = None if lane.lease.gpus is None else lane.lease.gpus[: slots.wanted(config.resources)]
            run = PointRun(Point(label, config, planned.overrides), attempt, self._entry, gpus, len(lane.points))
        except Exception as error:  # this point is lost, the others continue
            attempt.move(RunState.error, rank=0, message=f"could not be started: {type(error).__name__}: {error}")
            lane.leave(label)
            tell(self._sweep, "ended", **where)
            return
        lane.runs[label] = run


class _Warnings(logging.Handler):
    """Sends warnings about records to the viewers of the sweep instead of the controller's log."""

    def __init__(self, sweep: SweepPaths) -> None:
        super().__init__()
        self._sweep = sweep

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            tell(self._sweep, "warning", text=record.getMessage().removeprefix("warning: "))


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
