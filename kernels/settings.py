"""The hyperparameters of each update, checked by the caller; one object per step and parameter group.

[Note: numbers] An update computes with its `numbers`, which are computed here in fp64, by operations that IEEE 754
defines, and then rounded to fp32 once. Every implementation takes these same numbers, in the order of the tuple.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from functools import lru_cache
from struct import pack, unpack
from typing import NamedTuple

_DIGITS = Context(prec=50)


def fp32(value: float) -> float:
    """The nearest fp32 number, ties to even."""
    return float(unpack("f", pack("f", value))[0])


@lru_cache(maxsize=64)  # called for every piece of every unit, with the same arguments during a step
def power(base: float, exponent: int) -> float:
    """base ** exponent in fp64, from 50 decimal digits: the last bit of libm's pow depends on the platform."""
    return float(_DIGITS.power(Decimal(base), exponent))


class AdamNumbers(NamedTuple):
    """The fp32 numbers of one Adam step, in the order in which the implementations take them."""

    decay: float  # the weight is multiplied by it first
    l2: float  # times the weight, is added to the gradient
    weight1: float  # of the gradient in the first moment
    beta2: float
    weight2: float  # of the squared gradient in the second moment
    correction: float  # the root of the second moment is divided by it
    eps: float
    minus_step_size: float


class SgdNumbers(NamedTuple):
    """The fp32 numbers of one SGD step."""

    l2: float
    momentum: float
    weight: float  # of the gradient in the momentum buffer
    minus_lr: float


class LionNumbers(NamedTuple):
    """The fp32 numbers of one Lion step."""

    decay: float
    beta1: float
    weight1: float
    beta2: float
    weight2: float
    minus_lr: float


class LambNumbers(NamedTuple):
    """The fp32 numbers of one LAMB step without those of its moments, which are Adam's."""

    correction1: float
    correction2: float
    eps: float
    weight_decay: float
    minus_lr: float


class MuonNumbers(NamedTuple):
    """The fp32 numbers of one Muon step of a matrix."""

    momentum: float
    weight: float  # of the gradient in the momentum buffer
    decay: float  # the weight is multiplied by it
    minus_lr: float  # the rate with the factor of the matrix's shape


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of one AdamW step (arXiv 1711.05101, algorithm 2); `step` counts from 1. Unless `corrects_bias`,
    both corrections are 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    corrects_bias: bool = True

    @property
    def l2(self) -> float:
        """The factor of the weight that is added to the gradient."""
        return 0.0

    @property
    def decay(self) -> float:
        """The factor by which the weight is multiplied before the update."""
        return 1 - self.lr * self.weight_decay

    @property
    def bias_correction(self) -> float:
        """The bias correction of the first moment."""
        return 1 - power(self.beta1, self.step) if self.corrects_bias else 1.0

    @property
    def bias_correction_sq(self) -> float:
        """The bias correction of the second moment."""
        return 1 - power(self.beta2, self.step) if self.corrects_bias else 1.0

    @property
    def numbers(self) -> AdamNumbers:
        """See [Note: numbers]."""
        weights = (1 - self.beta1, self.beta2, 1 - self.beta2)
        correction, step_size = math.sqrt(self.bias_correction_sq), self.lr / self.bias_correction
        return AdamNumbers(*map(fp32, (self.decay, self.l2, *weights, correction, self.eps, -step_size)))


class Adam(AdamW):
    """Hyperparameters of one step of Adam with L2 regularisation (arXiv 1412.6980, algorithm 1): weight_decay * weight
    is added to the gradient."""

    @property
    def l2(self) -> float:
        return self.weight_decay

    @property
    def decay(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Sgd:
    """Hyperparameters of one SGD step as torch.optim.SGD defines it; `step` counts from 1."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    step: int

    @property
    def is_first(self) -> bool:
        """Whether the momentum buffer becomes the gradient, without dampening."""
        return self.step == 1

    @property
    def numbers(self) -> SgdNumbers:
        """See [Note: numbers]."""
        return SgdNumbers(*map(fp32, (self.weight_decay, self.momentum, 1 - self.dampening, -self.lr)))


@dataclass(frozen=True)
class Lion:
    """Hyperparameters of one Lion step (arXiv 2302.06675, algorithm 2)."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    @property
    def numbers(self) -> LionNumbers:
        """See [Note: numbers]."""
        betas = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)
        return LionNumbers(*map(fp32, (1 - self.lr * self.weight_decay, *betas, -self.lr)))


class Lamb(AdamW):
    """Hyperparameters of one LAMB step (arXiv 1904.00962, algorithm 2, with the scaling function the identity)."""

    @property
    def with_corrected_rate(self) -> Lamb:
        """The same with both bias corrections in the rate instead of the moments."""
        lr = self.lr * math.sqrt(self.bias_correction_sq) / self.bias_correction
        return replace(self, lr=lr, corrects_bias=False)

    @property
    def lamb_numbers(self) -> LambNumbers:
        """See [Note: numbers]."""
        corrections = (self.bias_correction, self.bias_correction_sq)
        return LambNumbers(*map(fp32, (*corrections, self.eps, self.weight_decay, -self.lr)))


@dataclass(frozen=True)
class Muon:
    """Hyperparameters of one Muon step of a matrix (Keller Jordan, 2024); `lr_factor` is that of the matrix's shape and
    multiplies the rate of the update, but not that of the weight decay."""

    lr: float
    momentum: float
    weight_decay: float
    lr_factor: float

    @property
    def numbers(self) -> MuonNumbers:
        """See [Note: numbers]."""
        decay, minus_lr = 1 - self.lr * self.weight_decay, -self.lr * self.lr_factor
        return MuonNumbers(*map(fp32, (self.momentum, 1 - self.momentum, decay, minus_lr)))
