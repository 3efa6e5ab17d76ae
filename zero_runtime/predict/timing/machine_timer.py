"""Measures what a step costs besides the model's own work: collectives, copies, updates, and how they slow each other.

All ranks must call each function together. The results are means over the ranks, which are equal on all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zero_runtime.collectives import Collectives, Pending
from zero_runtime.optim.configs import OptimizerConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.timing.costs import CollectiveCost, Curve
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.settings import RuntimeSettings

ITEMSIZE_BYTES = 4  # measured messages are fp32
BUDGET_S = 0.15  # time of the repetitions of one measurement
LEAST, MOST = 3, 25  # repetitions
BUFFERS_BYTES = 64 << 20  # of the copies that are measured: more than a processor's caches hold
MATRIX = 384  # rows and columns of the products that are computed beside a collective
BESIDE_S = 0.05  # time of those products
BESIDE_BYTES = 1 << 20  # of each gather that runs beside them
LEAST_PROGRESS = 0.05  # of a collective beside products: a smaller share is not told from noise
MATRICES = 4  # of the model whose update is measured


class Repeated:
    """Measures actions by repeating them, equally often on all ranks."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives, self._device = collectives, device

    def mean(self, value: float) -> float:
        """The mean over the ranks."""
        total = torch.full((), value, dtype=torch.float64, device=self._device)
        return float(self._collectives.sum_over_ranks_(total)) / self._collectives.world

    def seconds(self, action: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """The median time of an action, each after an untimed call of `before`; repeated as BUDGET_S allows."""
        once = self.mean(self.once(action, before))  # the first call, which may compile or allocate
        once = min(once, self.mean(self.once(action, before)))
        count = min(max(int(BUDGET_S / max(once, 1e-9)), LEAST), MOST)
        return self.mean(statistics.median(self.once(action, before) for _ in range(count)))

    def sum_s(self) -> float:
        """The median time of a sum of one number over all ranks, which blocks; 0 for one rank."""
        if self._collectives.world == 1:
            return 0.0
        number = torch.zeros((), dtype=torch.float64, device=self._device)
        return self.seconds(lambda: self._collectives.sum_over_ranks_(number))

    def in_two(self, start: Callable[[], Pending]) -> tuple[float, float]:
        """The median times of beginning a collective, and of beginning it and waiting for it."""
        begun: list[float] = []

        def start_and_wait() -> None:
            begin = time.perf_counter()
            pending = start()
            begun.append(time.perf_counter() - begin)
            pending.wait()

        all_s = self.seconds(start_and_wait)
        return self.mean(statistics.median(begun)), all_s

    def once(self, action: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """The time of an action on this rank, after an untimed call of `before`."""
        before()
        self.finish()
        begin = time.perf_counter()
        action()
        self.finish()
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True)
class LinkTimes:
    """The collectives of one division of the ranks, see StepCosts."""

    gather: CollectiveCost
    reduce: CollectiveCost
    replica: CollectiveCost
    control_s: float
    compute_slowdown: float
    link_slowdown: float


def time_links(repeated: Repeated, collectives: Collectives, device: torch.device, sizes: Sequence[int]) -> LinkTimes:
    """Times collectives whose full tensors have these sizes in bytes."""
    shards, world = collectives.shard_count, collectives.data_world

    def cost(start: Callable[[torch.Tensor, torch.Tensor], Pending]) -> CollectiveCost:
        starts, rests = [], []
        for size in sizes:
            full = torch.zeros(-(-size // ITEMSIZE_BYTES // world) * world, device=device)
            shard = torch.zeros(full.numel() // shards, device=device)
            begun_s, all_s = repeated.in_two(partial(start, full, shard))
            starts.append((float(size), begun_s))
            rests.append((float(size), all_s - begun_s))
        return CollectiveCost(Curve(starts), Curve(rests))

    gather = cost(collectives.all_gather) if shards > 1 else CollectiveCost()
    replica = cost(lambda full, _: collectives.all_reduce_replicas(full)) if shards < world else CollectiveCost()
    reduce = cost(collectives.reduce) if shards > 1 else CollectiveCost()
    slowed = _slowdowns(repeated, collectives, device, gather if shards > 1 else replica) if world > 1 else (0.0, 0.0)
    return LinkTimes(gather, _less(reduce, replica, shards), replica, repeated.sum_s(), *slowed)


def _less(both: CollectiveCost, replica: CollectiveCost, shards: int) -> CollectiveCost:
    """The reduce-scatter alone, from that with the all-reduce over the replicas which follows it."""
    rest = [(size, max(seconds - replica.rest.at(size / shards), 0.0)) for size, seconds in both.rest.points]
    return CollectiveCost(both.start, Curve(rest))


def _slowdowns(
    repeated: Repeated, collectives: Collectives, device: torch.device, alone: CollectiveCost
) -> tuple[float, float]:
    """By how much computing, and collectives of a kind that takes so long `alone`, take longer at the same time.

    Collectives are begun that would take twice as long as the products that are then computed. When the products have
    ended, what is left of the collectives shows how far they came meanwhile.
    """
    left = torch.zeros(MATRIX, MATRIX, device=device)
    product = torch.empty_like(left)
    products = max(1, round(BESIDE_S / repeated.seconds(lambda: torch.mm(left, left, out=product))))

    def compute() -> None:
        for _ in range(products):
            torch.mm(left, left, out=product)
        repeated.finish()

    alone_s = repeated.seconds(compute)
    count = max(2, round(2 * alone_s / alone.rest.at(BESIDE_BYTES)))
    shards, world = collectives.shard_count, collectives.data_world
    fulls = [torch.zeros(-(-BESIDE_BYTES // ITEMSIZE_BYTES // world) * world, device=device) for _ in range(count)]

    def begun() -> list[Pending]:
        if shards == 1:
            return [collectives.all_reduce_replicas(full) for full in fulls]
        return [collectives.all_gather(full, full[: full.numel() // shards].clone()) for full in fulls]

    def wait(pending: Sequence[Pending]) -> None:
        for one in pending:
            one.wait()

    all_s = repeated.seconds(lambda: wait(begun()))
    found = []
    for _ in range(LEAST):
        pending = begun()
        begin = time.perf_counter()
        compute()
        both_s = time.perf_counter() - begin
        wait(pending)
        repeated.finish()
        found.append((both_s, time.perf_counter() - begin - both_s))
    both_s, rest_s = (repeated.mean(statistics.median(values)) for values in zip(*found, strict=True))
    done_s = max(all_s - rest_s, LEAST_PROGRESS * both_s)  # of the collectives, in their time alone
    return max(both_s / alone_s - 1, 0.0), max(both_s / done_s - 1, 0.0)


def time_copies(repeated: Repeated, device: torch.device, sizes: Sequence[int]) -> Curve:
    """Times copies between tensors that are in no cache, by the bytes read and written."""
    points = []
    for size in sizes:
        numel = max(size // 2 // ITEMSIZE_BYTES, 1)
        pairs = [
            (torch.zeros(numel, device=device), torch.zeros(numel, device=device))
            for _ in range(max(1, min(BUFFERS_BYTES // size, 64)))
        ]

        def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            for source, target in pairs:
                target.copy_(source)

        points.append((float(size), repeated.seconds(copy) / len(pairs)))
    return Curve(points)


class _Matrices(nn.Module):
    """A model with a given number of elements, whose forward is cheap.

    Elements and gradients differ: the time of an update with 8-bit states depends on their values.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(width, width).normal_(std=0.02) for _ in range(MATRICES))

    def forward(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=row.device)
        for weight in self.weights:
            total = total + (row @ weight.to(row.dtype) @ column).float().sum()
        return total


def time_updates(
    repeated: Repeated,
    device: torch.device,
    plan: ZeroPlan,
    precision: MixedPrecision,
    optimizer: OptimizerConfig,
    settings: RuntimeSettings,
    sizes: Sequence[int],
) -> Curve:
    """Times `ZeroRuntime.step` with a plan that shards nothing, by the elements that a rank updates.

    Less the sum over the ranks in it, which predictions count with the other sums.
    """
    points, sum_s = [], repeated.sum_s()
    for numel in sizes:
        width = max(8, round((numel / MATRICES) ** 0.5))
        runtime = ZeroRuntime(_Matrices(width), plan, precision, optimizer, settings, device)
        row, column = torch.randn(1, width, device=device), torch.randn(width, 1, device=device)

        def backward(built: ZeroRuntime = runtime, row: torch.Tensor = row, column: torch.Tensor = column) -> None:
            built.backward(built(row, column))

        try:
            seconds = repeated.seconds(partial(runtime.step, 1e-4), backward)
        finally:
            runtime.close()
        points.append((float(MATRICES * width * width), max(seconds - sum_s, 0.0)))
    return Curve(points)
