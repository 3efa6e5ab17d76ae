"""An implementation is checked before it is used: if it fails or gives wrong results, the check reports why."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from zero_runtime.kernels import reference
from zero_runtime.kernels.backends import trouble_of

CPU = torch.device("cpu")


def _like_the_reference(**changes: object) -> SimpleNamespace:
    names = ("adamw", "accumulate", "sum_of_squares", "lamb_moments", "lamb_squares", "lamb", "adamw8bit")
    return SimpleNamespace(**{name: getattr(reference, name) for name in names} | changes)


def test_the_reference_passes_the_check() -> None:
    assert trouble_of(_like_the_reference(), CPU) is None


def test_an_implementation_that_does_not_compile_is_reported_in_one_line() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image\n  is available")

    assert trouble_of(_like_the_reference(accumulate=broken), CPU) == "RuntimeError: no kernel image is available"


def test_an_implementation_with_wrong_results_is_reported() -> None:
    def off(values: torch.Tensor) -> torch.Tensor:
        return reference.sum_of_squares(values) * 1.1

    told = trouble_of(_like_the_reference(sum_of_squares=off), CPU)
    assert told is not None
    assert told.startswith("its results are off by up to")


def test_an_implementation_with_wrong_8_bit_moments_is_reported() -> None:
    def off(*arguments: torch.Tensor) -> None:
        reference.adamw8bit(*arguments)
        arguments[4].sub_(5)

    assert trouble_of(_like_the_reference(adamw8bit=off), CPU) is not None
