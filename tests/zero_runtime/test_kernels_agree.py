"""The ranks of GPUs agree on the implementation of the kernels, or all refuse the mixture with the same error."""

from __future__ import annotations

import pytest
import torch
from harness.ranks import run_ranks

from zero_runtime import build
from zero_runtime.build import UnitBuilder, check_kernels
from zero_runtime.collectives import Collectives
from zero_runtime.errors import PlanError
from zero_runtime.kernels.registration import Chosen, chosen, prepare
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.settings import RuntimeSettings

TRITON, BROKEN = Chosen("triton"), Chosen("reference", "RuntimeError: no C compiler")
CPU = torch.device("cpu")


def test_one_implementation_is_accepted_whatever_its_trouble() -> None:
    check_kernels([TRITON] * 4)
    check_kernels([BROKEN, Chosen("reference", "ZLAB_KERNELS=reference")])
    check_kernels([None, None])  # nothing was prepared: tensors without memory


def test_a_mixture_is_refused_with_the_ranks_and_the_trouble() -> None:
    with pytest.raises(PlanError) as error:
        check_kernels([TRITON, TRITON, BROKEN, TRITON])
    assert str(error.value) == (
        "kernels: expected the same implementation on every rank, found triton on rank 0, 1, 3 and reference on rank 2 "
        "(RuntimeError: no C compiler); repair the machines of the ranks that use the reference, or set "
        "ZLAB_KERNELS=reference on all ranks"
    )


def _refused() -> str:
    collectives = Collectives(2, PhaseClock(CPU))
    device = torch.device("cuda", collectives.rank)
    build.chosen = lambda _: TRITON if collectives.rank else BROKEN
    with pytest.raises(PlanError) as error:
        UnitBuilder(
            ZeroPlan.from_stage(2), MixedPrecision(), RuntimeSettings(), collectives, device
        )._agree_on_kernels()
    return str(error.value)


def test_all_ranks_refuse_a_mixture_with_the_same_error() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second
    assert "found reference on rank 0 (RuntimeError: no C compiler) and triton on rank 1" in first


def test_what_was_chosen_is_known_after_prepare() -> None:
    assert chosen(torch.device("meta")) is None
    prepare(torch.device("meta"))
    assert chosen(torch.device("meta")) == Chosen("reference", "there are no kernels for meta")
    prepare(CPU)
    found = chosen(CPU)
    assert found is not None
    assert (found.name == "cpp") == (found.trouble is None)
