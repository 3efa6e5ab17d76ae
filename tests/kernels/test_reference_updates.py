"""The reference arithmetic: values worked out by hand, equal bits in pieces, rounding of the master, no host reads."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_runtime.kernels import reference
from zero_runtime.kernels.settings import Adam, AdamW, Lamb, Lion, Sgd

ONE = torch.ones(())
ADAM = (0.1, 0.9, 0.5, 1e-3, 0.5, 2)  # lr, beta1, beta2, eps, weight_decay, step
State = tuple[torch.Tensor, ...]  # master, grad, exp_avg, exp_avg_sq


def lamb(state: State, scale: torch.Tensor = ONE) -> None:
    master, grad, exp_avg, exp_avg_sq = state
    settings = Lamb(*ADAM)
    reference.lamb_moments_(grad, exp_avg, exp_avg_sq, scale, settings.numbers)
    squares = reference.lamb_squares(master, exp_avg, exp_avg_sq, settings.lamb_numbers)
    reference.lamb_(master, exp_avg, exp_avg_sq, reference.trust_ratios(squares[None])[0], settings.lamb_numbers)


def sgd(settings: Sgd) -> Callable[..., None]:
    def run(state: State, scale: torch.Tensor = ONE) -> None:
        master, grad, exp_avg, _ = state
        momentum_buffer = exp_avg if settings.momentum else None
        flags = (settings.nesterov, settings.is_first)
        reference.sgd_(master, grad, momentum_buffer, scale, settings.numbers, *flags)

    return run


UPDATES: dict[str, Callable[..., None]] = {
    "adamw": lambda s, scale=ONE: reference.adamw_(*s, scale, AdamW(*ADAM).numbers),
    "adam": lambda s, scale=ONE: reference.adamw_(*s, scale, Adam(*ADAM).numbers),
    "sgd": sgd(Sgd(0.1, 0.9, 0.2, 0.5, False, 2)),
    "nesterov": sgd(Sgd(0.1, 0.9, 0.0, 0.5, True, 2)),
    "plain_sgd": sgd(Sgd(0.1, 0, 0, 0.5, False, 2)),
    "lion": lambda s, scale=ONE: reference.lion_(*s[:3], scale, Lion(0.1, 0.9, 0.5, 0.5).numbers),
    "lamb": lamb,
}


def state(numel: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(0)
    master, grad, exp_avg, exp_avg_sq = (torch.randn(numel, generator=generator) for _ in range(4))
    return master.to(dtype), grad, exp_avg, exp_avg_sq.abs()


# From w = 2, g = 3, m = 1, v = 4 with the constants above.
M, V = 0.9 * 1 + 0.1 * 3, 0.5 * 4 + 0.5 * 9
CORRECTED = (M / (1 - 0.9**2)) / (math.sqrt(V / (1 - 0.5**2)) + 1e-3)
L2_M, L2_V = 0.9 * 1 + 0.1 * (3 + 0.5 * 2), 0.5 * 4 + 0.5 * (3 + 0.5 * 2) ** 2
L2 = (L2_M / (1 - 0.9**2)) / (math.sqrt(L2_V / (1 - 0.5**2)) + 1e-3)
BY_HAND = {
    "adamw": 2 * (1 - 0.1 * 0.5) - 0.1 * CORRECTED,
    "adam": 2 - 0.1 * L2,
    "sgd": 2 - 0.1 * (0.9 * 1 + 0.8 * (3 + 0.5 * 2)),
    "nesterov": 2 - 0.1 * ((3 + 0.5 * 2) + 0.9 * (0.9 * 1 + (3 + 0.5 * 2))),
    "plain_sgd": 2 - 0.1 * (3 + 0.5 * 2),
    "lion": 2 - 0.1 * (1 + 0.5 * 2),
    "lamb": 2 - 0.1 * 2,  # with one element the ratio scales the update to the size of the weight
}


@pytest.mark.parametrize("name", UPDATES)
def test_one_element_has_the_value_worked_out_by_hand(name: str) -> None:
    one = tuple(torch.tensor([value]) for value in (2.0, 3.0, 1.0, 4.0))
    UPDATES[name](one)
    # At most a dozen fp32 roundings of numbers no larger than the weight and its states.
    assert float(one[0]) == pytest.approx(BY_HAND[name], rel=12 * 2.0**-24)


@pytest.mark.parametrize("name", UPDATES)
def test_the_gradient_is_multiplied_by_its_scale_first(name: str) -> None:
    scaled, halved = state(100), state(100)
    UPDATES[name](scaled, torch.tensor(0.5))
    halved[1].mul_(0.5)
    UPDATES[name](halved)
    assert all(torch.equal(a, b) for a, b in zip((scaled[0], *scaled[2:]), (halved[0], *halved[2:]), strict=True))


@pytest.mark.parametrize("name", [name for name in UPDATES if name != "lamb"])
def test_an_update_in_pieces_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = state(1003), state(1003)
    UPDATES[name](whole)
    monkeypatch.setattr(reference, "CHUNK_NUMEL", 17)
    UPDATES[name](tuple(tensor[:401] for tensor in pieces))
    UPDATES[name](tuple(tensor[401:] for tensor in pieces))
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("name", UPDATES)
def test_a_bf16_master_is_the_fp32_result_rounded_once(name: str) -> None:
    rounded = state(500, torch.bfloat16)
    wide = (rounded[0].to(torch.float32), *state(500)[1:])
    UPDATES[name](rounded)
    UPDATES[name](wide)
    assert torch.equal(rounded[0], wide[0].to(torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(rounded[2:], wide[2:], strict=True))


@pytest.mark.parametrize("name", [name for name in UPDATES if name != "lamb"])
def test_bf16_states_are_the_fp32_result_rounded_once_and_the_step_uses_the_unrounded_one(name: str) -> None:
    master, grad, *states = state(500)
    narrow = (master.clone(), grad, *(one.bfloat16() for one in states))
    wide = (master.clone(), grad, *(one.bfloat16().float() for one in states))
    UPDATES[name](narrow)
    UPDATES[name](wide)
    assert torch.equal(narrow[0], wide[0])
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(narrow[2:], wide[2:], strict=True))


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_reads_no_value_on_the_host(name: str) -> None:
    """A fake tensor has no value to read: `.item()` would raise."""
    with FakeTensorMode():
        UPDATES[name](tuple(torch.empty(100) for _ in range(4)), torch.empty(()))


def test_the_trust_ratio_is_the_quotient_of_the_norms_and_one_where_either_is_zero() -> None:
    squares = torch.tensor([[9.0, 4.0], [0.0, 4.0], [9.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert reference.trust_ratios(squares).tolist() == [1.5, 1.0, 1.0, 1.0]
