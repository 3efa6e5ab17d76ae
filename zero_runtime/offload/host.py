"""Units whose shards are stored in host memory, separate from the device's memory, and are updated there.

[Note: a step on the host]
A unit's gradient is copied to the host when its reduction ends. When the norm is known, one host thread updates the
units in the order of the next forward and sends each unit's parameters back to the device. The forward waits only for
the unit that it is about to gather. If the parameters are offloaded too, they are copied to the device ahead of their
gather.

[Note: guessing]
A speculative step updates each unit when its gradient has arrived, during backward, on the guess that nothing will be
clipped and all gradients are finite. It writes to a second copy of master, states and offloaded parameters. If the
guess was right, the two copies are swapped. If it was wrong, the second copy is discarded; this is exact, because the
current copy was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

import torch

from zero_runtime.offload.copy_streams import Copies, CopyEvent
from zero_runtime.offload.device_host import Crossing
from zero_runtime.offload.tier import MASTER, PARAM, Compute, Shards
from zero_runtime.unit import Unit


class HostTier:
    """All units of one rank that are offloaded to host memory."""

    def __init__(
        self,
        units: Iterable[Unit],
        states_of: Callable[[Unit], dict[str, torch.Tensor]],
        copies: Copies,
        *,
        speculative: bool = False,
    ) -> None:
        self._copies = copies
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="host-step")
        self._places = {
            unit.name: HostLocation(unit, states_of(unit), copies, self._worker, doubled=speculative) for unit in units
        }
        self._guessed: list[Unit] = []

    def holds(self, unit: Unit) -> bool:
        return unit.name in self._places

    @contextmanager
    def resident(self, unit: Unit, *, writes: bool, fresh: bool = False) -> Iterator[None]:
        """The shards are always in memory, so this only waits for running work on the unit. `writes` also drops what
        becomes stale: copies on the device and a speculative update."""
        place = self._places[unit.name]
        place.settle()
        if fresh:
            place.zero_states()
        if writes:
            place.end_bringing()
            unit.drop_full()
            place.drop()
            place.reject()
        yield

    def reader(self, unit: Unit, name: str) -> None:
        """Return None: everything is in memory."""

    def begin_update(self, units: Sequence[Unit]) -> None:
        """A no-op: the gradients are already on their way to the host."""

    def forget_update(self) -> None:
        """A no-op: `begin_update` starts nothing."""

    def update(self, units: Sequence[Unit], compute: Compute) -> None:
        """Returns before the update is done if the states are offloaded; see [Note: a step on the host]."""
        for unit in units:
            self._places[unit.name].begin_update(compute)

    def guess(self, units: Sequence[Unit], compute: Compute) -> None:
        self._guessed = list(units)
        for unit in units:
            self._places[unit.name].guess(compute)

    def adopt(self) -> list[Unit]:
        guessed, self._guessed = self._guessed, []
        return [unit for unit in guessed if not self._places[unit.name].adopt()]

    def reject(self) -> None:
        for unit in self._guessed:
            self._places[unit.name].reject()
        self._guessed.clear()

    @property
    def scratch_bytes(self) -> int:
        return 0

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {"params": [], "grads": [], "optimizer": [], "staging": []}
        for place in self._places.values():
            for component, tensors in place.tensors().items():
                found[component] += tensors
        return found

    def close(self) -> None:
        self._worker.shutdown()
        for place in self._places.values():
            with suppress(Exception):  # the step that failed has already been reported
                place.settle()
        self._copies.close()
        self._places.clear()


class HostLocation(Crossing):
    """One unit's shards on the host, and the transfers and updates of them that are under way."""

    def __init__(
        self,
        unit: Unit,
        states: dict[str, torch.Tensor],
        copies: Copies,
        worker: ThreadPoolExecutor,
        *,
        doubled: bool,
    ) -> None:
        # A master in the parameters' dtype is copied to the device directly, without a staging buffer.
        super().__init__(unit, copies, staged=not unit.params_offloaded and unit.master_dtype != unit.param_dtype)
        self._states, self._worker = states, worker
        self._shards = self._allocate()
        self._second = self._allocate() if doubled and unit.states_offloaded else {}  # see [Note: guessing]
        self._guess: Compute | None = None  # the update to try when the gradient has arrived
        self._guessing: Future[None] | None = None
        self._bind(self._shards)
        unit.offload_to(self)

    def _allocate(self) -> dict[str, torch.Tensor]:
        unit, found = self.unit, {}
        if unit.master_offloaded:
            found[MASTER] = self._copies.on_host(unit.layout.shard_numel, unit.master_dtype)
        if unit.states_offloaded:
            for name, state in self._states.items():
                found[name] = self._copies.on_host(state.numel(), state.dtype)
        if unit.params_offloaded:
            found[PARAM] = self._copies.on_host(unit.layout.shard_numel, unit.param_dtype)
        return found

    def _bind(self, shards: dict[str, torch.Tensor]) -> None:
        self.unit.bind_shards(shards.get(PARAM), shards.get(MASTER))
        for name in self._states.keys() & shards.keys():
            self._states[name] = shards[name]

    def zero_states(self) -> None:
        for name in self._states.keys() & self._shards.keys():
            self._shards[name].zero_()

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """See StateTier.tensors."""
        shards = self._shards
        staging = [] if self.staging is None else [self.staging]
        return {
            "params": [shards[PARAM]] if PARAM in shards else [],
            "grads": [] if self.grad is None else [self.grad],
            "optimizer": [tensor for name, tensor in shards.items() if name != PARAM],
            "staging": [*staging, *self._second.values()],
        }

    # ---- called by the unit ------------------------------------------------------------------------------------

    def offloaded_params(self) -> torch.Tensor | None:
        return self._shards.get(PARAM)

    def send_grad(self) -> None:
        super().send_grad()
        if self._guess is not None:
            self._guessing = self._worker.submit(self._try, self._guess)
            self._guess = None

    def settle(self) -> None:
        self.end_job()
        if self._guessing is not None:
            wait([self._guessing])
        self.end_copies()

    # ---- update ------------------------------------------------------------------------------------------------

    def begin_update(self, compute: Compute) -> None:
        """Update on the host in a separate thread or, if the states are on the device, immediately on the device."""
        self.end_bringing()
        self.drop()
        if self.unit.states_offloaded:
            self.job = self._worker.submit(self._update, compute, self._copies.here())
        else:
            self._update_on_device(compute)

    def _update(self, compute: Compute, after: CopyEvent) -> None:
        """`after`: event that follows all work on the device that reads the unit's parameters."""
        self.end_copies()
        with torch.no_grad():
            compute(self.unit, self._lent(self._shards))
        self._send_back(self._shards, after)

    def _lent(self, shards: dict[str, torch.Tensor]) -> Shards:
        unit = self.unit
        master = shards[PARAM if unit.master_is_param else MASTER]
        param = shards.get(PARAM, master if self.staging is None else self.staging)
        return Shards(unit.layout, master, self.grad, param, {name: shards[name] for name in self._states})

    def _send_back(self, shards: dict[str, torch.Tensor], after: CopyEvent) -> None:
        """Copy new parameters to the device, unless parameters are offloaded."""
        if PARAM not in shards:
            self.send_params(shards[MASTER] if self.staging is None else self.staging, after)

    # ---- speculative update: see [Note: guessing] --------------------------------------------------------------

    def guess(self, compute: Compute) -> None:
        """Try the update on the second copy when the gradient has arrived."""
        self._guess = compute

    def adopt(self) -> bool:
        """Make the result of the tried update current; False if no update was tried."""
        self._guess, guessing, self._guessing = None, self._guessing, None
        if guessing is None:
            return False
        self.end_bringing()
        self.drop()
        # The new parameters are sent to the device only now: before, backward might still have read the old ones.
        self.job = self._worker.submit(self._swap, guessing, self._copies.here())
        return True

    def reject(self) -> None:
        """Discard the update that was tried or is being tried."""
        self._guess = None
        if self._guessing is not None:
            self.job, self._guessing = self._guessing, None  # the next operation waits for it to end

    def _try(self, compute: Compute) -> None:
        self.end_copies()
        with torch.no_grad():
            for name, tensor in self._second.items():
                tensor.copy_(self._shards[name])
            compute(self.unit, self._lent(self._second))

    def _swap(self, tried: Future[None], after: CopyEvent) -> None:
        tried.result()
        self._shards, self._second = self._second, self._shards
        self._bind(self._shards)
        self._send_back(self._shards, after)

    # ---- on the device -----------------------------------------------------------------------------------------

    def _update_on_device(self, compute: Compute) -> None:
        """Only the parameters are offloaded: they, or a buffer for new ones, are on the device during the update."""
        unit, home = self.unit, self._shards[PARAM]
        self.settle()
        lent = Shards.of(unit, self._states)
        if unit.master_is_param:
            param = self._copies.on_device(home.numel(), home.dtype)
            self._copies.to_device(param, home).hold_device()
            self._copies.used_here(param)
            lent.master_shard = param
        else:
            param = torch.zeros_like(home, device=unit.device)  # zeros, since the update does not write padding
        lent.param_shard = param
        compute(unit, lent)
        self._moving.append(self._copies.to_host(home, param))
