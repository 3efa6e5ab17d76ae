"""Units whose shards are stored in host memory, separate from the device's memory, and are updated there.

A unit's gradient is copied to the host when its reduction ends. When the norm is known, one host thread updates the
units in the order of the next forward and sends each unit's parameters back to the device. The forward waits only for
the unit that it is about to gather. If the parameters are offloaded too, they are copied to the device ahead of their
gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from zero_runtime.offload.copy_streams import Copies, CopyEvent
from zero_runtime.offload.device_host import Crossing
from zero_runtime.state_tier import MASTER, PARAM, Shards, StatesOf, StateTier, Update, tensors_of
from zero_runtime.unit import Unit


class HostTier(StateTier):
    """All units of one rank that are offloaded to host memory."""

    def __init__(self, units: Iterable[Unit], states_of: StatesOf, copies: Copies) -> None:
        self._copies = copies
        self._worker = ThreadPoolExecutor(1, "host-step", initializer=copies.enter_thread)
        self._locations = {unit.name: HostLocation(unit, states_of(unit), copies, self._worker) for unit in units}

    @contextmanager
    def resident(self, unit: Unit, *, writes: bool, fresh: bool = False) -> Iterator[None]:
        """The shards are always in memory, so this only waits for running work on the unit. `writes` also drops copies
        on the device, which become stale."""
        location = self._locations[unit.name]
        location.settle()
        if fresh:
            location.zero_states()
        if writes:
            location.end_bringing()
            unit.drop_full()
            location.drop()
        yield

    def update(self, units: Sequence[Unit], update: Update) -> None:
        """Returns before the update is done if the states are offloaded."""
        self._copies.release_sources()  # gradients; the first update needs the last of them anyway
        for unit in units:
            self._locations[unit.name].begin_update(update)
        self._copies.release_sources()  # parameters that were updated on the device

    def forget(self) -> None:
        self._copies.release_sources()

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        return tensors_of(self._locations.values())

    def close(self) -> None:
        self._worker.shutdown()
        for location in self._locations.values():
            with suppress(Exception):  # the step that failed has already been reported
                location.settle()
        self._copies.close()
        self._locations.clear()


class HostLocation(Crossing):
    """One unit's shards on the host, and the transfers and updates of them that are under way."""

    def __init__(
        self,
        unit: Unit,
        states: dict[str, torch.Tensor],
        copies: Copies,
        worker: ThreadPoolExecutor,
    ) -> None:
        # A master in the parameters' dtype is copied to the device directly, without a staging buffer.
        super().__init__(
            unit,
            copies,
            staged=not unit.parameters.params_offloaded and unit.parameters.master_dtype != unit.parameters.param_dtype,
        )
        self._states, self._worker = states, worker
        self._shards = self._allocate()
        unit.parameters.bind_shards(self._shards.get(PARAM), self._shards.get(MASTER))
        for name in self._states.keys() & self._shards.keys():
            self._states[name] = self._shards[name]
        unit.parameters.offload_to(self)

    def _allocate(self) -> dict[str, torch.Tensor]:
        unit, found = self.unit, {}
        if unit.parameters.master_offloaded:
            found[MASTER] = self._copies.on_host(unit.layout.shard_numel, unit.parameters.master_dtype)
        if unit.parameters.states_offloaded:
            for name, state in self._states.items():
                found[name] = self._copies.on_host(state.numel(), state.dtype)
        if unit.parameters.params_offloaded:
            found[PARAM] = self._copies.on_host(unit.layout.shard_numel, unit.parameters.param_dtype)
        return found

    def zero_states(self) -> None:
        for name in self._states.keys() & self._shards.keys():
            self._shards[name].zero_()

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        shards = self._shards
        staging = [] if self.staging is None else [self.staging]
        return {
            "params": [shards[PARAM]] if PARAM in shards else [],
            "grads": [] if self.grad is None else [self.grad],
            "optimizer": [tensor for name, tensor in shards.items() if name != PARAM],
            "staging": staging,
        }

    # ---- called by the unit ------------------------------------------------------------------------------------

    def offloaded_params(self) -> torch.Tensor | None:
        return self._shards.get(PARAM)

    # ---- update ------------------------------------------------------------------------------------------------

    def begin_update(self, update: Update) -> None:
        """Update on the host in a separate thread or, if the states are on the device, immediately on the device."""
        self.end_bringing()
        self.drop()
        if self.unit.parameters.states_offloaded:
            self.job = self._worker.submit(self._update, update, self._copies.here())
        else:
            self._update_on_device(update)

    def _update(self, update: Update, after: CopyEvent) -> None:
        """`after`: event that follows all work on the device that reads the unit's parameters."""
        self.end_copies()
        unit, shards = self.unit, self._shards
        master = shards[PARAM if unit.parameters.master_is_param else MASTER]
        param = shards.get(PARAM, master if self.staging is None else self.staging)
        states = {name: shards[name] for name in self._states}
        with torch.no_grad():
            update(unit, Shards(unit.layout, master, self.grad, param, states))
        if PARAM not in shards:
            self.send_params(param, after)

    # ---- on the device -----------------------------------------------------------------------------------------

    def _update_on_device(self, update: Update) -> None:
        """Only the parameters are offloaded: they, or a buffer for new ones, are on the device during the update."""
        unit, home = self.unit, self._shards[PARAM]
        lent = Shards.of(unit, self._states)
        if unit.parameters.master_is_param:
            param, event = self._copies.bring(home, self._moving)
            event.hold_device()
            lent.master_shard = param
        else:
            param = torch.zeros_like(home, device=unit.device)  # zeros, since the update does not write padding
        lent.param_shard = param
        update(unit, lent)
        self._moving = [self._copies.to_host(home, param)]  # copies to the host run in order
