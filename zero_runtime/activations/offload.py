"""What blocks keep from forward to backward, at rest in the host's memory between the two.

[Note: frames]
A frame is one call of a block. What the call keeps leaves for the host as it is kept, storage by storage: tensors that
share one share its copy, and come back as the same views of it, strides included, so that backward runs on the same
numbers in the same layout. When backward asks for the first of a frame, all of it is fetched, and all of the frame that
was made before it, which backward comes to next: the copy of one block's runs behind the computation of another's.
What has come back ends with its last user. The host's memory is taken once and used again.

[Note: what stays]
Parameters stay (they rest by the plan of the shards), and so does what lies outside of blocks. Nothing may write to
what is kept before it has left, which autograd forbids anyway.
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
    """Buffers of the host for what `device` keeps: [bytes] uint8. All stay until `close`.

    A room may be given back while a copy out of it is under way: one that is used has been waited for on the stream
    that fills the room next, and what another one brings nobody reads.
    """

    def __init__(self, copies: Copies, device: torch.device) -> None:
        self.copies, self.device = copies, device
        self.nbytes = 0  # of all buffers
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._last: weakref.ref[Frame] | None = None

    def frame(self, parameters: Iterable[torch.Tensor]) -> Frame:
        """Of the call that follows; `parameters` are the block's."""
        frame = Frame(self, {one.untyped_storage()._cdata for one in parameters}, self._last)
        self._last = weakref.ref(frame)
        return frame

    def take(self, nbytes: int) -> torch.Tensor:
        """Room for so many bytes; not more than an eighth of it is waste."""
        step = max(1 << max(nbytes.bit_length() - 4, 0), 64)
        size = -(-nbytes // step) * step
        if self._free[size]:
            return self._free[size].pop()
        self.nbytes += size
        return self.copies.on_host(size, torch.uint8)

    def give_back(self, room: torch.Tensor) -> None:
        self._free[room.numel()].append(room)

    def close(self) -> None:
        """Between steps: the memory goes. Idempotent."""
        self.copies.close()
        self._free.clear()
        self.nbytes = 0


class Kept:
    """One storage at rest; it ends, and its room is free again, when nothing in the graph refers to it."""

    def __init__(self, frame: Frame, memory: HostMemory, room: torch.Tensor, source: torch.Tensor) -> None:
        self._frame = frame  # lives as long as what it holds
        self._memory = memory
        self._nbytes = source.numel()
        self._room = room
        self._arrived = memory.copies.to_host(room[: self._nbytes], source)
        self._here: tuple[torch.Tensor, CopyEvent] | None = None  # [bytes] uint8 on the device
        self.users = 0  # tensors that are views of it
        self._to_come = 0  # of those, which have not been asked for since it was fetched

    def fetch(self) -> None:
        """Start bringing it to the device; a no-op while it is there or on its way."""
        if self._here is None:
            copies = self._memory.copies
            target = copies.on_device(self._nbytes, torch.uint8)
            event = copies.to_device(target, self._room[: self._nbytes], [self._arrived])
            self._here, self._to_come = (target, event), self.users

    def take(self) -> torch.Tensor:
        """[bytes] uint8 on the device, for one of its users; the last one gets all there is."""
        self.fetch()
        assert self._here is not None
        buffer, event = self._here
        event.hold_device()
        self._memory.copies.used_here(buffer)
        self._to_come -= 1
        if self._to_come == 0:
            self._here = None
        return buffer

    def __del__(self) -> None:
        self._memory.give_back(self._room)


@dataclass(frozen=True)
class View:
    """A tensor of a kept storage. Sizes and the offset count elements."""

    kept: Kept
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Frame:
    """What one call of a block keeps. See [Note: frames]."""

    def __init__(self, memory: HostMemory, stays: set[int], before: weakref.ref[Frame] | None) -> None:
        self._memory = memory
        self._stays = stays  # storages
        self._before = before
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._seen: dict[tuple[int, int], tuple[torch.Tensor, Kept]] = {}  # by storage and version; see `end`
        self._is_fetched = False

    def pack(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """The tensor starts to leave; what stays is given back as it is."""
        storage = tensor.untyped_storage()
        if tensor.device.type != self._memory.device.type or type(tensor) not in (torch.Tensor, FakeTensor):
            return tensor
        if storage.nbytes() == 0 or storage._cdata in self._stays:
            return tensor
        key = storage._cdata, tensor._version
        if key not in self._seen:
            with torch.no_grad():
                source = tensor.new_empty(0, dtype=torch.uint8).set_(storage)
                kept = Kept(self, self._memory, self._memory.take(source.numel()), source)
            self._kept.add(kept)
            self._seen[key] = tensor, kept
        _, kept = self._seen[key]
        kept.users += 1
        return View(kept, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def end(self) -> None:
        """The call is over. (Until here what was packed is held: another tensor may have its address after it.)"""
        self._seen.clear()

    def unpack(self, packed: View | torch.Tensor) -> torch.Tensor:
        """The tensor, on the device and as it was."""
        if isinstance(packed, torch.Tensor):
            return packed
        self._fetch()
        before = self._before() if self._before is not None else None
        if before is not None:
            before._fetch()
        with torch.no_grad():
            buffer = packed.kept.take()
            empty = buffer.new_empty(0, dtype=packed.dtype)
            return empty.set_(buffer.untyped_storage(), packed.offset, packed.size, packed.stride)

    def _fetch(self) -> None:
        """Once: a second backward through a graph that was retained fetches one by one."""
        if not self._is_fetched:
            self._is_fetched = True
            for kept in self._kept:
                kept.fetch()
