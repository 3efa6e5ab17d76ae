"""One update equals torch.optim's in algorithm and order, and stays within a derived bound of its rounding.

[Note: distance] Both compute the same expression. The reference rounds each operation to nearest: u = 2^-24 of its
result. torch may fuse a multiplication with an addition, which leaves one of those roundings out, and its square root
may be one unit in the last place off, 2u of it. So each of torch's operations is within u of its exact result, the root
within 2u (to which the rounding of u is added here), and the distance of two such evaluations is at most the sum of
both errors. With T the sum of the magnitudes of all terms that are added or subtracted on the way to a result, every
rounding before the last adds at most u * T to it, and n operations in sequence at most n * u * T to first order; the
products of errors are below 1 % of that for n <= 12, so the bounds below count one operation more than there are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero_runtime.kernels import reference
from zero_runtime.kernels.settings import Adam, AdamW, Sgd

U = 2.0**-24
ONE = torch.ones(())
NUMEL = 100_003
Settings = AdamW | Sgd
SETTINGS: dict[str, Settings] = {
    "adamw": AdamW(3e-3, 0.9, 0.95, 1e-8, 0.1, 3),
    "adamw_first": AdamW(3e-3, 0.9, 0.999, 1e-8, 0.1, 1),
    "adamw_late": AdamW(3e-3, 0.9, 0.999, 1e-8, 0.1, 100_000),
    "adam": Adam(3e-3, 0.9, 0.95, 1e-8, 0.1, 2),
    "adam_from_end": Adam(3e-3, 0.4, 0.95, 1e-8, 0.0, 5),
    "sgd": Sgd(1e-2, 0.9, 0.1, 0.1, False, 2),
    "sgd_first": Sgd(1e-2, 0.9, 0.1, 0.1, False, 1),
    "sgd_plain": Sgd(1e-2, 0.0, 0.0, 0.1, False, 2),
    "nesterov": Sgd(1e-2, 0.9, 0.0, 0.0, True, 2),
}


def operands() -> list[torch.Tensor]:
    """master, grad, exp_avg, exp_avg_sq over many magnitudes, a few of them zero."""
    found = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(NUMEL, generator=generator) * 10.0 ** torch.randint(-6, 3, (NUMEL,), generator=generator)
        found.append(torch.where(torch.rand(NUMEL, generator=generator) < 0.05, 0.0, values))
    found[3].abs_()
    return found


def ours(settings: Settings) -> list[torch.Tensor]:
    """[master, states] after one update by the reference."""
    master, grad, first, second = operands()
    if isinstance(settings, AdamW):
        reference.adamw_(master, grad, first, second, ONE, settings.numbers)
        return [master, first, second]
    flags = (settings.nesterov, settings.is_first)
    reference.sgd_(master, grad, first if settings.momentum else None, ONE, settings.numbers, *flags)
    return [master, first] if settings.momentum else [master]


def torchs(settings: Settings) -> list[torch.Tensor]:
    """The same by torch.optim, from the same states."""
    master, grad, first, second = operands()
    master.grad = grad
    optimizer: torch.optim.Optimizer
    if isinstance(settings, AdamW):
        kind = torch.optim.Adam if isinstance(settings, Adam) else torch.optim.AdamW
        betas, decay = (settings.beta1, settings.beta2), settings.weight_decay
        optimizer = kind([master], settings.lr, betas, settings.eps, decay, foreach=False, fused=False)
        state = {"step": torch.tensor(float(settings.step - 1)), "exp_avg": first, "exp_avg_sq": second}
    else:
        rest = (settings.momentum, settings.dampening, settings.weight_decay, settings.nesterov)
        optimizer = torch.optim.SGD([master], settings.lr, *rest, foreach=False, fused=False)
        state = {} if settings.step == 1 else {"momentum_buffer": first}
    optimizer.state[master].update(state if getattr(settings, "momentum", 1) else {})
    optimizer.step()
    names = ("exp_avg", "exp_avg_sq") if isinstance(settings, AdamW) else ("momentum_buffer",)
    return [master, *(optimizer.state[master][name] for name in names if name in optimizer.state[master])]


# ---- the same operations ---------------------------------------------------------------------------------------------


class Unfused(TorchDispatchMode):
    """torch's compound operations as additions, multiplications, divisions and roots that round one by one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        rule = RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(*args, **(kwargs or {}))


def _added(target: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    return target.copy_(target + other * alpha) if alpha != 1 else target.copy_(target + other)


def _lerped(target: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    share = torch.tensor(weight, dtype=torch.float32)
    if share < 0.5:
        return target.copy_(target + (end - target) * share)
    return target.copy_(end - (end - target) * (1 - share))


def _product_added(target: torch.Tensor, one: torch.Tensor, two: torch.Tensor, *, value: float = 1) -> torch.Tensor:
    return target.copy_(target + (one * value) * two)


def _quotient_added(target: torch.Tensor, one: torch.Tensor, two: torch.Tensor, *, value: float = 1) -> torch.Tensor:
    return target.copy_(target + (one * value) / two)


def _root(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sqrt(values.numpy()))


aten = torch.ops.aten
RULES: dict[object, Callable[..., torch.Tensor]] = {
    aten.add_.Tensor: _added,
    aten.add.Tensor: lambda left, right, *, alpha=1: _added(left.clone(), right, alpha=alpha),
    aten.lerp_.Scalar: _lerped,
    aten.addcmul_.default: _product_added,
    aten.addcdiv_.default: _quotient_added,
    aten.sqrt.default: _root,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_equals_torch_optim_with_every_operation_rounded_once(name: str) -> None:
    with Unfused():
        wanted = torchs(SETTINGS[name])
    for found, other in zip(ours(SETTINGS[name]), wanted, strict=True):
        assert torch.equal(found, other)


# ---- the distance ----------------------------------------------------------------------------------------------------


def torch_rounds_once() -> bool:
    """Whether torch fuses nothing here and rounds its square root correctly: its bits then equal the reference's."""
    one = torch.tensor([1 + 2.0**-12] * 64)
    fuses = bool((torch.full((64,), -1 - 2.0**-11).addcmul_(one, one) != 0).any())
    values = random_magnitudes()
    return not fuses and torch.equal(values.sqrt(), torch.from_numpy(np.sqrt(values.numpy())))


def random_magnitudes() -> torch.Tensor:
    return (torch.arange(1 << 20, dtype=torch.int64) * 2039 % 0x7F800000).to(torch.int32).view(torch.float32)


def bounds(settings: Settings) -> list[torch.Tensor]:
    """The largest allowed differences of [master, states], element by element, in fp64; see [Note: distance]."""
    w, g, m, v = (tensor.double().abs() for tensor in operands())
    if isinstance(settings, Sgd):
        grad = g + settings.weight_decay * w
        buffer = grad if settings.step == 1 or not settings.momentum else settings.momentum * m + grad
        step = grad + settings.momentum * buffer if settings.nesterov else buffer
        # l2: 2 operations; the buffer: 3; Nesterov: 2; the weight: 2. Twice, for the reference and torch.
        found = [2 * 10 * U * settings.lr * step + 2 * 2 * U * w]
        return [*found, 2 * 6 * U * buffer] if settings.momentum else found
    grad = g + settings.l2 * w
    # l2: 2 operations; the difference, its product, the sum: 3. With all magnitudes in each.
    first = 2 * 6 * U * (m + grad)
    # l2: 2 operations, counted twice in the square; two products, one product of the old moment, the sum.
    second = 2 * 9 * U * (settings.beta2 * v + (1 - settings.beta2) * grad**2)
    exact_w, exact_g, _, exact_v = (tensor.double() for tensor in operands())
    exact_v = settings.beta2 * exact_v + (1 - settings.beta2) * (exact_g + settings.l2 * exact_w) ** 2
    divisor = exact_v.sqrt() / settings.numbers.correction + settings.eps
    size = settings.lr / settings.bias_correction
    # The quotient: half the second moment's relative error, 3 u for the root, one operation each for its division, eps,
    # the product and the quotient; the first moment's error through the quotient; then decay and the last sum.
    relative = second / exact_v.clamp(min=1e-300) / 2 + 2 * (3 + 4 + 1) * U
    quotient = size * ((m + grad) * relative + first) / divisor
    return [quotient + 2 * 3 * U * (w + size * (m + grad) / divisor), first, second]


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_stays_within_the_derived_distance_of_torch_optim(name: str) -> None:
    settings = SETTINGS[name]
    smallest = 2.0**-149  # subnormal results are rounded by as much as that
    equal = torch_rounds_once()
    for found, wanted, bound in zip(ours(settings), torchs(settings), bounds(settings), strict=True):
        off = (found.double() - wanted.double()).abs()
        assert bool((off <= bound + 4 * smallest).all()), float((off / bound.clamp(min=1e-300)).max())
        assert not equal or torch.equal(found, wanted)
