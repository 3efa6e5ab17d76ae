"""The reference has the bits of IEEE 754 arithmetic, as in numpy, at every length and in pieces of any size."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from zero_runtime.kernels import reference
from zero_runtime.kernels.settings import Adam, AdamW, Lion, Sgd, power

LENGTHS = (0, 1, 15, 16, 17, 65536, 65537, 100003)
ONE = torch.ones(())
F = np.float32
Arrays = list[np.ndarray]


def random(numel: int, seed: int) -> torch.Tensor:
    """Random values over many magnitudes, a few of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-12, 4, (numel,), generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < 0.05, 0.0, values)


def operands(numel: int) -> list[torch.Tensor]:
    """master, grad, exp_avg, exp_avg_sq."""
    master = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    return [master, random(numel, 2), random(numel, 3), random(numel, 4).abs()]


# ---- the same in numpy, whose operations on fp32 arrays are each those of IEEE 754 -----------------------------------


def adam_in_numpy(arrays: Arrays, s: AdamW) -> Arrays:
    w, g, m, v = arrays
    if isinstance(s, Adam):
        g = g + w * F(s.weight_decay) if s.weight_decay else g
    else:
        w = w * F(1 - s.lr * s.weight_decay)
    weight = F(1 - s.beta1)
    m = m + (g - m) * weight if weight < 0.5 else g - (g - m) * (F(1) - weight)
    v = v * F(s.beta2) + (g * F(1 - s.beta2)) * g
    divisor = np.sqrt(v) / F(math.sqrt(1 - power(s.beta2, s.step))) + F(s.eps)
    return [w + (m * F(-s.lr / (1 - power(s.beta1, s.step)))) / divisor, m, v]


def sgd_in_numpy(arrays: Arrays, s: Sgd) -> Arrays:
    w, g, m, v = arrays
    step = g + w * F(s.weight_decay) if s.weight_decay else g
    if s.momentum:
        m = step if s.step == 1 else m * F(s.momentum) + step * F(1 - s.dampening)
        step = step + m * F(s.momentum) if s.nesterov else m
    return [w + step * F(-s.lr), m, v]


def lion_in_numpy(arrays: Arrays, s: Lion) -> Arrays:
    w, g, m, v = arrays
    sign = np.sign(m * F(s.beta1) + g * F(1 - s.beta1))
    return [w * F(1 - s.lr * s.weight_decay) + sign * F(-s.lr), m * F(s.beta2) + g * F(1 - s.beta2), v]


SETTINGS = {
    "adamw": AdamW(3e-3, 0.9, 0.95, 1e-8, 0.1, 3),
    "adamw_late": AdamW(3e-3, 0.9, 0.999, 1e-8, 0.1, 100_000),
    "adam": Adam(3e-3, 0.9, 0.95, 1e-8, 0.1, 2),
    "adam_from_end": Adam(3e-3, 0.4, 0.95, 1e-8, 0.0, 1),
    "adam_without_first_moment": Adam(3e-3, 0.0, 0.95, 1e-8, 0.0, 7),
    "sgd": Sgd(1e-2, 0.9, 0.1, 0.1, False, 2),
    "sgd_first": Sgd(1e-2, 0.9, 0.1, 0.1, False, 1),
    "sgd_plain": Sgd(1e-2, 0.0, 0.0, 0.1, False, 2),
    "nesterov": Sgd(1e-2, 0.9, 0.0, 0.0, True, 2),
    "lion": Lion(1e-2, 0.9, 0.98, 0.1),
}


def updated(settings: AdamW | Sgd | Lion, tensors: list[torch.Tensor], scale: torch.Tensor = ONE) -> list[torch.Tensor]:
    """[master, exp_avg, exp_avg_sq] after the reference's update, in place."""
    master, grad, first, second = tensors
    if isinstance(settings, AdamW):
        reference.adamw_(master, grad, first, second, scale, settings.numbers)
    elif isinstance(settings, Sgd):
        flags = (settings.nesterov, settings.is_first)
        reference.sgd_(master, grad, first if settings.momentum else None, scale, settings.numbers, *flags)
    else:
        reference.lion_(master, grad, first, scale, settings.numbers)
    return [master, first, second]


def in_numpy(settings: AdamW | Sgd | Lion, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    arrays = [tensor.numpy() for tensor in tensors]
    if isinstance(settings, AdamW):
        found = adam_in_numpy(arrays, settings)
    else:
        found = sgd_in_numpy(arrays, settings) if isinstance(settings, Sgd) else lion_in_numpy(arrays, settings)
    return [torch.from_numpy(array) for array in found]


def assert_same_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for left, right in zip(found, wanted, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_has_the_bits_of_ieee_arithmetic(name: str, numel: int) -> None:
    wanted = in_numpy(SETTINGS[name], operands(numel))
    assert_same_bits(updated(SETTINGS[name], operands(numel)), wanted)


def test_the_root_is_correctly_rounded_with_any_library_for_fp64_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    every = torch.arange(0, 0x7F800001, 8191, dtype=torch.int64).to(torch.int32).view(torch.float32)
    wanted = torch.from_numpy(np.sqrt(every.numpy()))
    assert torch.equal(reference.root(every), wanted)
    exact = torch.Tensor.sqrt_
    for towards in (torch.inf, -torch.inf):  # the library is off by three units in the last place of fp64

        def off(values: torch.Tensor, towards: float = towards) -> torch.Tensor:
            exact(values)
            for _ in range(3):
                values = torch.where(values > 0, values.nextafter(torch.tensor(towards, dtype=values.dtype)), values)
            return values

        monkeypatch.setattr(torch.Tensor, "sqrt_", off)
        assert torch.equal(reference.root(every), wanted)


def test_the_fp64_root_is_correctly_rounded_with_a_library_that_errs_in_the_last_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(3)
    powers = 10.0 ** torch.randint(-60, 60, (20_000,), generator=generator).double()
    values = torch.cat([torch.rand(20_000, generator=generator, dtype=torch.float64) * powers, torch.arange(1000.0)])
    wanted = torch.from_numpy(np.sqrt(values.numpy()))
    assert torch.equal(reference.root64(values), wanted)
    exact = torch.Tensor.sqrt
    for towards in (torch.inf, 0.0):
        bound = torch.tensor(towards, dtype=torch.float64)
        monkeypatch.setattr(torch.Tensor, "sqrt", lambda x, bound=bound: exact(x).nextafter(bound) * (x > 0))
        assert torch.equal(reference.root64(values), wanted)
    monkeypatch.undo()
    assert reference.root64(torch.tensor([0.0, torch.inf], dtype=torch.float64)).tolist() == [0.0, torch.inf]


@pytest.mark.parametrize("base", [0.9, 0.95, 0.999, 0.9999, 0.5, 0.0])
def test_a_power_is_the_nearest_fp64_number(base: float) -> None:
    with localcontext() as context:
        context.prec = 200
        for exponent in (1, 2, 3, 10, 1000, 123_457):
            exact = Decimal(base) ** exponent
            neighbours = [math.nextafter(power(base, exponent), towards) for towards in (-math.inf, math.inf)]
            off = abs(Decimal(power(base, exponent)) - exact)
            assert all(off <= abs(Decimal(neighbour) - exact) for neighbour in neighbours)


# ---- inputs and side effects -----------------------------------------------------------------------------------------


def test_a_bf16_gradient_is_widened_and_scaled_in_fp32_first() -> None:
    scale = torch.tensor(0.3)
    for settings in SETTINGS.values():
        narrow, wide = operands(1000), operands(1000)
        narrow[1] = narrow[1].to(torch.bfloat16)
        wide[1] = narrow[1].float() * scale
        assert_same_bits(updated(settings, narrow, scale), updated(settings, wide))


@pytest.mark.parametrize("chunk_numel", [1, 7, 16, 100, 999, 1000, 1001])
def test_pieces_of_any_size_have_the_same_bits(chunk_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = updated(SETTINGS["adamw"], operands(1000))
    monkeypatch.setattr(reference, "CHUNK_NUMEL", chunk_numel)
    assert_same_bits(updated(SETTINGS["adamw"], operands(1000)), whole)


def test_the_gradient_and_the_scale_do_not_change() -> None:
    for settings in SETTINGS.values():
        tensors, scale = operands(100), torch.tensor(0.5)
        kept = tensors[1].clone()
        updated(settings, tensors, scale)
        assert torch.equal(tensors[1], kept)
        assert float(scale) == 0.5


def test_a_bf16_master_is_updated_in_fp32_and_rounded_once() -> None:
    for settings in SETTINGS.values():
        narrow, wide = operands(1000), operands(1000)
        narrow[0] = narrow[0].to(torch.bfloat16)
        wide[0] = narrow[0].float()
        found, wanted = updated(settings, narrow), updated(settings, wide)
        assert torch.equal(found[0], wanted[0].to(torch.bfloat16))
        assert_same_bits(found[1:], wanted[1:])
