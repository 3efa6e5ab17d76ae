"""The states of a point, the transitions between them, and what each final state means."""

from __future__ import annotations

from enum import Enum


class RunState(str, Enum):
    """The state of a point or of one attempt at it. The comments say what each state means to the user."""

    queued = "queued"  # waits for its slots, or in the queue of a scheduler, to which a requeued job returns
    starting = "starting"  # its processes are being started
    running = "running"  # all its ranks have reported that they run
    ok = "ok"  # measured
    tight = "tight"  # measured, but so close to the limit of memory that the allocator had to free and retry
    oom = "oom"  # the memory of the device was not enough
    oom_host = "oom_host"  # the memory of the machine was not enough: the kernel or the scheduler killed a rank
    error = "error"  # a rank raised an exception, or exited before it had finished
    hang = "hang"  # a rank kept the others waiting in a collective
    timeout = "timeout"  # it reached its time limit
    preempted = "preempted"  # the scheduler took the machine back; the next start resumes from the checkpoint
    cancelled = "cancelled"  # stopped by the user
    refused = "refused"  # breaks a rule, so it was never started
    pruned = "pruned"  # cannot fit, as predicted or as shown by a smaller point of its family; never started
    cached = "cached"  # already measured under the same identity
    lost = "lost"  # the process that watched it is gone, and nothing records how it ended

    @property
    def final(self) -> bool:
        """Whether the state is final: no transition leads out of it."""
        return not MOVES[self]

    @property
    def measured(self) -> bool:
        """Whether there is a result."""
        return self in (RunState.ok, RunState.tight, RunState.cached)

    @property
    def answered(self) -> bool:
        """Whether the point's question is answered. That it does not fit into memory is an answer too."""
        return self.measured or self in (RunState.oom, RunState.oom_host, RunState.refused, RunState.pruned)

    @property
    def kept(self) -> bool:
        """Whether repeating the command keeps this outcome; `--retry` names outcomes to run again.

        Errors are kept too: a repeated command asks for what is missing, and the same error would probably occur again.
        """
        return self in ENDS_OF_A_RUN and self not in (RunState.preempted, RunState.cancelled, RunState.lost)


DECIDED = frozenset({RunState.refused, RunState.pruned, RunState.cached})
ENDS_OF_A_RUN = frozenset(RunState) - DECIDED - {RunState.queued, RunState.starting, RunState.running}
RETRIED = tuple(one.value for one in RunState if one in ENDS_OF_A_RUN and not one.measured)
MOVES: dict[RunState, frozenset[RunState]] = {
    # A single run that cannot fit is pruned when its attempt exists; in a sweep such a point has none.
    RunState.queued: frozenset({RunState.starting, RunState.error, RunState.cancelled, RunState.lost, RunState.pruned}),
    # A requeued job is queued again. A job that ended between two checks was never seen running.
    RunState.starting: ENDS_OF_A_RUN | {RunState.running, RunState.queued},
    RunState.running: ENDS_OF_A_RUN | {RunState.queued},
    **dict.fromkeys(ENDS_OF_A_RUN | DECIDED, frozenset()),
}
