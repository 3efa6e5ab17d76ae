"""Decides from the ranks' notes which ranks are to blame for a hang. Pure functions.

A slow rank is not an error: a verdict without culprits only describes which rank the others wait for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from zero_runtime.watch.journal import Op, RankPosition


class RankStatus(str, Enum):
    """The status of a rank."""

    RUNNING = "running"
    LEFT = "left"  # it ended normally
    FAILED = "failed"  # it raised an error and reported it
    BLAMES = "blames"  # it raised an error that blames another rank
    GONE = "gone"  # its process no longer exists
    STOPPED = "stopped"  # a signal stopped its process
    SILENT = "silent"  # it does not answer


_ABSENT = {
    RankStatus.GONE: "is gone: its process ended without a word (killed, out of memory on this machine, or aborted)",
    RankStatus.STOPPED: "is stopped by a signal (SIGSTOP or a debugger)",
    RankStatus.SILENT: "stopped answering",
}
_SAME = (
    "Expected every rank to issue the same collectives in the same order; make what decides them (the model, the "
    "number of calls, anything under `if rank`) equal on all ranks"
)
OTHERS = "engine"
_SKIPPED = "; if some ranks skip a module in some batches, declare it: zero_runtime.optional_modules(model, [module])"


@dataclass(frozen=True)
class Note:
    """The known state of one rank. `idle_s`: seconds since its working thread last wrote to the journal.

    others: collectives that code besides ours has issued, which the journal does not have; 0 if nobody counts them.
    """

    rank: int
    standing: RankStatus
    place: RankPosition | None = None
    ops: list[Op] = field(default_factory=list)
    idle_s: float = 0.0
    stack: str = ""
    error: str = ""
    others: int = 0

    @property
    def waited(self) -> Op | None:
        """The collective that the rank waits for: its working thread, or else its device."""
        if self.place is None:
            return None
        sequence = self.place.waiting or self.place.under_way
        return next((op for op in self.ops if op.sequence == sequence), None)

    def numbers(self) -> dict[str, int]:
        """The number of the last collective, by channel."""
        return {op.channel: op.number for op in self.ops} | ({OTHERS: self.others} if self.others else {})

    def lacks(self, numbers: Mapping[str, int]) -> str:
        """The name of the first of these collectives that the rank has not issued; empty if it has issued all."""
        own = self.numbers()
        return next((f"{name} {number}" for name, number in numbers.items() if own.get(name, 0) < number), "")

    @property
    def is_waiting(self) -> bool:
        """Whether the working thread waits for a collective; it issues no other meanwhile."""
        return self.place is not None and self.place.waiting > 0

    @property
    def device_waits(self) -> bool:
        return self.place is not None and self.place.under_way > 0

    def dump(self) -> str:
        """JSON for the store."""
        return json.dumps({**vars(self), "standing": self.standing.value})

    @classmethod
    def load(cls, text: bytes) -> Note:
        values = json.loads(text)
        place = None if values["place"] is None else RankPosition(*values["place"])
        ops = [Op(*op) for op in values["ops"]]
        return cls(**{**values, "standing": RankStatus(values["standing"]), "place": place, "ops": ops})

    def where(self) -> str:
        """A short description of the rank's position."""
        if self.place is None:
            return "unknown"
        unit = f", unit {self.place.unit}" if self.place.unit else ""
        text = f"step {self.place.step}, {self.place.phase}{unit}"
        if self.waited is not None:
            who = "" if self.is_waiting else "the device "
            return f"{text}, {who}in collective {self.waited.name}: {self.waited}"
        return f"{text}, in no collective; the last was {self.ops[-1].name}: {self.ops[-1]}" if self.ops else text


@dataclass(frozen=True)
class Blame:
    """The ranks to blame, and the complete diagnosis. Without ranks, the text names the slow ranks or is empty.

    `hung`: the culprits are alive and keep others waiting.
    """

    ranks: tuple[int, ...]
    text: str
    hung: bool = False


class Patience(NamedTuple):
    """How long a living rank may stay away from a collective that others wait in; longer while it starts. In seconds.

    slow_s: how long a wait without progress may last before it counts as unusual.
    """

    slow_s: float
    stuck_s: float
    start_s: float

    def with_rank_in(self, place: RankPosition | None) -> float:
        return max(self.start_s, self.stuck_s) if place is not None and place.is_starting else self.stuck_s


def judge(notes: Sequence[Note], patience: Patience) -> Blame:
    """Look for causes, the most fundamental first: a reported error, collectives that differ, an absent rank, an early
    end, ranks that wait for each other, a stall, a broken connection."""
    failed = [note for note in notes if note.standing is RankStatus.FAILED]
    if failed:
        return _verdict(notes, failed, "; ".join(f"rank {note.rank} failed: {note.error}" for note in failed))
    deeds = (_difference(notes), _absence(notes), _early_end(notes), _crossed(notes, patience), _stall(notes, patience))
    for found in (*deeds, _device_stall(notes, patience)):
        if found is not None:
            return found
    troubled = [note for note in notes if note.error and note.standing is RankStatus.RUNNING]
    if troubled:
        # A connection broke although every rank is alive and the collectives agree.
        return _verdict(notes, troubled, f"rank {troubled[0].rank}: {troubled[0].error}")
    return Blame((), "")


def _difference(notes: Sequence[Note]) -> Blame | None:
    """The first collective that two ranks issued differently: of a channel, or of all if the ranks keep one order."""
    in_one_order = all(note.place is None or note.place.one_order for note in notes)
    by_name: dict[str, dict[int, Op]] = {}
    for note in notes:
        for op in note.ops:
            by_name.setdefault(str(op.sequence) if in_one_order else op.name, {})[note.rank] = op
    # In the order in which any rank issued them first.
    for name, ops in sorted(by_name.items(), key=lambda item: min(op.sequence for op in item[1].values())):
        if len({op.what for op in ops.values()}) > 1:
            return _split(notes, ops, {rank: op.what for rank, op in ops.items()}, f"differ in collective {name}")
    return None


def _crossed(notes: Sequence[Note], patience: Patience) -> Blame | None:
    """Every rank waits for a collective that another rank has not issued, so none can ever continue.

    With shard groups smaller than the world, the rank that has not issued a collective may not be one that the waiting
    rank needs. So that a long transfer is not mistaken for a deadlock, all ranks must have waited for slow_s.
    """
    running = [note for note in notes if note.standing is RankStatus.RUNNING]
    waited = {note.rank: op for note in running if (op := note.waited) is not None and note.idle_s >= patience.slow_s}
    missing = (any(note.numbers().get(op.channel, 0) < op.number for note in running) for op in waited.values())
    if len(waited) < len(running) or not waited or not all(missing):
        return None
    return _split(notes, waited, {rank: op.name for rank, op in waited.items()}, "wait for each other")


def _split(notes: Sequence[Note], ops: dict[int, Op], sides: Mapping[int, object], how: str) -> Blame:
    """Blame all sides but the largest; of equally large ones, the side with the lowest rank is not blamed.

    The text describes all sides.
    """
    members: dict[object, list[int]] = {}
    for rank in sorted(sides):
        members.setdefault(sides[rank], []).append(rank)
    usual = max(members.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = [note for note in notes if note.rank in sides and note.rank not in usual]
    told = "; ".join(f"{_ranks(ranks)} issued {ops[ranks[0]]}" for ranks in members.values())
    gathers = {op.kind for op in ops.values()} == {"all_gather"}
    return _verdict(notes, odd, f"the ranks {how}: {told}. {_SAME}{_SKIPPED if gathers else ''}")


def _absence(notes: Sequence[Note]) -> Blame | None:
    absent = [note for note in notes if note.standing in _ABSENT]
    if not absent:
        return None
    told = "; ".join(f"rank {note.rank} {_ABSENT[note.standing]}; seen last in {note.where()}" for note in absent)
    gone = any(note.standing is RankStatus.GONE for note in absent)
    return replace(_verdict(notes, absent, told), hung=not gone)


def _early_end(notes: Sequence[Note]) -> Blame | None:
    most = _most(notes)
    early = [note for note in notes if note.standing is RankStatus.LEFT and note.lacks(most)]
    if not early:
        return None
    told = "; ".join(f"rank {note.rank} ended while others go on to collective {note.lacks(most)}" for note in early)
    return _verdict(notes, early, f"{told}. {_SAME}")


def _stall(notes: Sequence[Note], patience: Patience) -> Blame | None:
    """Ranks that are alive, wait in no collective and keep others waiting."""
    awaited: dict[str, int] = {}
    for note in notes:
        if note.waited is not None:
            numbers = {note.waited.channel: note.waited.number}
        else:
            # A device may wait in a collective that is not polled: no progress for stuck_s counts as waiting.
            numbers = note.numbers() if note.idle_s >= patience.stuck_s else {}
        awaited |= {channel: max(number, awaited.get(channel, 0)) for channel, number in numbers.items()}
    running = [note for note in notes if note.standing is RankStatus.RUNNING and not note.is_waiting]
    behind = [note for note in running if note.lacks(awaited)]
    if not behind:
        return None
    late = "; ".join(f"rank {note.rank} has not come to it for {note.idle_s:.0f} s" for note in behind)
    text = f"others wait for collective {behind[0].lacks(awaited)}: {late}, it is in {behind[0].where()}"
    stuck = [note for note in behind if note.idle_s >= patience.with_rank_in(note.place)]
    if not stuck:
        return Blame((), _with_stacks(text, notes, behind))
    limit_s = patience.with_rank_in(stuck[0].place)
    setting = "stuck_s" if limit_s == patience.stuck_s else "start_s"
    told = f"{text}, expected within {limit_s:g} s ({setting} of the watch)"
    return replace(_verdict(notes, stuck, told), hung=True)


def _device_stall(notes: Sequence[Note], patience: Patience) -> Blame | None:
    """Every rank has issued the collective that its device waits in, yet none completes.

    A link, a device or NCCL hangs. Which one cannot be seen from the hosts, so all ranks are blamed.
    """
    running = [note for note in notes if note.standing is RankStatus.RUNNING]
    if not running or not all(note.device_waits for note in running):
        return None
    idle_s = min(note.idle_s for note in running)
    limit_s = max(patience.with_rank_in(note.place) for note in running)
    if idle_s < patience.slow_s:
        return None
    text = f"no device has completed the collective that it is in for {idle_s:.0f} s, and every rank has issued it"
    if idle_s < limit_s:
        return Blame((), _with_stacks(text, notes, running[:1]))
    told = f"{text}, expected within {limit_s:g} s; a device, a link or NCCL hangs (NCCL_DEBUG=INFO tells more)"
    return replace(_verdict(notes, running, told), hung=True)


def _most(notes: Sequence[Note]) -> dict[str, int]:
    most: dict[str, int] = {}
    for note in notes:
        most |= {channel: max(number, most.get(channel, 0)) for channel, number in note.numbers().items()}
    return most


def _verdict(notes: Sequence[Note], culprits: Sequence[Note], text: str) -> Blame:
    return Blame(tuple(note.rank for note in culprits), _with_stacks(text, notes, culprits))


def _with_stacks(text: str, notes: Sequence[Note], culprits: Sequence[Note]) -> str:
    """The text, then the position and stack of one other rank and, last, of up to four culprits.

    The culprits come last because readers of an error or a log see its end first.
    """
    others = [note for note in notes if note not in culprits]
    witnesses = sorted(others, key=lambda note: (not note.is_waiting, not note.stack))[:1]
    parts = [text]
    for note in [*witnesses, *culprits[:4]]:
        parts.append(f"--- rank {note.rank} ({note.standing.value}): {note.where()}")
        parts.append(note.stack.rstrip() or "    (no stack: the process could not be asked)")
    return "\n".join(parts)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
