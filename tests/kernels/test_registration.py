"""Implementations are registered by device when it is prepared, and checked first: if one fails or gives wrong results,
the check reports why."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero_runtime.kernels import reference
from zero_runtime.kernels.cpu import operations
from zero_runtime.kernels.cpu.build import BuildError
from zero_runtime.kernels.registration import SCHEMAS, compiled_for, trouble_of

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def _like_the_reference(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(reference, name) for name in SCHEMAS} | changes)


def test_the_reference_passes_the_check() -> None:
    assert trouble_of(_like_the_reference(), CPU) is None


def test_an_implementation_that_does_not_compile_is_reported_in_one_line() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image\n  is available")

    assert trouble_of(_like_the_reference(accumulate_=broken), CPU) == "RuntimeError: no kernel image is available"


def test_an_implementation_with_wrong_results_is_reported() -> None:
    def off(values: torch.Tensor) -> torch.Tensor:
        return reference.sum_of_squares(values) * 1.1

    told = trouble_of(_like_the_reference(sum_of_squares=off), CPU)
    assert told is not None
    assert told.startswith("its results are off by up to")


def test_an_implementation_with_wrong_8_bit_moments_is_reported() -> None:
    def off(*arguments: torch.Tensor) -> None:
        reference.adamw8bit_(*arguments)
        arguments[4].sub_(5)

    assert trouble_of(_like_the_reference(adamw8bit_=off), CPU) is not None


# ---- registration ----------------------------------------------------------------------------------------------------


def test_all_implementations_of_an_operation_take_the_same_arguments() -> None:
    modules = [operations]
    if importlib.util.find_spec("triton") is not None:
        modules.append(importlib.import_module("zero_runtime.kernels.triton.operations"))
    for name in SCHEMAS:
        for module in modules:
            assert inspect.signature(getattr(module, name)) == inspect.signature(getattr(reference, name)), name


REGISTERED = """
import torch
from zero_runtime.kernels import ops
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(has("zero_lab::accumulate_", "CPU"), ops.prepare(torch.device("cpu")), has("zero_lab::accumulate_", "CPU"))
ops.prepare(torch.device("cpu:0"))
print(ops.prepare(torch.device("meta")), float(ops.sum_of_squares(torch.full((5,), 2.0))))
"""


def registered(**environment: str) -> list[str]:
    """What a fresh process prints: whether a CPU kernel is registered before, the result of `prepare`, and after."""
    arguments = [sys.executable, "-c", REGISTERED]
    run = subprocess.run(arguments, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.full
def test_prepare_registers_the_compiled_kernels_once_and_only_if_they_can_be_used() -> None:
    try:
        operations.library()
    except BuildError as error:
        pytest.skip(f"no C++ on this machine: {error}")
    assert registered(ZLAB_KERNELS="cpp") == ["False", "True", "True", "False", "20.0"]
    assert registered(ZLAB_KERNELS="reference") == ["False", "False", "False", "False", "20.0"]


def test_the_environment_variable_chooses_the_implementation_and_refuses_unknown_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        operations.library()
    except BuildError as error:
        pytest.skip(f"no C++ on this machine: {error}")
    for choice, module in (("auto", operations), ("cpp", operations), ("reference", None)):
        monkeypatch.setenv("ZLAB_KERNELS", choice)
        assert compiled_for(CPU) is module
    monkeypatch.setenv("ZLAB_KERNELS", "fast")
    with pytest.raises(ValueError, match="ZLAB_KERNELS: expected one of auto, reference, cpp, found 'fast'"):
        compiled_for(CPU)
