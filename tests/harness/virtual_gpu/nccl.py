"""Process groups with NCCL's rules on the virtual GPU, as a backend of torch.distributed.

[Note: NCCL's rules]
Each group has its own stream. A collective waits there for what the current stream has been given so far, and runs
after the group's earlier collectives. `Work.wait` makes the current stream wait and returns; the host does not wait.
The tensors of a collective are kept alive until then, which does not protect a storage whose memory is freed by
`resize_`. Making and destroying a group are collectives of its ranks. Nothing is sent: one rank of a world runs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.virtual_gpu.devices import Devices, Stream
from harness.virtual_gpu.machine import Range
from harness.virtual_gpu.recorder import Storages, extent

NAME = "virtual"


@dataclass(frozen=True)
class Issued:
    """One event of a rank's communication, in the host's order: a collective, or a group that is made or destroyed.
    numel: of the larger tensor."""

    group: str
    kind: str
    numel: int
    dtype: str


class VirtualWork(dist.Work):
    """A collective under way."""

    def __init__(self, devices: Devices, stream: Stream, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._devices, self._event, self._tensors = devices, stream.record_event(), tuple(tensors)

    def wait(self, timeout: Any = None) -> bool:
        devices = self._devices
        devices.machine.follow(devices.actor(devices.index), self._event.clock, "Work.wait")
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()


class VirtualGroup(dist.ProcessGroup):
    """A process group of one rank. `log` is shared by all groups of the rank."""

    def __init__(self, devices: Devices, storages: Storages, log: list[Issued], options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._devices, self._storages, self._log = devices, storages, log
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self.label = f"{sum(event.kind == 'make' for event in log)} of {options.group_size}"
        self._stream = Stream(devices, devices.index)
        devices.machine.names[self._stream.actor] = f"NCCL group {self.label}"
        self._write("make", None)

    def _write(self, kind: str, tensor: torch.Tensor | None) -> None:
        numel, dtype = (0, "") if tensor is None else (tensor.numel(), str(tensor.dtype).removeprefix("torch."))
        self._log.append(Issued(self.label, kind, numel, dtype))

    def _run(self, kind: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> VirtualWork:
        self._write(kind, max((*reads, *writes), key=torch.Tensor.numel))
        devices = self._devices
        index = devices.index
        devices.contexts.add(index)
        machine = devices.machine
        machine.clocks[self._stream.actor].join(machine.clocks[devices.actor(index)])
        machine.launch(devices.thread, self._stream.actor, kind, self._spans(reads), self._spans(writes))
        return VirtualWork(devices, self._stream, (*reads, *writes))

    def _spans(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, Range]]:
        for tensor in tensors:
            assert tensor.device.type == "cuda", f"NCCL takes no tensor on {tensor.device}"
            assert tensor.is_contiguous(), "NCCL takes contiguous tensors"
            self._storages.see(tensor)
        return [(tensor.untyped_storage()._cdata, extent(tensor)) for tensor in tensors]

    # torch keeps the name in a group's backends, of which this group has none.

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, _: str) -> None:
        """Only for messages."""

    # ---- what torch.distributed calls --------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> VirtualWork:
        return self._run("all_reduce", tensors, tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> VirtualWork:
        return self._run("broadcast", tensors, tensors)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> VirtualWork:
        assert output.numel() == self.size() * given.numel(), "all_gather: sizes"
        return self._run("all_gather", [given], [output])

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> VirtualWork:
        assert given.numel() == self.size() * output.numel(), "reduce_scatter: sizes"
        return self._run("reduce_scatter", [given], [output])

    all_gather_single = _allgather_base  # the names since torch 2.13
    reduce_scatter_single = _reduce_scatter_base

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        self._write("destroy", None)

    def abort(self) -> None:
        self._write("abort", None)


def register(devices: Devices, storages: Storages) -> list[Issued]:
    """Make the backend known to torch. Returns the log of this rank's communication."""
    log: list[Issued] = []

    def make(options: Any, _settings: Any) -> VirtualGroup:
        return VirtualGroup(devices, storages, log, options)

    def gather_objects(values: list[Any], value: Any, group: Any = None) -> None:
        """Every rank has this rank's value: the ranks do the same. NCCL's gather of objects waits for the device."""
        values[:] = [value] * len(values)

    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu", "cuda"])
    dist.all_gather_object = gather_objects  # type: ignore[assignment]
    return log


def join(devices: Devices, storages: Storages, rank: int, world: int) -> list[Issued]:
    """Initialize the default process group as `rank` of `world`. Returns the log of this rank's communication."""
    log = register(devices, storages)
    dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=world)
    return log
