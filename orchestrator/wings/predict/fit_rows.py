"""Which settings of a model fit onto a GPU, and with how large a micro-batch: the rows of `zlab fit`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from orchestrator.config.schema import Device, LossKind, RunConfig
from orchestrator.text.units import size
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict.moments import all_moments, met, on_device, worst
from orchestrator.wings.predict.speed import Speed, speed_of
from orchestrator.wings.predict.step import ConfigMemory, with_micro
from orchestrator.wings.predict.target import Target
from zero_runtime.predict.memory.counted_unit import (
    COMPONENTS,
    GATHERED,
    GRADS,
    OPTIMIZER,
    PARAMS,
    TRANSFERS,
    WHOLE_GRADS,
)
from zero_runtime.predict.memory.device_overhead import NO_OVERHEAD, DeviceOverhead
from zero_runtime.predict.memory.reserved import Reserved
from zero_runtime.predict.memory.step_memory import Peak

STATES = {
    PARAMS: "parameters",
    OPTIMIZER: "optimizer",
    GRADS: "gradients",
    GATHERED: "gathered parameters",
    WHOLE_GRADS: "unreduced gradients",
    TRANSFERS: "shards in transfer",
}
BLOCKS, OUTSIDE, BACKWARD = "blocks", "head and loss", "backward"
INPUTS, BUFFERS = "token ids", "buffers"
# How much each kind computes again in the backward.
RECOMPUTED = {"none": 0, "by_operation": 1, "every_nth": 1, "full": 2}


@dataclass(frozen=True)
class Fit:
    """One configuration on one kind of node.

    group: the settings other than those that are compared with each other; rows of different groups do not exclude each
    other. limit_bytes: the memory that a rank may allocate from; overhead: what libraries take of it. micro: the
    largest micro-batch that fits with the most that they take; 0 if none does. tight: whether its tensors fit, but not
    what torch's allocator reserves for them; None until `settled` has asked, and `micro` is then the most that may fit.
    most_micro: the largest whose tensors fit with the least that libraries take. given: the only micro-batch that was
    asked for, if one was. capped: every traced micro-batch fits. peak: of the worst moment at `counted`.
    host_bytes, scratch_bytes: of one rank at that micro-batch, offloaded and for the copy of the last save.
    host_limit_bytes: host memory of a node with `ranks_per_node` ranks; None if it is not known, or is what the ranks
    compute in. plain: the same without its offload, if it was asked for.
    """

    label: str
    overrides: tuple[str, ...]
    group: tuple[str, ...]
    memory: ConfigMemory
    limit_bytes: int
    overhead: DeviceOverhead
    micro: int
    most_micro: int
    capped: bool
    peak: Peak
    host_bytes: int
    scratch_bytes: int
    sent_bytes: int
    ranks_per_node: int = 1
    host_limit_bytes: int | None = None
    given: int = 0
    plain: Fit | None = None
    tight: bool | None = None

    @property
    def counted(self) -> int:
        """The micro-batch that the bytes are of: the one that was asked for, else the largest that fits, or 1."""
        return self.given or max(self.micro, 1)

    @property
    def resting_bytes(self) -> int:
        """Bytes of the tensors that exist between two steps."""
        part = self.memory.part(self.counted)
        assert part is not None, "a row has the trace of its micro-batch"
        return part.peaks.between_steps + part.buffers

    @property
    def verdict(self) -> str:
        """Whether the micro-batch that was asked for fits: yes, tight (the tensors do, but not all that the allocator
        reserves for them), perhaps (if libraries take the least), or no."""
        if not self.micro:
            return "perhaps" if self.most_micro else "no"
        return "tight" if self.reserved is not None and self.used_bytes[1] > self.limit_bytes else "yes"

    @property
    def config(self) -> RunConfig:
        return self.memory.config

    def speed(self, hardware: str) -> Speed | None:
        """The predicted speed at the largest micro-batch, on this machine (`hardware`) or on described hardware; None
        also if none fits."""
        if not self.micro:
            return None
        return speed_of(replace(self.memory, config=with_micro(self.config, self.micro)), hardware)

    @cached_property
    def reserved(self) -> Reserved | None:
        """What torch's allocator, with expandable segments as in runs, reserves on a GPU; None on a CPU. It replays
        every tensor of three steps, so that only rows that are shown should ask."""
        if self.config.resources.device is not Device.cuda:
            return None
        found = self.memory.reserved(self.counted, self._room)
        return self.memory.reserved(self.counted) if found is None or found.reserved > self._room else found

    @property
    def used_bytes(self) -> tuple[int, int]:
        """The memory of the device in use at the peak, with the least and with the most that libraries take: what the
        allocator reserves for the tensors, on a CPU the tensors alone. The most must be within `limit_bytes`."""
        held = self.peak.total if self.reserved is None else self.reserved.reserved
        return held + self.overhead.least, held + self.overhead.most

    @property
    def _room(self) -> int:
        return self.limit_bytes - self.overhead.most

    @property
    def _has_room(self) -> bool:
        """Whether `used_bytes` are within the limit; a replay ends as soon as they are not."""
        if self.config.resources.device is not Device.cuda:
            return self.peak.total <= self._room
        found = self.memory.reserved(self.counted, self._room)
        return found is not None and found.reserved <= self._room

    def at(self, micro: int) -> Fit:
        """The row with another traced micro-batch."""
        if micro == self.counted:
            return self
        memory, peak = replace(self.memory, config=with_micro(self.config, micro)), self.memory.peak(micro)
        assert peak is not None, "the micro-batch was traced"
        host = self.host_bytes + memory.host_bytes(micro) - memory.host_bytes(self.counted)
        sent = memory.sent_bytes()
        return replace(self, micro=micro, capped=False, peak=peak, host_bytes=host, sent_bytes=sent, tight=None)

    def settled(self) -> Fit:
        """The row at the largest micro-batch for which the allocator has room too, or, if it has for none, at 1 and
        tight. A larger one reserves more. See `used_bytes`: it replays steps, so only rows that count should ask."""
        if self.tight is not None or not self.micro:
            return self
        low, high, middle = self.micro - 1 if self.given else 0, self.micro + 1, self.micro
        while high - low > 1:
            fits = self.at(middle)._has_room
            low, high = (middle, high) if fits else (low, middle)
            middle = (low + high) // 2
        micro = self.given or max(low, 1)
        return replace(self.at(micro), tight=low < micro)

    @property
    def sent_per_token(self) -> float:
        """Bytes that all ranks send for a token of a step."""
        config = with_micro(self.config, self.counted)
        return self.sent_bytes * config.ranks / (config.batch.global_size * sample_of(config).tokens)

    @property
    def needless(self) -> str:
        """That the offload is not needed at the smallest micro-batch; empty if it is, or if that was not asked."""
        if self.plain is None or not self.plain.micro or self.plain.tight:
            return ""
        used = size(self.plain.at(1).used_bytes[1])
        fitting = "is the largest that fits" if self.plain.micro == 1 else f"up to {self.plain.micro} fit"
        return f"micro-batch 1 uses {used} of {size(self.limit_bytes)} without it, and {fitting}"

    @property
    def binds(self) -> str:
        """The largest part of the peak, in words."""
        name, _ = max(parts(self.peak), key=lambda part: part[1])
        return name

    @property
    def host_of_node(self) -> int:
        """Bytes that all ranks of a node keep in its host memory."""
        return self.host_bytes * self.ranks_per_node

    @property
    def host_unknown(self) -> bool:
        """Whether the row needs host memory of a described node, of which it is not known how much there is."""
        is_compared = self.host_limit_bytes is not None or self.config.resources.device is not Device.cuda
        return self.host_bytes > 0 and not is_compared

    @property
    def host_lacks(self) -> bool:
        """Whether a node has not enough host memory for what its ranks keep there in steps."""
        return self.host_limit_bytes is not None and self.host_of_node > self.host_limit_bytes

    @property
    def reason(self) -> str:
        """Why no micro-batch is sure to fit; empty if one is."""
        if self.micro:
            return ""
        if self.host_lacks:
            kept = f"{self.ranks_per_node} x {size(self.host_bytes)}"
            return f"keeps {kept} = {size(self.host_of_node)} in a node's host memory of {size(self.host_limit_bytes)}"
        if self.used_bytes[1] <= self.limit_bytes and (outside := self._outside_reason):
            return outside
        _, largest = max(parts(self.peak), key=lambda part: part[1])
        used = f"micro-batch {self.counted} uses up to {size(self.used_bytes[1])} of {size(self.limit_bytes)}"
        return f"{used}, most of it {self.binds} ({size(largest)})"

    @property
    def _outside_reason(self) -> str:
        """The moment outside of steps that a run meets and that does not fit; empty if all do."""
        shared = self.config.resources.device is not Device.cuda
        moments = met(self.memory).outside
        if (most := worst(moments, shared=shared)) is not None:
            needed = on_device(most, shared=shared) + self.overhead.most
            if needed > self.limit_bytes:
                return f"{most.name} uses up to {size(needed)} of {size(self.limit_bytes)} ({most.why})"
        host = max(moments, key=lambda one: one.host, default=None)
        if host is None or self.host_limit_bytes is None or host.host * self.ranks_per_node <= self.host_limit_bytes:
            return ""
        of_node = f"{self.ranks_per_node} x {size(host.host)}"
        return f"{host.name} uses {of_node} of a node's host memory of {size(self.host_limit_bytes)} ({host.why})"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        return {
            "label": self.label,
            "overrides": list(self.overrides),
            "ranks": self.config.resources.ranks,
            "tp": self.config.parallel.tp,
            "sp": self.config.parallel.sp,
            "micro": self.micro,
            "micro_at_most": self.most_micro,
            "micro_capped": self.capped,
            "micro_counted": self.counted,
            "reason": self.reason,
            "offload_needless": self.needless,
            "limit_bytes": self.limit_bytes,
            "used_bytes_least": self.used_bytes[0],
            "used_bytes_most": self.used_bytes[1],
            "resting_bytes": self.resting_bytes,
            "peak_bytes": self.peak.total,
            "fits": self.verdict,
            "reserved_bytes": self.reserved and self.reserved.reserved,
            "peak_when": self.peak.when,
            "peak_parts_bytes": dict(parts(self.peak)),
            "binds": self.binds,
            "host_bytes_per_rank": self.host_bytes,
            "host_bytes_per_node": self.host_of_node,
            "host_limit_bytes_per_node": self.host_limit_bytes,
            "scratch_bytes_per_rank": self.scratch_bytes,
            "sent_bytes_per_step": self.sent_bytes,
            "outside_step_bytes": {
                moment.name: {"device": moment.device, "host": moment.host} for moment in all_moments(self.memory)
            },
        }


def parts(peak: Peak) -> list[tuple[str, int]]:
    """What the peak consists of, in words, without parts of no bytes."""
    found = [(STATES[name], peak.states.get(name, 0)) for name in COMPONENTS]
    found += [(name, count) for name, count in peak.states.items() if name not in STATES]  # terms of another engine
    found += [(BLOCKS, peak.blocks), (OUTSIDE, peak.outside), (BACKWARD, peak.backward)]
    found += [(INPUTS, peak.inputs), (BUFFERS, peak.buffers)]
    return [(name, count) for name, count in found if count]


def fit_of(
    label: str,
    overrides: Sequence[str],
    memory: ConfigMemory,
    target: Target,
    overhead: DeviceOverhead = NO_OVERHEAD,
    group: Sequence[str] = (),
    *,
    given: int = 0,
) -> Fit | None:
    """How large a micro-batch of the configuration fits; None if its activations could not be counted.

    target.device_bytes must be known. given: the only micro-batch that is asked about; 0 for the largest.
    """
    assert target.device_bytes is not None
    limit = target.device_bytes // target.ranks_share
    # The host's memory is compared where it is not what the ranks compute in.
    host_limit = target.host_bytes if target.device is Device.cuda else None
    room = _Room(memory, limit, target.ranks_per_node, host_limit, shared=target.device is not Device.cuda)
    micro, most = (room.largest(taken) for taken in (overhead.most, overhead.least))
    if given:  # what fits a larger one fits it too
        micro, most = (given if one >= given else 0 for one in (micro, most))
    counted = given or max(micro, 1)
    peak = memory.peak(counted)
    if peak is None:
        return None
    sent = replace(memory, config=with_micro(memory.config, counted)).sent_bytes()
    fits = (micro, most, not given and micro == memory.highest_traced)
    sizes = (peak, room.host_bytes(counted), memory.away().scratch, sent, target.ranks_per_node, host_limit)
    row = (label, tuple(overrides), tuple(group), memory, limit, overhead, *fits, *sizes, given)
    return Fit(*row)


class _Room:
    """Which micro-batches of a configuration fit. limit: bytes that a rank may use. host_limit: bytes of a node's host
    memory, for `ranks` ranks; None if it is not compared. shared: the ranks compute in host memory."""

    def __init__(self, memory: ConfigMemory, limit: int, ranks: int, host_limit: int | None, *, shared: bool) -> None:
        self._memory, self._limit, self._ranks, self._host_limit = memory, limit, ranks, host_limit
        self._shared = shared
        self._outside, self._kept = met(memory)

    def largest(self, taken: int) -> int:
        """The largest micro-batch that fits if libraries take this much of the limit; 0 if none does, or if a moment
        outside of steps that the run meets does not."""
        room = self._limit - taken
        if any(on_device(one, shared=self._shared) > room for one in self._outside):
            return 0
        if any(self._exceeds(one.host) for one in self._outside):
            return 0
        micro = self._memory.largest(room - (self.host_bytes(1) if self._shared else 0))
        if micro == 0 or not self._exceeds(self.host_bytes(micro)):
            return micro
        fits, exceeds = 0, micro
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fits, exceeds = (fits, middle) if self._exceeds(self.host_bytes(middle)) else (middle, exceeds)
        return fits

    def host_bytes(self, micro: int) -> int:
        """Of a rank's host memory in steps with this micro-batch: offloaded, and the copy of the last save."""
        return self._memory.host_bytes(micro) + self._kept

    def _exceeds(self, host: int) -> bool:
        return self._host_limit is not None and host * self._ranks > self._host_limit


def order(fits: Sequence[Fit]) -> list[Fit]:
    """The rows that fit first, tight ones last of them, and among equals those whose step has the least to do in
    addition to the model's own work: copies to the host, then recomputation, then data to send for a token. With an
    offload the larger micro-batch first: the copies of a step are the same for any micro-batch. The rows of a machine
    are together."""
    nodes = list(dict.fromkeys(one.config.hardware for one in fits))
    return sorted(fits, key=lambda one: (nodes.index(one.config.hardware), *order_key(one)))


def order_key(fit: Fit) -> tuple[Any, ...]:
    """The key of `order`: (fits not, tight, kinds of offload, -micro-batch if there is one, recomputation, bytes
    sent for a token, -micro-batch, tiled loss)."""
    offloads = (fit.host_bytes > 0) + (fit.scratch_bytes > 0)
    recomputed, tiled = extra_work(fit.config)
    copied_for = -fit.micro if offloads else 0
    return (fit.micro == 0, bool(fit.tight), offloads, copied_for, recomputed, fit.sent_per_token, -fit.micro, tiled)


def extra_work(config: RunConfig) -> tuple[int, int]:
    """How much a step computes again, and whether its loss is tiled: what saves memory, not time."""
    return RECOMPUTED[str(config.recompute.kind)], int(config.loss.kind is LossKind.tiled)


def settled(fits: Sequence[Fit]) -> list[Fit]:
    """The rows, those of `best` settled, in the order of `order`. The others cannot replace them: what they are taken
    to fit is the most that they may."""
    while waiting := {one.label for one in best(fits) if one.tight is None}:
        fits = [one.settled() if one.label in waiting else one for one in fits]
    return order(fits)


def all_settled(fits: Sequence[Fit]) -> list[Fit]:
    """All rows settled, in the order of `order`."""
    return order([one.settled() for one in fits])


def surest(fits: Sequence[Fit]) -> list[Fit]:
    """The rows that fit for sure; the tight ones if there are no others."""
    fitting = [one for one in fits if one.micro]
    return [one for one in fitting if not one.tight] or fitting


def best(fits: Sequence[Fit]) -> list[Fit]:
    """The rows that fit, without each row for which another fits as surely at least as large a micro-batch and has at
    most as much to do: bytes offloaded and sent, and operations computed again. Of equal rows the first is kept."""
    fitting = [(one, _burdens(one)) for one in fits if one.micro]
    return [
        one
        for place, (one, mine) in enumerate(fitting)
        if not any(
            other.group == one.group
            and all(a <= b for a, b in zip(theirs, mine, strict=True))
            and (theirs != mine or before < place)
            for before, (other, theirs) in enumerate(fitting)
            if before != place
        )
    ]


def _burdens(fit: Fit) -> tuple[int, ...]:
    copied = (fit.host_bytes, fit.scratch_bytes, fit.sent_bytes)
    return (int(bool(fit.tight)), -fit.micro, *copied, *extra_work(fit.config))
