"""A profiler's trace gives each moment, each kernel and each allocation of a step its phase and module."""

from __future__ import annotations

from typing import Any

import pytest

from zero_runtime.profile.trace import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GATHERED,
    MODULE,
    OUTSIDE,
    PHASE,
    RECOMPUTE,
    SAMPLE,
    STEP,
    Context,
    memory_events,
    phase_times,
    read_step,
    sample_times,
    times_ms,
)

NODE = "autograd::engine::evaluate_function: "


def span(name: str, start: float, end: float, *, tid: int = 1, cat: str = "user_annotation", **args: Any) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": start, "dur": end - start, "args": args}


def memory(at: float, nbytes: int, *, address: int = 7, kind: int = 0, tid: int = 1, index: int = 0) -> dict:
    args = {"Device Type": kind, "Addr": address, "Bytes": nbytes, "Total Allocated": 0, "Ev Idx": index}
    return {"ph": "i", "name": "[memory]", "tid": tid, "ts": at, "args": args}


# A step of 100 ms: a forward with a module in a module, a wait in it, and a backward that recomputes the inner one.
EVENTS = [
    span(STEP, 0, 100_000),
    span(f"{PHASE}forward", 10_000, 40_000),
    span(f"{MODULE}outer", 12_000, 38_000),
    span(f"{PHASE}{COMMUNICATION}", 13_000, 15_000),
    span(f"{MODULE}outer.inner", 20_000, 30_000),
    span(f"{PHASE}backward", 40_000, 80_000),
    span(f"{NODE}MmBackward0", 45_000, 60_000, cat="cpu_op", **{"Sequence number": 5}),
    span(f"{MODULE}outer.inner", 46_000, 50_000),
    span(f"{NODE}torch::autograd::AccumulateGrad", 60_000, 65_000, cat="cpu_op"),
    span(f"{NODE}SumBackward0", 65_000, 66_000, cat="cpu_op", **{"Sequence number": 9}),
    span(f"{PHASE}optimizer", 80_000, 90_000),
    span("aten::mm", 81_000, 82_000, cat="cpu_op"),
]


def module_of(number: int) -> str | None:
    return {5: "outer.inner"}.get(number)


def read(*more: dict) -> Any:
    return read_step({"traceEvents": [*EVENTS, *more]}, module_of)


def test_each_moment_of_a_step_on_the_cpu_belongs_to_one_phase_and_module() -> None:
    assert times_ms(read()) == pytest.approx(
        {
            ("other", None, OUTSIDE): 20,
            ("forward", None, OUTSIDE): 4,
            (COMMUNICATION, None, OUTSIDE): 2,
            ("forward", "outer", FORWARD): 14,
            ("forward", "outer.inner", FORWARD): 10,
            ("backward", None, OUTSIDE): 19,
            ("backward", "outer.inner", BACKWARD): 11,
            ("backward", "outer.inner", RECOMPUTE): 4,
            ("backward", GATHERED, OUTSIDE): 5,
            ("backward", None, BACKWARD): 1,
            ("optimizer", None, OUTSIDE): 10,
        }
    )
    assert sum(times_ms(read()).values()) == pytest.approx(100)


def test_a_kernel_belongs_to_the_moment_that_issued_it_on_the_thread_that_did() -> None:
    more = [
        span("cudaLaunchKernel", 21_000, 21_010, cat="cuda_runtime", correlation=1),
        span("gemm", 500_000, 503_000, tid=9, cat="kernel", correlation=1),
        # autograd's own thread, which has no phases
        span(f"{NODE}MmBackward0", 45_000, 60_000, tid=2, cat="cpu_op", **{"Sequence number": 5}),
        span("cuLaunchKernel", 47_000, 47_010, tid=2, cat="cuda_driver", correlation=2),
        span("gemm", 600_000, 605_000, tid=9, cat="kernel", correlation=2),
        span("cudaLaunchKernel", 22_000, 22_010, cat="cuda_runtime", correlation=3),
        span("ncclDevKernel_AllGather", 700_000, 701_000, tid=9, cat="kernel", correlation=3),
        span("Memcpy DtoH", 700_000, 702_000, tid=9, cat="gpu_memcpy", correlation=77),
        span(f"{MODULE}outer", 500_000, 900_000, tid=9, cat="gpu_user_annotation"),
    ]
    on_gpu = span(STEP, 450_000, 950_000, tid=9, cat="gpu_user_annotation")
    step = read_step({"traceEvents": [on_gpu, *EVENTS, *more]}, module_of)
    assert (step.start_us, step.end_us) == (0, 100_000)
    assert times_ms(step) == pytest.approx(
        {
            ("forward", "outer.inner", FORWARD): 3,
            ("backward", "outer.inner", BACKWARD): 5,
            (COMMUNICATION, None, OUTSIDE): 1,
            ("other", None, OUTSIDE): 2,
        }
    )


def test_allocations_of_the_step_on_the_device_have_the_context_of_their_moment() -> None:
    more = [
        memory(30_000.0, 64, index=2),
        memory(25_000.0, 512, index=1),
        memory(14_000.0, 128),
        memory(-5.0, 999),
        memory(14_000.0, 7, kind=1),
        memory(48_000.0, -512),
    ]
    found = memory_events(read(*more), "cpu")
    assert [(one.nbytes, one.context) for one in found] == [
        (128, Context(COMMUNICATION, "outer", FORWARD)),
        (512, Context("forward", "outer.inner", FORWARD)),
        (64, Context("forward", "outer", FORWARD)),
        (-512, Context("backward", "outer.inner", RECOMPUTE)),
    ]
    assert [one.nbytes for one in memory_events(read(*more), "cuda")] == [7]


def test_samples_and_phases_are_found_with_their_times() -> None:
    step = read(span(f"{SAMPLE}3", 41.0, 42.0), span(f"{SAMPLE}12", 43.0, 44.0))
    assert sample_times(step) == {3: 41.0, 12: 43.0}
    assert phase_times(step, ("backward", "forward")) == [("forward", 10_000, 40_000), ("backward", 40_000, 80_000)]
