"""Locations of units in a scratch file: one for CPU runs, one for a device with separate memory."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from zero_runtime.offload.buffers import Slots
from zero_runtime.offload.copy_streams import Copies, CopyEvent
from zero_runtime.offload.device_host import Crossing
from zero_runtime.offload.file_layout import OffloadedUnit
from zero_runtime.shard_location import ShardLocation
from zero_runtime.state_tier import Shards


class NvmeSharedLocation(ShardLocation):
    """On a CPU: the unit computes in the same memory as the slots, so only the file is separate."""

    def __init__(self, slots: Slots, record: OffloadedUnit) -> None:
        self._slots, self._record, self._unit = slots, record, record.unit

    def begin_fetch(self) -> None:
        if self._record.holds_params:
            self._slots.begin_params(self._record)

    def fetch(self) -> torch.Tensor | None:
        return self._slots.fetch_params(self._record) if self._record.holds_params else None

    def drop(self) -> None:
        self._slots.drop_params(self._record)

    def end_bringing(self) -> None:
        """A no-op: a gather reads the parameters in place."""

    def begin_update(self) -> None:
        """A no-op: an update has ended when the call that makes it returns."""

    def lent(self, slot: torch.Tensor) -> Shards:
        """The shards that an update works on."""
        return self._record.lent(slot, self._unit.grad_shard, self._unit.param_shard)

    def send_new_params(self) -> None:
        """A no-op: new parameters are in place already, or are written with the record."""

    def end_update(self, error: BaseException | None = None) -> None:
        """A no-op: see `begin_update`."""


class NvmeSeparateLocation(Crossing):
    """With a GPU: slots and update are on the host; gradients and parameters are copied between host and device.

    Parameters are stored on the device, in host memory or in the file; `offloaded_params` returns the latter two.
    """

    def __init__(self, slots: Slots, record: OffloadedUnit, copies: Copies) -> None:
        unit = record.unit
        super().__init__(unit, copies, staged=not record.holds_params and not unit.parameters.params_offloaded)
        self._slots, self._record = slots, record
        self._after: CopyEvent | None = None
        self._home: torch.Tensor | None = None
        if unit.parameters.params_offloaded and not record.holds_params:
            self._home = copies.on_host(unit.layout.shard_numel, unit.parameters.param_dtype)
            unit.parameters.bind_shards(self._home, None)

    def offloaded_params(self) -> torch.Tensor | None:
        return self._slots.fetch_params(self._record) if self._record.holds_params else self._home

    def begin_fetch(self) -> None:
        """Parameters in a file are read to the host ahead of the gather, and copied to the device by the gather."""
        if not self._record.holds_params:
            super().begin_fetch()
        elif self.is_updated:
            self._slots.begin_params(self._record)

    def drop(self) -> None:
        if self._record.holds_params:
            self.end_bringing()
        super().drop()
        self._slots.drop_params(self._record)

    # ---- an update, in another thread ----------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Announce an update; work issued on the device before this call reads the old parameters."""
        self.job, self._after = Future(), self._copies.here()

    def lent(self, slot: torch.Tensor) -> Shards:
        """The shards that an update works on; blocks until the gradient has arrived on the host."""
        self.end_copies()
        if self._home is not None:
            param = self._home
        else:
            param = self.unit.param_shard if self.staging is None else self.staging
        return self._record.lent(slot, self.grad, param)

    def send_new_params(self) -> None:
        """Start copying new parameters to the device, unless they are written with the record or stay on the host."""
        if self._home is None and self.staging is not None:
            assert self._after is not None
            self.send_params(self.staging, self._after)

    def end_update(self, error: BaseException | None = None) -> None:
        """Notify waiters that the unit is updated and written, or of the error. Only the first call counts."""
        job = self.job  # None after a forward has waited for it
        if job is None or job.done():
            return
        if error is None:
            job.set_result(None)
        else:
            job.set_exception(error)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        found = {"params": self._home, "grads": self.grad, "staging": self.staging}
        return {name: [] if tensor is None else [tensor] for name, tensor in found.items()}


NvmeLocation = NvmeSharedLocation | NvmeSeparateLocation
