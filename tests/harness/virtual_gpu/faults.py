"""Named faults in the order of the device's work, made on purpose to show that the virtual GPU finds them.

Each imitates a plausible mistake and belongs to one row, whose run it spoils. `apply` patches the product in the
process that runs the row. Waits that are left out one by one need no names: see test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from harness.virtual_gpu.row import Row

UNORDERED, CURRENT = "unordered accesses", "another device is current"
CONTEXTS, WAITS = "contexts on other devices", "waits of the host"
EVENTS, DESTRUCTION, MEMORY = "events that are kept", "order of destruction", "memory of the device"
PLAIN, BOTH = Row(), Row(offload="both")
OPTIMIZER = Row(stage=2, offload="optimizer")
LATE = Row(stage=2, offload="optimizer", late=True)
ACTIVATIONS = Row(offload="activations")
HYBRID = Row(shard_ranks=4)
LARGE = Row(width=128, vocab=512, blocks=8, tokens=16, traced=True)


@dataclass(frozen=True)
class Fault:
    """rule: the rule of checks.py that the fault breaks, at least."""

    row: Row
    rule: str
    apply: Callable[[], None]


FAULTS: dict[str, Fault] = {}


def fault(row: Row, rule: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        FAULTS[function.__name__] = Fault(row, rule, function)
        return function

    return register


def apply(name: str) -> None:
    FAULTS[name].apply()


def after(owner: Any, name: str, extra: Callable[..., object]) -> None:
    """Call `extra` with the same arguments whenever a method has returned."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        extra(*args, **kwargs)
        return result

    setattr(owner, name, both)


def before(owner: Any, name: str, extra: Callable[..., object]) -> None:
    """Call `extra` with the same arguments whenever a method is called."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        extra(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, both)


def left_out(owner: Any, name: str) -> None:
    """The method does nothing."""
    setattr(owner, name, lambda *_args, **_kwargs: None)


# ---- devices ---------------------------------------------------------------------------------------------------------


@fault(PLAIN, CURRENT)
def nobody_sets_the_device() -> None:
    from zero_runtime import runtime

    runtime.make_current = lambda device: device  # type: ignore[assignment]


@fault(PLAIN, CURRENT)
def a_step_is_called_with_another_device_current() -> None:
    import torch

    from zero_runtime.runtime import ZeroRuntime

    before(ZeroRuntime, "step", lambda *_: torch.cuda.set_device(0))


@fault(BOTH, CONTEXTS)
def the_thread_of_updates_keeps_its_first_device() -> None:
    from zero_runtime.offload.copy_streams import CudaCopies

    left_out(CudaCopies, "enter_thread")


# ---- memory that is freed or written too early -----------------------------------------------------------------------


@fault(PLAIN, UNORDERED)
def full_parameters_are_freed_while_they_are_gathered() -> None:
    from zero_runtime.unit_parameters import UnitParameters

    def free(self: UnitParameters) -> None:
        storage = self.unsharded_param.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)

    after(UnitParameters, "start_gather", free)


@fault(Row(stage=2), UNORDERED)
def a_gradient_is_freed_while_it_is_reduced() -> None:
    from zero_runtime.unit_gradients import UnitGradients

    def free(self: UnitGradients) -> None:
        assert self.unsharded_grad is not None
        self.unsharded_grad.untyped_storage().resize_(0)

    after(UnitGradients, "reduce", free)


@fault(Row(stage=2), UNORDERED)
def a_gradient_is_zeroed_while_it_is_reduced() -> None:
    from zero_runtime.unit_gradients import UnitGradients

    def zero(self: UnitGradients) -> None:
        assert self.unsharded_grad is not None
        self.unsharded_grad.zero_()

    after(UnitGradients, "reduce", zero)


@fault(Row(stage=2), UNORDERED)
def the_norm_is_taken_while_a_gradient_is_reduced() -> None:
    from zero_runtime.unit_gradients import UnitGradients

    after(UnitGradients, "reduce", lambda self: self._reducing.out.square())


@fault(PLAIN, UNORDERED)
def a_shard_is_updated_while_it_is_gathered() -> None:
    from zero_runtime.unit_parameters import UnitParameters

    after(UnitParameters, "start_gather", lambda self: self.param_shard.mul_(1.0))


@fault(HYBRID, UNORDERED)
def the_gradient_of_a_reduction_is_not_held_for_the_all_reduce() -> None:
    from zero_runtime import collectives

    make = collectives.Pending.__init__

    def holding_nothing(self: Any, wait: Any = None, then: Any = None, held: Any = ()) -> None:
        make(self, wait, then)

    collectives.Pending.__init__ = holding_nothing  # type: ignore[method-assign]
    from zero_runtime.unit_gradients import UnitGradients

    def forget(self: Any) -> None:
        self.unsharded_grad, self._flats = self.unsharded_grad.new_empty(0), ()

    after(UnitGradients, "reduce", forget)


# ---- copies ----------------------------------------------------------------------------------------------------------


@fault(OPTIMIZER, UNORDERED)
def the_source_of_a_copy_is_not_held() -> None:
    from zero_runtime.offload.copy_streams import HeldSources

    left_out(HeldSources, "add")


@fault(ACTIVATIONS, UNORDERED)
def the_source_of_an_activation_is_not_held() -> None:
    from zero_runtime.offload.copy_streams import HeldSources

    left_out(HeldSources, "add")


@fault(ACTIVATIONS, UNORDERED)
def the_held_source_is_released_without_a_wait() -> None:
    from zero_runtime.offload.copy_streams import HeldSources

    def release(self: HeldSources, count: int) -> None:
        while len(self._held) > count:
            self._held.popleft()

    HeldSources._release = release  # type: ignore[method-assign]


@fault(BOTH, UNORDERED)
def what_is_brought_is_allocated_on_the_stream_of_the_copy() -> None:
    import torch

    from zero_runtime.offload.copy_streams import CudaCopies

    def bring(self: CudaCopies, source: torch.Tensor, after: Any = ()) -> Any:
        with torch.cuda.stream(self._up):
            target = torch.empty(source.numel(), dtype=source.dtype, device=self._device)
        return target, self.to_device(target, source, after)

    CudaCopies.bring = bring  # type: ignore[method-assign]


@fault(BOTH, UNORDERED)
def a_copy_begins_before_its_target_is_free() -> None:
    import torch

    from zero_runtime.offload.copy_streams import CudaCopies

    def bring(self: CudaCopies, source: torch.Tensor, after: Any = ()) -> Any:
        target = torch.zeros(source.numel(), dtype=source.dtype, device=self._device)
        return target, self.to_device(target, source, after)

    CudaCopies.bring = bring  # type: ignore[method-assign]


@fault(OPTIMIZER, UNORDERED)
def the_event_of_a_copy_is_recorded_before_it() -> None:
    from zero_runtime.offload import copy_streams

    def to_host(self: Any, target: Any, source: Any) -> Any:
        import torch

        self._sources.make_room()
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        event = copy_streams._Event(self._down)
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        self._sources.add(source, event)
        return event

    copy_streams.CudaCopies.to_host = to_host  # type: ignore[method-assign]


@fault(OPTIMIZER, UNORDERED)
def the_event_of_a_copy_is_recorded_on_another_stream() -> None:
    from zero_runtime.offload import copy_streams

    make = copy_streams._Event.__init__

    def elsewhere(self: Any, stream: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        make(self, torch.cuda.default_stream(stream.device), *args, **kwargs)

    copy_streams._Event.__init__ = elsewhere  # type: ignore[method-assign]


@fault(BOTH, UNORDERED)
def host_memory_is_unlocked_while_it_is_copied() -> None:
    import torch

    from zero_runtime.offload.copy_streams import CudaCopies

    close = CudaCopies.close

    def closing(self: CudaCopies) -> None:
        here = torch.empty(1 << 10, device=self._device)
        there = self.on_host(1 << 10, torch.float32)
        self.to_host(there, here)
        synchronize, torch.cuda.synchronize = torch.cuda.synchronize, lambda _=None: None
        try:
            close(self)
        finally:
            torch.cuda.synchronize = synchronize

    CudaCopies.close = closing  # type: ignore[method-assign]


@fault(BOTH, WAITS)
def host_memory_is_not_locked() -> None:
    from zero_runtime.offload.copy_streams import PageLocked, host_tensor

    PageLocked.allocate = lambda self, numel, dtype: host_tensor(numel, dtype)  # type: ignore[method-assign]


@fault(OPTIMIZER, WAITS)
def a_gradient_is_copied_with_the_host_waiting() -> None:
    from zero_runtime.offload.copy_streams import CudaCopies

    after(CudaCopies, "to_host", lambda self, target, source: target.copy_(source))


# ---- threads ---------------------------------------------------------------------------------------------------------


@fault(LATE, WAITS)
def the_forward_does_not_wait_for_the_update() -> None:
    from zero_runtime.offload.device_host import Crossing

    left_out(Crossing, "end_job")


@fault(BOTH, UNORDERED)
def the_update_does_not_wait_for_the_copies() -> None:
    from zero_runtime.offload.device_host import Crossing

    Crossing.end_copies = lambda self: self._moving.clear()  # type: ignore[method-assign]


@fault(Row(offload="both nvme"), UNORDERED)
def a_slot_is_reused_while_it_is_copied() -> None:
    from zero_runtime.offload.nvme_locations import NvmeSeparateLocation

    left_out(NvmeSeparateLocation, "end_bringing")


# ---- the host --------------------------------------------------------------------------------------------------------


@fault(PLAIN, WAITS)
def the_loss_is_read_in_every_backward() -> None:
    from zero_runtime.runtime import ZeroRuntime

    after(ZeroRuntime, "backward", lambda self, *_: float(self._loss))


@fault(PLAIN, WAITS)
def a_count_is_copied_to_the_device() -> None:
    import torch

    from zero_runtime.runtime import ZeroRuntime

    before(ZeroRuntime, "sum_over_ranks", lambda self, count: torch.tensor(count, device=self.device))


@fault(PLAIN, WAITS)
def the_host_waits_for_the_device_after_each_gather() -> None:
    import torch

    from zero_runtime.unit_parameters import UnitParameters

    after(UnitParameters, "end_gather", lambda self: torch.cuda.synchronize())


@fault(PLAIN, EVENTS)
def nobody_reads_the_clock_that_runs() -> None:
    from zero_runtime.runtime import ZeroRuntime

    after(ZeroRuntime, "__init__", lambda self, *_, **__: self.clock.start())


@fault(PLAIN, DESTRUCTION)
def groups_are_destroyed_in_the_order_of_making() -> None:
    import torch.distributed as dist

    from zero_runtime.world import RankGroups

    def destroy(self: RankGroups) -> None:
        for group in self:
            if group is not None:
                dist.destroy_process_group(group)

    RankGroups.destroy = destroy  # type: ignore[method-assign]


# ---- memory ----------------------------------------------------------------------------------------------------------


@fault(ACTIVATIONS, MEMORY)
def the_source_of_a_copy_is_recorded_on_its_stream() -> None:
    from zero_runtime.offload.copy_streams import CudaCopies

    copy = CudaCopies.to_host

    def to_host(self: CudaCopies, target: Any, source: Any) -> Any:
        event = copy(self, target, source)
        source.record_stream(self._down)
        self._sources._held.clear()
        return event

    CudaCopies.to_host = to_host  # type: ignore[method-assign]


@fault(LARGE, MEMORY)
def every_unit_is_gathered_ahead() -> None:
    from zero_runtime.plan import Phase
    from zero_runtime.schedule import Schedule

    gather = Schedule._gather

    def all_of_them(self: Schedule, unit: Any) -> None:
        for ahead in self._order[Phase.FORWARD] if self._ahead else ():
            ahead.unshard()
        gather(self, unit)

    Schedule._gather = all_of_them  # type: ignore[method-assign]


@fault(replace(LARGE, stage=2), MEMORY)
def full_gradients_are_kept() -> None:
    from zero_runtime.unit_gradients import UnitGradients

    kept: list[Any] = []
    before(UnitGradients, "wait_reduce", lambda self: kept.append(self.unsharded_grad))
    from zero_runtime.runtime import ZeroRuntime

    after(ZeroRuntime, "step", lambda *_: kept.clear())
