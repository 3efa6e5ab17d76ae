"""When everything would run: each launch of the virtual GPU gets a start and an end, from stated costs.

[Note: the model of time]
A launch starts when the host has issued it, everything that its stream has to wait for has ended, and, if it is a
collective, the link between the devices is free; it ends after its cost. A kernel costs the larger of its arithmetic
and its memory traffic, at the rates in `Costs`. A collective costs a latency and the bytes that a ring sends, at its
link's rate. Kernels and collectives do not slow each other down. So absolute times are lower bounds, and two schedules
with the same costs can be compared.

Exposed communication is the time during which the compute stream, with everything else done, waits for a collective.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.virtual_gpu.machine import COMPUTE, Actor, Clock, Machine, Range
from harness.virtual_gpu.recorder import Recorder, _tensors

MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast"})
DEVICES_PER_NODE = 8


@dataclass(frozen=True)
class Costs:
    """Rates of one device and its host: an H100 SXM as PyTorch programs reach them, not its data sheet.

    Arithmetic in FLOP/s, memory and links in bytes/s, latencies in seconds. inside: between the devices of a node.
    across: per device, if every device of a node takes part (most of a ring's steps stay inside the node). alone: per
    device, if one device of each node takes part.
    """

    matmul: float = 620e12
    attention: float = 400e12
    memory: float = 2.6e12
    kernel_s: float = 3e-6
    issue_s: float = 6e-6
    event_s: float = 1e-6
    collective_s: float = 20e-6
    inside: float = 330e9
    across: float = 250e9
    alone: float = 45e9


@dataclass
class TimedMachine(Machine):
    """A machine that follows time instead of accesses. See [Note: the model of time]."""

    costs: Costs = field(default_factory=Costs)
    members: Callable[[Actor], tuple[int, ...]] = lambda _: ()  # the ranks of the process group that has this stream
    kernel_cost: float = 0.0  # of the operation that is about to be launched
    issued: defaultdict[Actor, float] = field(default_factory=lambda: defaultdict(float))  # the host's time, by thread
    free: defaultdict[Actor, float] = field(default_factory=lambda: defaultdict(float))  # end of a stream's last launch
    links: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by collective
    carried: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # all of it, exposed or not
    waits_for_host: float = 0.0  # of the compute stream
    computes: float = 0.0  # seconds of kernels on the compute stream
    launches: int = 0
    _last: defaultdict[Actor, str] = field(
        default_factory=lambda: defaultdict(str)
    )  # an event ends with this operation
    _ends: dict[int, tuple[float, str]] = field(default_factory=dict)  # by tick: end, operation

    def launch(
        self,
        thread: Actor,
        stream: Actor,
        operation: str,
        reads: Iterable[tuple[int, Range]] = (),
        writes: Iterable[tuple[int, Range]] = (),
    ) -> None:
        clock = self.clocks[stream]
        clock.join(self.clocks[thread])
        cost = self._cost(stream, operation, [*reads, *writes])
        self.issued[thread] += self.costs.event_s if operation == "event" else self.costs.issue_s
        ready, awaited = self._reached(clock)
        start = max(self.issued[thread], self.free[stream], ready)
        link = self._link(stream, operation)
        if link:
            self.carried[operation] += cost
            start = max(start, self.links[link])
            self.links[link] = start + cost
        if operation != "event":
            self._last[stream] = operation
        if stream == COMPUTE:
            self._account(thread, ready, awaited, cost)
        self.free[stream] = start + cost
        self._tick += 1
        clock[stream] = self._tick
        self._ends[self._tick] = (start + cost, self._last[stream])

    def _account(self, thread: Actor, ready: float, awaited: str, cost: float) -> None:
        before = max(self.issued[thread], self.free[COMPUTE])
        if ready > before and awaited in COLLECTIVES:
            self.exposed[awaited] += ready - before
        if cost:
            self.launches += 1
            self.computes += cost
            self.waits_for_host += max(self.issued[thread] - max(self.free[COMPUTE], ready), 0.0)

    def _reached(self, clock: Clock) -> tuple[float, str]:
        """When everything that the clock covers has ended, and the operation that ends last."""
        return max((self._ends[tick] for tick in clock.values() if tick in self._ends), default=(0.0, ""))

    def synchronize(self, thread: Actor, clock: Clock, kind: str) -> None:
        super().synchronize(thread, clock, kind)
        self.issued[thread] = max(self.issued[thread], self._reached(clock)[0])

    def _cost(self, stream: Actor, operation: str, spans: list[tuple[int, Range]]) -> float:
        if operation == "event":
            return 0.0
        if operation not in COLLECTIVES:
            return self.kernel_cost
        count, nbytes = len(self.members(stream)), max(high - low for _, (low, high) in spans)
        if count == 1:
            return 0.0
        share = {"all_reduce": 2 * (count - 1) / count, "broadcast": 1.0}.get(operation, (count - 1) / count)
        rates = {"inside": self.costs.inside, "across": self.costs.across, "alone": self.costs.alone}
        return self.costs.collective_s + share * nbytes / rates[self._link(stream, operation)]

    def _link(self, stream: Actor, operation: str) -> str:
        """The link that a collective uses; collectives over one link run one after another."""
        if operation not in COLLECTIVES:
            return ""
        ranks = self.members(stream)
        nodes = {rank // DEVICES_PER_NODE for rank in ranks}
        if len(nodes) == 1:
            return "inside"
        return "alone" if len(nodes) == len(ranks) else "across"

    # Accesses are not followed: this is another question, and it would take most of the time.

    def act(self, *_: Any) -> None:
        """A no-op."""

    def came(self, storage: int) -> None:
        """A no-op."""

    def went(self, storage: int, clock: Clock) -> None:
        """A no-op."""

    def begin(self) -> float:
        """Let everything end, and account from now on; returns the time."""
        now = max([*self.issued.values(), *self.free.values()], default=0.0)
        for times in (self.issued, self.free, self.links):
            for key in times:
                times[key] = now
        self._ends = {}
        self.exposed.clear()
        self.carried.clear()
        self.waits_for_host = self.computes = 0.0
        self.launches = 0
        self.syncs.clear()
        return now

    def end(self) -> float:
        """The time at which the host and the compute stream, with all that it waits for, are done."""
        self._account(("thread", 0), *self._reached(self.clocks[COMPUTE]), 0.0)
        return max(self.free[COMPUTE], self._reached(self.clocks[COMPUTE])[0], self.issued[("thread", 0)])


class TimedRecorder(Recorder):
    """Tells a TimedMachine the cost of each operation before it is launched."""

    def _on_device(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        machine = self.devices.machine
        assert isinstance(machine, TimedMachine)
        machine.kernel_cost = kernel_cost(machine.costs, name, _tensors((args, kwargs)), _tensors(result))
        super()._on_device(func, name, args, kwargs, result)


def kernel_cost(costs: Costs, name: str, given: list[torch.Tensor], results: list[torch.Tensor]) -> float:
    """Seconds of one kernel: the largest of its arithmetic, its memory traffic and the shortest kernel."""
    traffic = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *results)) / costs.memory
    arithmetic = 0.0
    if name in MATMULS:
        left, right = given[-2:]
        arithmetic = 2.0 * left.numel() * right.shape[-1] / costs.matmul
    elif "attention" in name:
        batch, heads, length, width = next(tensor for tensor in given if tensor.dim() == 4).shape
        products = 5 if "backward" in name else 2  # of [length, length, width], half of each by the causal mask
        arithmetic = products * 2.0 * batch * heads * math.pow(length, 2) * width / 2 / costs.attention
    return max(traffic, arithmetic, costs.kernel_s)
