"""The specification of AdamW is torch's own, bit for bit, at every length and in pieces of any size."""

from __future__ import annotations

import pytest
import torch

from kernels import reference

LENGTHS = (0, 1, 15, 16, 17, 65536, 65537, 100003)
STEPS = 5
LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
ONE = torch.ones(())


def settings(step: int) -> reference.AdamW:
    return reference.AdamW(LR / step, *BETAS, EPS, DECAY, step)


def weights_of(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def grads_of(numel: int, step: int) -> torch.Tensor:
    """Over many magnitudes, a few of them zero."""
    generator = torch.Generator().manual_seed(1000 + step)
    grad = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-12, 4, (numel,), generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < 0.05, 0.0, grad)


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ours(numel: int, *, scale: torch.Tensor = ONE, grad_dtype: torch.dtype = torch.float32) -> State:
    master, first, second = weights_of(numel), torch.zeros(numel), torch.zeros(numel)
    for step in range(1, STEPS + 1):
        reference.adamw(master, grads_of(numel, step).to(grad_dtype), first, second, scale, settings(step))
    return master, first, second


def torchs(numel: int, *, scale: torch.Tensor = ONE, grad_dtype: torch.dtype = torch.float32) -> State:
    """torch.optim.AdamW on gradients that were widened to fp32 and scaled before."""
    weights = weights_of(numel)
    optimizer = torch.optim.AdamW([weights], betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False, fused=False)
    for step in range(1, STEPS + 1):
        weights.grad = grads_of(numel, step).to(grad_dtype).to(torch.float32) * scale
        optimizer.param_groups[0]["lr"] = settings(step).lr
        optimizer.step()
    state = optimizer.state[weights]
    return weights, state["exp_avg"], state["exp_avg_sq"]


def assert_same_bits(found: State, wanted: State) -> None:
    for left, right in zip(found, wanted, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize("numel", LENGTHS)
def test_adamw_has_the_bits_of_torch(numel: int) -> None:
    assert_same_bits(ours(numel), torchs(numel))


@pytest.mark.parametrize("numel", LENGTHS)
def test_a_bf16_gradient_is_widened_first(numel: int) -> None:
    assert_same_bits(ours(numel, grad_dtype=torch.bfloat16), torchs(numel, grad_dtype=torch.bfloat16))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_the_scale_multiplies_the_gradient_in_fp32(grad_dtype: torch.dtype) -> None:
    scale = torch.tensor(0.3)
    assert_same_bits(ours(1000, scale=scale, grad_dtype=grad_dtype), torchs(1000, scale=scale, grad_dtype=grad_dtype))


@pytest.mark.parametrize("chunk_numel", [1, 7, 16, 100, 999, 1000, 1001])
def test_pieces_of_any_size_have_the_same_bits(chunk_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ours(1000)
    monkeypatch.setattr(reference, "CHUNK_NUMEL", chunk_numel)
    assert_same_bits(ours(1000), whole)


def test_the_gradient_and_the_scale_are_left_as_they_were() -> None:
    grad, scale = grads_of(100, 1), torch.tensor(0.5)
    kept = grad.clone()
    reference.adamw(weights_of(100), grad, torch.zeros(100), torch.zeros(100), scale, settings(1))
    assert torch.equal(grad, kept)
    assert float(scale) == 0.5


def test_a_bf16_master_is_updated_in_fp32_and_rounded_once() -> None:
    narrow = weights_of(1000).to(torch.bfloat16)
    wide = narrow.float()
    first, second, other_first, other_second = (torch.zeros(1000) for _ in range(4))
    reference.adamw(narrow, grads_of(1000, 1), first, second, ONE, settings(1))
    reference.adamw(wide, grads_of(1000, 1), other_first, other_second, ONE, settings(1))
    assert torch.equal(narrow, wide.to(torch.bfloat16))
    assert torch.equal(first, other_first)
    assert torch.equal(second, other_second)
