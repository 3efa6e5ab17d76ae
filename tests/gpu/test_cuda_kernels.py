"""On a GPU, the Triton kernels compile and agree with the reference, so that no operation falls back to it."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_the_triton_kernels_compile_and_agree_with_the_reference_on_this_gpu() -> None:
    from zero_runtime.kernels.registration import trouble_of
    from zero_runtime.kernels.triton import operations

    assert trouble_of(operations, torch.device("cuda")) is None
