"""Counts bytes of the tensors that are alive, by distinct storages and independently of the layouts."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zero_runtime.accounting import host_tensors, state_tensors
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.state_bytes import ONE_NUMBER_BYTES


@dataclass(frozen=True)
class Census:
    """Bytes of distinct live storages. `host`: held in host memory by offload. `other`: every other live tensor that
    is neither a model state nor a buffer."""

    params: int
    grads: int
    optimizer: int
    buffers: int
    other: int
    host: int = 0

    @property
    def states(self) -> int:
        return self.params + self.grads + self.optimizer


class HeldStates(NamedTuple):
    """The tensors of an engine's model states on one rank: by component (params, grads, optimizer), and `host`, those
    that offload holds in host memory."""

    model: nn.Module
    device: torch.device
    states: Mapping[str, Sequence[torch.Tensor]]
    host: Sequence[torch.Tensor] = ()


def held_by(runtime: ZeroRuntime | HeldStates) -> HeldStates:
    if isinstance(runtime, HeldStates):
        return runtime
    host = [tensor for found in host_tensors(runtime).values() for tensor in found]
    return HeldStates(runtime.model, runtime.device, state_tensors(runtime), host)


def take_census(runtime: ZeroRuntime | HeldStates) -> Census:
    """Count the live storages. A storage that several components use counts once, for the first that names it."""
    held, seen = held_by(runtime), set[int]()
    by_component = {name: _count_new(tensors, seen) for name, tensors in held.states.items()}
    host = _count_new(held.host, seen)
    buffers = _count_new(held.model.buffers(), seen)
    other = _count_new(_live_tensors(held.device.type), seen)
    return Census(**by_component, buffers=buffers, other=other, host=host)


def live_storages(device_type: str) -> dict[int, int]:
    """The sizes in bytes of all storages of Python's tensors on devices of this kind, by address."""
    storages = list(_storages(_live_tensors(device_type)))
    return {one.data_ptr(): one.nbytes() for one in storages if one.nbytes()}


class ActivationCensus:
    """Context around one forward that counts the bytes it leaves alive for backward, in storages that it created.

    Counts tensors that autograd saves and tensors that Python still holds (such as the kept inputs of recomputed
    blocks), except storages of one number (see activation_count.py, which predicts the same).
    """

    def __init__(self, runtime: ZeroRuntime | HeldStates) -> None:
        self.bytes = 0
        self._runtime = runtime
        # Weak references reserve the addresses: no new storage gets the address of a freed one.
        self._there: list[StorageWeakRef] = []
        self._saved: list[torch.Tensor] = []
        saved = self._saved

        # A method of this object would be a cycle with the hooks: until Python collects it, the states that the object
        # was given would stay alive, among them the gradients of its step.
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def __enter__(self) -> ActivationCensus:
        held = held_by(self._runtime)
        named = [one for tensors in (*held.states.values(), held.host) for one in tensors]
        found = [*named, *held.model.buffers(), *_live_tensors(held.device.type)]
        self._there = [StorageWeakRef(one) for one in _storages(found)]
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        seen = {one.cdata for one in self._there}
        left = {
            one._cdata: one.nbytes() for one in _storages([*self._saved, *_live_tensors(self._runtime.device.type)])
        }
        self.bytes = sum(size for key, size in left.items() if key not in seen and size > ONE_NUMBER_BYTES)
        self._saved.clear()
        self._there.clear()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their distinct storages."""
    return _count_new(tensors, set())


def _count_new(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    new = {one._cdata: one.nbytes() for one in _storages(tensors) if one._cdata not in seen}
    seen.update(new)
    return sum(new.values())


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        # A wrapper, such as a DTensor, has no storage of its own: what it wraps is a tensor besides.
        has_none = isinstance(tensor, nn.parameter.UninitializedParameter) or hasattr(tensor, "__tensor_flatten__")
        if not has_none and not tensor.is_meta:
            yield tensor.untyped_storage()


def _live_tensors(device_type: str) -> list[torch.Tensor]:
    # type(), not isinstance: some libraries keep lazy objects whose __class__ imports modules when it is read.
    found = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return [tensor for tensor in found if tensor.device.type == device_type and tensor.layout is torch.strided]
