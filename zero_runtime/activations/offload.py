"""Activation offload: activations that blocks keep for backward are stored in host memory between the two passes.

A frame is one call of a block. The activations that the call keeps are copied to the host as soon as they are saved.
Host memory is allocated once and reused. What the device holds of this is bounded: see [Note: memory in program order]
in copy_streams.py. Nothing may write to an activation before its copy has ended, which autograd forbids anyway.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zero_runtime.offload.copy_streams import Copies, CopyEvent


class HostMemory:
    """Host buffers, [bytes] uint8, for activations of `device`. All stay allocated until `close`.

    A buffer may be given back while a copy out of it is under way. If the copy is used, the stream that fills the
    buffer next has already waited for it; if it is not used, nothing reads its target.
    """

    def __init__(self, copies: Copies, device: torch.device) -> None:
        self.copies, self.device = copies, device
        self.nbytes = 0  # of all buffers together
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._last: weakref.ref[Frame] | None = None

    def frame(self, parameters: Iterable[torch.Tensor]) -> Frame:
        """Create the frame of the block call that follows; `parameters` are the block's."""
        frame = Frame(self, {one.untyped_storage()._cdata for one in parameters}, self._last)
        self._last = weakref.ref(frame)
        return frame

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes` bytes; less than an eighth of `nbytes`, or less than 64 bytes, stays unused."""
        step = max(1 << max(nbytes.bit_length() - 4, 0), 64)
        size = -(-nbytes // step) * step
        if self._free[size]:
            return self._free[size].pop()
        self.nbytes += size
        return self.copies.on_host(size, torch.uint8)

    def give_back(self, room: torch.Tensor) -> None:
        self._free[room.numel()].append(room)

    def close(self) -> None:
        """Release the memory; only between steps. Idempotent."""
        self.copies.close()
        self._free.clear()
        self.nbytes = 0


class Kept:
    """One offloaded storage. When nothing in the graph refers to it any more, its buffer is free again."""

    def __init__(self, frame: Frame, memory: HostMemory, room: torch.Tensor, source: torch.Tensor) -> None:
        self._frame = frame  # keeps the frame alive as long as its storages
        self._memory = memory
        self._nbytes = source.numel()
        self._room = room
        self._here: tuple[torch.Tensor, CopyEvent] | None = None  # [bytes] uint8 on the device
        self._arrived = memory.copies.to_host(room[: self._nbytes], source)
        self.users = 0  # tensors that are views of it
        self._to_come = 0  # users that have not asked for it since it was fetched

    def fetch(self) -> None:
        """Start copying it to the device; a no-op while it is there or being copied."""
        if self._here is None:
            self._here = self._memory.copies.bring(self._room[: self._nbytes], [self._arrived])
            self._to_come = self.users

    def take(self) -> torch.Tensor:
        """[bytes] uint8 on the device, for one of its users. It is freed after its last user."""
        self.fetch()
        assert self._here is not None
        buffer, event = self._here
        event.hold_device()
        self._to_come -= 1
        if self._to_come == 0:
            self._here = None
        return buffer

    def __del__(self) -> None:
        if self._here is not None:  # fetched, but not by all users: the copy may still be writing
            self._here[1].hold_device()
        self._memory.give_back(self._room)


@dataclass(frozen=True)
class View:
    """A tensor as a view of an offloaded storage. Sizes, strides and the offset count elements."""

    kept: Kept
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Frame:
    """The activations that one call of a block keeps."""

    def __init__(self, memory: HostMemory, stays: set[int], before: weakref.ref[Frame] | None) -> None:
        self._memory = memory
        self._stays = stays  # addresses of the storages that stay on the device
        self._before = before
        self._kept: list[weakref.ref[Kept]] = []  # in the order in which they were saved
        self._seen: dict[tuple[int, int], tuple[torch.Tensor, Kept]] = {}  # by storage and version; see `end`
        self._is_fetched = False

    def pack(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """Start copying the tensor to the host; a tensor that stays on the device is returned unchanged."""
        storage = tensor.untyped_storage()
        if tensor.device.type != self._memory.device.type or type(tensor) not in (torch.Tensor, FakeTensor):
            return tensor
        if storage.nbytes() == 0 or storage._cdata in self._stays:
            return tensor  # where a parameter is stored is the plan's to say
        # One copy per storage: tensors that share it are restored as the same views, strides included, so that backward
        # runs on the same numbers in the same layout, and no element is copied twice. (torch's save_on_cpu makes a
        # contiguous copy of each tensor.)
        key = storage._cdata, tensor._version
        if key not in self._seen:
            with torch.no_grad():
                source = tensor.new_empty(0, dtype=torch.uint8).set_(storage)
                kept = Kept(self, self._memory, self._memory.take(source.numel()), source)
            self._kept.append(weakref.ref(kept))
            self._seen[key] = tensor, kept
        _, kept = self._seen[key]
        kept.users += 1
        return View(kept, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def end(self) -> None:
        """End the call and release the packed tensors. They are held until here, since another tensor may reuse their
        address afterwards."""
        self._seen.clear()

    def unpack(self, packed: View | torch.Tensor) -> torch.Tensor:
        """The tensor, on the device and with its original layout."""
        if isinstance(packed, torch.Tensor):
            return packed
        self._fetch()
        # Backward reaches this one next: its copies overlap with the computation of the block here.
        before = self._before() if self._before is not None else None
        if before is not None:
            before._fetch()
        with torch.no_grad():
            buffer = packed.kept.take()
            empty = buffer.new_empty(0, dtype=packed.dtype)
            return empty.set_(buffer.untyped_storage(), packed.offset, packed.size, packed.stride)

    def _fetch(self) -> None:
        """Only the first time: a second backward through a retained graph fetches storages one by one."""
        if not self._is_fetched:
            self._is_fetched = True
            self._memory.copies.release_sources()  # a no-op after the first frame of a backward
            for kept in [one() for one in self._kept]:
                if kept is not None:
                    kept.fetch()
