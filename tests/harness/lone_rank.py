"""Runs the runtime as one rank of any world, without other ranks, and writes down what its host asks of NCCL, in order.

Nothing is sent, so values are meaningless: a test compares orders. The tensors are on the CPU, and the runtime takes
the branches that it takes with NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from zero_runtime import collectives
from zero_runtime.watch.journal import Journal

COMPUTE, WORLD = "compute", "group 0"


class Deed(NamedTuple):
    """One act of a rank's host.

    what: `make` or `destroy` a group, `issue` a collective, let a stream `wait` for one, `read` on the host what the
    compute stream has computed, or `die`. stream: the current stream. group: groups are numbered as they are made.
    number: of the collective among all of the rank, from 1. numel: of the larger tensor. unit: see `with_units`.
    """

    what: str
    stream: str = COMPUTE
    group: str = ""
    number: int = 0
    kind: str = ""
    numel: int = 0
    dtype: str = ""
    unit: str = ""


@dataclass(eq=False)
class LoneGroup:
    """A process group, of which this process is one member. The device makes the runtime split it as NCCL's."""

    label: str
    members: tuple[int, ...]
    bound_device_id: torch.device = field(default_factory=lambda: torch.device("cuda", 0))


class _Work:
    def __init__(self, rank: LoneRank, number: int) -> None:
        self._rank, self._number = rank, number

    def wait(self) -> None:
        self._rank.deeds.append(Deed("wait", self._rank.stream, number=self._number))

    def is_completed(self) -> bool:
        return True


class LoneRank:
    """A rank, its deeds, and the members of its groups.

    failing_at: the collective at whose issue it has no memory. told: the values of rank 0's broadcasts, which rank 0
    appends and every other rank receives.
    """

    def __init__(self, rank: int, world: int, failing_at: int, told: list[torch.Tensor]) -> None:
        self.rank, self.world, self.failing_at = rank, world, failing_at
        self._told, self._heard = told, 0
        self.deeds: list[Deed] = []
        self.stream = COMPUTE
        self._world_group = LoneGroup(WORLD, tuple(range(world)))
        self.members = {WORLD: self._world_group.members}
        self._issued = 0

    def read_host(self, numbers: torch.Tensor) -> list[float]:
        """For RuntimeSettings.read_host: waits for the compute stream; every number is 1."""
        self.deeds.append(Deed("read"))
        return [1.0] * numbers.numel()

    def with_units(self, journal: Journal) -> list[Deed]:
        """The deeds, with the units that the runtime's journal names for their collectives."""
        units = {op.sequence: op.unit for op in journal.read()[1]}
        return [deed._replace(unit=units[deed.number]) if deed.what == "issue" else deed for deed in self.deeds]

    # ---- what replaces functions of torch ------------------------------------------------------------------------

    def split(self, split_ranks: Sequence[Sequence[int]], **_: Any) -> LoneGroup:
        (own,) = (tuple(members) for members in split_ranks if self.rank in members)
        group = LoneGroup(f"group {len(self.members)}", own)
        self.members[group.label] = own
        self.deeds.append(Deed("make", group=group.label))
        return group

    def destroy(self, group: LoneGroup | None = None) -> None:
        self.deeds.append(Deed("destroy", group=(group or self._world_group).label))

    def issue(self, kind: str, tensor: torch.Tensor, group: LoneGroup | None) -> _Work:
        self._issued += 1
        if self._issued == self.failing_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        label = (group or self._world_group).label
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.deeds.append(Deed("issue", self.stream, label, self._issued, kind, tensor.numel(), dtype))
        return _Work(self, self._issued)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: LoneGroup | None = None, **_: Any) -> _Work:
        if self.rank == src:
            self._told.append(tensor.clone())
        elif self._heard < len(self._told):
            tensor.copy_(self._told[self._heard])
        self._heard += 1
        return self.issue("broadcast", tensor, group)

    def gather_objects(self, values: list[Any], value: Any, group: LoneGroup | None = None) -> None:
        self.issue("gather_objects", torch.empty(0), group).wait()
        self.deeds.append(Deed("read"))
        values[:] = [value] * len(values)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


@contextmanager
def lone_rank(
    rank: int, world: int, *, failing_at: int = 0, told: list[torch.Tensor] | None = None
) -> Iterator[LoneRank]:
    """Make torch.distributed and the streams of CUDA those of one rank; see LoneRank."""
    own = LoneRank(rank, world, failing_at, [] if told is None else told)
    of_dist = {
        "get_world_size": lambda group=None: world,
        "get_rank": lambda group=None: rank,
        "get_backend": lambda group=None: "nccl",
        "group": SimpleNamespace(WORLD=own._world_group),
        "split_group": own.split,
        "destroy_process_group": own.destroy,
        "all_reduce": lambda tensor, op=None, group=None, async_op=False: own.issue("all_reduce", tensor, group),
        "broadcast": own.broadcast,
        "all_gather_object": own.gather_objects,
        "ProcessGroupNCCL": SimpleNamespace(Options=lambda is_high_priority_stream: None),
    }
    of_collectives = {
        "_all_gather": lambda full, shard, group=None, async_op=False: own.issue("all_gather", full, group),
        "_reduce_scatter": lambda shard, full, op=None, group=None, async_op=False: own.issue(
            "reduce_scatter", full, group
        ),
        "_on_cuda": lambda tensor: True,
    }
    of_cuda = {"Stream": lambda device=None: "side", "stream": own.on}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))  # the runtime sets variables of NCCL
        for target, values in ((dist, of_dist), (collectives, of_collectives), (torch.cuda, of_cuda)):
            stack.enter_context(mock.patch.multiple(target, create=True, **values))
        yield own
