"""Transfers of one unit's gradients and parameters between its device and host memory.

If the update runs on the host, gradients are copied there when their reduction ends, and new parameters are copied
back when they are ready. Parameters that are offloaded to the host are copied to the device for each gather. Waits
are those of copy_streams.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

import torch

from zero_runtime.offload.copy_streams import Copies, CopyEvent
from zero_runtime.shard_location import ShardLocation
from zero_runtime.unit import Unit


class Crossing(ShardLocation, ABC):
    """The transfers of one unit, and its update while that runs in another thread.

    grad [S] grad_dtype: the gradient on the host; None if the optimizer states are not offloaded. staging [S]
    param_dtype: new parameters for the device, with `staged` and offloaded states. job: the update; a forward waits
    for it.
    """

    def __init__(self, unit: Unit, copies: Copies, *, staged: bool) -> None:
        self.unit = unit
        self.grad: torch.Tensor | None = None
        self.staging: torch.Tensor | None = None
        if unit.parameters.states_offloaded:
            self.grad = copies.on_host(unit.layout.shard_numel, unit.gradients.grad_dtype)
            if staged:
                self.staging = copies.on_host(
                    unit.layout.shard_numel, unit.parameters.param_dtype
                ).zero_()  # padding too
        self.job: Future[None] | None = None
        self._copies = copies
        self._moving: list[CopyEvent] = []  # copies that read or write host tensors
        self._back: CopyEvent | None = None  # copy of new parameters that the device has not waited for
        self._brought: tuple[torch.Tensor, CopyEvent] | None = None  # param_shard [S] on the device, for a gather

    @abstractmethod
    def offloaded_params(self) -> torch.Tensor | None:
        """The offloaded param_shard [S] in host memory, else None; may block until it has been read."""

    # ---- called by the unit ------------------------------------------------------------------------------------

    def begin_fetch(self) -> None:
        if self.unit.parameters.params_offloaded and self._brought is None and self.is_updated:
            self._bring()

    def _bring(self) -> tuple[torch.Tensor, CopyEvent]:
        source = self.offloaded_params()
        assert source is not None
        self._brought = self._copies.bring(source, self._moving)
        return self._brought

    def fetch(self) -> torch.Tensor | None:
        """Block until the unit is updated. The device, not the host, waits for the copy."""
        self.end_job()
        if self.unit.parameters.params_offloaded:
            buffer, event = self._brought or self._bring()
            event.hold_device()
            return buffer
        if self._back is not None:
            self._back.hold_device()
            self._back = None
        return None

    def drop(self) -> None:
        """Call it after `fetch` or `end_bringing`: the memory is reused by work that is issued afterwards."""
        self._brought = None

    def send_grad(self) -> None:
        if self.grad is None:
            return
        self.end_job()  # which reads the last step's gradient; the host waits for no copy here
        assert self.unit.grad_shard is not None
        self._moving.append(self._copies.to_host(self.grad, self.unit.grad_shard))
        self.unit.gradients.give_away(self.grad)

    def settle(self) -> None:
        self.end_job()
        self.end_copies()

    # ---- around an update --------------------------------------------------------------------------------------

    @property
    def is_updated(self) -> bool:
        return self.job is None or self.job.done()

    def end_job(self) -> None:
        """Block until the unit is updated; raises the error of an update that failed."""
        if self.job is not None:
            self.job.result()
            self.job = None

    def end_bringing(self) -> None:
        """Block until the copy for a gather has left the host; call before offloaded parameters change or are freed."""
        if self._brought is not None:
            _, event = self._brought
            event.wait()

    def end_copies(self) -> None:
        """Block until copies of gradients and new parameters have ended. Call it before an update, from any thread."""
        for event in self._moving:
            event.wait()
        self._moving.clear()

    def send_params(self, source: torch.Tensor, after: CopyEvent) -> None:
        """Copy new parameters to the device after the work that reads the old ones (`after`). From any thread."""
        with torch.no_grad():
            self._back = self._copies.to_device(self.unit.param_shard, source, [after])
        self._moving = [self._back]
