"""Runs the tests of `make gpu` on one virtual GPU, with values.

`python -m harness.virtual_gpu.rehearsal GUARD PYTEST_ARGUMENT..`; the last line is the result as JSON, see Result. The
tests are unchanged: what they import from torch.cuda is the virtual GPU, a model on the host moves to it when a runtime
takes it, and the reference computes what kernels would.
"""

from __future__ import annotations

import ctypes
import json
import os
import pkgutil
import sys
import warnings
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from harness.virtual_gpu.build import load_guard

RANKS = "several GPUs as processes over NCCL; the same functions run on CPU ranks in tests/benchmarks/test_gpu.py"
NOT_REHEARSED = {  # why, by the name of the test
    "test_the_triton_kernels_compile_and_agree_with_the_reference_on_this_gpu": (
        "Triton's launches need CUDA's driver; tests/kernels/ interprets the kernels and reads their machine code"
    ),
    "test_every_row_over_nccl_has_the_bits_of_plain_torch_in_fp64": RANKS,
    "test_hybrid_sharding_over_nccl_has_the_bits_of_plain_torch_in_fp64": RANKS,
    "test_runtimes_end_twice_and_are_followed_by_others_in_one_process": RANKS,
    "test_a_rank_out_of_memory_is_named_by_all_and_every_process_ends": RANKS,
    "test_states_on_the_host_give_one_result_in_every_row": (
        "4 times 14 rows of 24 steps take too long with values; the test of steps that overflow runs the same rows"
    ),
    "test_cuda_and_nccl_take_what_the_allowance_of_predictions_says": (
        "it measures the memory that CUDA and NCCL themselves take"
    ),
    "test_the_model_of_the_caching_allocator_reserves_what_torch_reserves": (
        "it compares with CUDA's own allocator, in processes of its own"
    ),
}


@dataclass
class Result:
    """The ids of the tests that were collected (without parameters), that passed, and that did not; the names of those
    that were left out; operations of the device, and pairs of accesses that are not ordered, in words."""

    collected: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    operations: int = 0
    unordered: list[str] = field(default_factory=list)


class Outcomes:
    """A plugin of pytest that leaves out what cannot be rehearsed, says why, and collects the outcomes."""

    def __init__(self) -> None:
        self.result = Result()

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        left_out = [item for item in items if item.originalname in NOT_REHEARSED]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        self.result.left_out = sorted({item.originalname for item in left_out})
        self.result.collected = sorted({item.nodeid.partition("[")[0] for item in items})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.result.passed.append(report.nodeid)
        elif not report.passed:
            self.result.others.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name in self.result.left_out:
            terminalreporter.write_line(f"not rehearsed: {name}: {NOT_REHEARSED[name]}")


def main() -> int:
    os.environ["ZLAB_KERNELS"] = "reference"
    guard = load_guard(sys.argv[1])
    import pytest
    import torch

    torch.set_num_threads(1)
    recorder, outcomes = _installed(guard), Outcomes()
    with recorder:
        code = pytest.main(sys.argv[2:], plugins=[outcomes])
    machine, result = recorder.devices.machine, outcomes.result
    result.operations = machine.operations
    result.unordered = [f"{pair.later} || {pair.earlier}" for pair in machine.disorders]
    print(json.dumps(asdict(result)))
    nothing_left = code == pytest.ExitCode.NO_TESTS_COLLECTED and result.left_out
    return int(bool(result.unordered)) if nothing_left else int(code) or int(bool(result.unordered))


def _installed(guard: ctypes.CDLL) -> Any:
    """The mode in which the tests run, with all stand-ins in their places."""
    import zero_runtime
    from harness.virtual_gpu import devices as stand_ins
    from harness.virtual_gpu import nccl, threads
    from harness.virtual_gpu.devices import Devices
    from harness.virtual_gpu.machine import Machine
    from harness.virtual_gpu.values import ValueRecorder

    for module in pkgutil.walk_packages(zero_runtime.__path__, "zero_runtime."):
        if not module.name.startswith("zero_runtime.kernels.triton"):
            import_module(module.name)
    machine = Machine()
    turns = threads.Turns(machine, lambda: recorder.in_thread())
    devices = Devices(guard, machine, turns, 0)
    recorder = ValueRecorder(devices)
    stand_ins.install(devices)
    threads.install(turns, "zero_runtime")
    nccl.register(devices, recorder.storages)
    _install_world(nccl.NAME)
    _install_facts(devices)
    _install_host_memory(recorder)
    _install_models()
    _install_kernels()
    _install_trace()
    return recorder


def _install_world(name: str) -> None:
    import torch.distributed as dist

    init = dist.init_process_group

    def init_virtual(backend: str, *, device_id: object = None, **settings: Any) -> None:
        init(name if backend == "nccl" else backend, **settings)

    dist.init_process_group = init_virtual


def _install_facts(devices: Any) -> None:
    """What torch.cuda says of the device, and what waits for it."""
    import torch

    cuda, machine = torch.cuda, devices.machine
    allocator = devices.allocator

    def memory_stats(device: Any = None) -> dict[str, int]:
        peaks = allocator.peaks()
        return {
            "requested_bytes.all.current": allocator.live,
            "requested_bytes.all.peak": peaks.tensors,
            "active_bytes.all.current": allocator.live + allocator.pending,
        }

    def set_sync_debug_mode(mode: str) -> None:
        """torch warns of operations that make the host wait, not of waits that a program asks for."""
        machine.syncs = _Warned() if mode == "warn" else []

    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.memory_stats = memory_stats  # type: ignore[assignment]
    cuda.reset_peak_memory_stats = lambda device=None: allocator.begin()
    cuda.set_sync_debug_mode = set_sync_debug_mode
    cuda._sleep = lambda cycles: machine.launch(devices.thread, devices.actor(), "sleep")
    cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment,return-value]
        name="virtual GPU", uuid="0", total_memory=1 << 40
    )


class _Warned(list[Any]):
    """A list of waits that warns of every one which an operation causes."""

    def append(self, sync: Any) -> None:
        super().append(sync)
        if sync.kind not in ("event", "stream", "device", "cudaHostRegister"):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=4)


def _install_host_memory(recorder: Any) -> None:
    """Page-locked memory of torch's own allocator, which waits for copies before it uses a block again; and addresses,
    by which the product knows whether two tensors are one."""
    import torch

    storages, kept = recorder.storages, []

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        kept.append(storages.lock(tensor.clone()))
        return kept[-1]

    address = torch.Tensor.data_ptr
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = lambda tensor, device=None: recorder.devices.is_locked(tensor)  # type: ignore
    torch.Tensor.data_ptr = lambda tensor: address(storages.value(tensor))  # type: ignore[method-assign]


def _install_models() -> None:
    """A model's parameters become tensors of the device as new parameters: a fake tensor cannot be the data of a real
    one."""
    import torch
    from torch import nn

    from zero_runtime.runtime import ZeroRuntime

    torch.__future__.set_overwrite_module_params_on_conversion(True)
    make = ZeroRuntime.__init__

    def on_device(model: nn.Module, device: torch.device) -> None:
        moved: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None and param.device != device:
                    if id(param) not in moved:
                        moved[id(param)] = nn.Parameter(param.detach().to(device), param.requires_grad)
                    module._parameters[name] = moved[id(param)]

    def making(
        self: ZeroRuntime, model: nn.Module, plan: Any, precision: Any, optimizer: Any, settings: Any, device: Any
    ) -> None:
        on_device(model, device)
        make(self, model, plan, precision, optimizer, replace(settings, read_host=read_host), device)

    def read_host(numbers: torch.Tensor) -> list[float]:
        found: list[float] = numbers.to("cpu").tolist()  # Tensor.tolist itself refuses fake tensors
        return found

    ZeroRuntime.__init__ = making  # type: ignore[method-assign]


def _install_kernels() -> None:
    """Attention and RMSNorm in one kernel, as on a GPU, for all threads: what they keep is right, their values are not.

    torch would compose them of operations of the host: it has no kernels of CUDA to choose.
    """
    import torch.nn.functional as F

    from zero_runtime.predict.memory.activation_trace import _attention
    from zero_runtime.predict.memory.cuda_norms import _rms_norm

    F.scaled_dot_product_attention = _attention
    F.rms_norm = partial(_rms_norm, F.rms_norm)


def _install_trace() -> None:
    """A trace has fake tensors of its own, which are not on this device."""
    from torch.utils._python_dispatch import _disable_current_modes

    from zero_runtime.predict.memory import activation_trace

    trace = activation_trace.trace_step

    def outside(*args: Any, **settings: Any) -> Any:
        with _disable_current_modes():
            return trace(*args, **settings)

    activation_trace.trace_step = outside


if __name__ == "__main__":
    sys.exit(main())
