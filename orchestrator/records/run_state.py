"""How a point stands and how it ends: one enum, the moves between its members, and what each end means."""

from __future__ import annotations

from enum import Enum


class RunState(str, Enum):
    """Where a point, or one attempt at it, stands. Each member's comment is what a person is told."""

    queued = "queued"  # waits for its slots, or in a scheduler's queue; a requeued job waits again
    starting = "starting"  # its processes are started
    running = "running"  # all its ranks said so
    ok = "ok"  # measured
    tight = "tight"  # measured, so close to the memory's end that the allocator had to free and try again
    oom = "oom"  # the device's memory was not enough
    oom_host = "oom_host"  # the machine's memory was not enough: the kernel or the scheduler killed a rank
    error = "error"  # a rank raised, or ended without finishing
    hang = "hang"  # a rank kept the others waiting in a collective
    timeout = "timeout"  # its time limit passed
    preempted = "preempted"  # the scheduler took the machine back; it goes on from its checkpoint when started again
    cancelled = "cancelled"  # somebody stopped it
    refused = "refused"  # breaks a rule: it was never started
    pruned = "pruned"  # cannot fit by the arithmetic, or by what a smaller one of its family met: never started
    cached = "cached"  # measured before under the same identity
    lost = "lost"  # whoever watched it is gone, and nothing tells how it ended

    @classmethod
    def _missing_(cls, value: object) -> RunState | None:
        """Records of before this enum say "killed" of what nobody could tell more of."""
        return cls.lost if value == "killed" else None

    @property
    def final(self) -> bool:
        """Whether nothing more will come of it by itself."""
        return not MOVES[self]

    @property
    def measured(self) -> bool:
        """Whether it has a result."""
        return self in (RunState.ok, RunState.tight, RunState.cached)

    @property
    def answered(self) -> bool:
        """Whether it answers its question. Not to fit in memory is an answer too."""
        return self.measured or self in (RunState.oom, RunState.oom_host, RunState.refused, RunState.pruned)

    @property
    def kept(self) -> bool:
        """Whether the same command again leaves it as it is; `--retry` names those to try once more."""
        return self in ENDS_OF_A_RUN and self not in (RunState.preempted, RunState.cancelled, RunState.lost)


DECIDED = frozenset({RunState.refused, RunState.pruned, RunState.cached})
ENDS_OF_A_RUN = frozenset(RunState) - DECIDED - {RunState.queued, RunState.starting, RunState.running}
RETRIED = tuple(one.value for one in RunState if one in ENDS_OF_A_RUN and not one.measured)
MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.queued: frozenset({RunState.starting, RunState.error, RunState.cancelled, RunState.lost}),
    # A requeued job is queued again; one that ended between two looks was never seen running.
    RunState.starting: ENDS_OF_A_RUN | {RunState.running, RunState.queued},
    RunState.running: ENDS_OF_A_RUN | {RunState.queued},
    **dict.fromkeys(ENDS_OF_A_RUN | DECIDED, frozenset()),
}
