"""The hyperparameters of each update, checked by whoever makes them; one object a step and parameter group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of one AdamW step (arXiv 1711.05101, algorithm 2); `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def l2(self) -> float:
        """What of the weight joins the gradient."""
        return 0.0

    @property
    def decay(self) -> float:
        """What the weight is multiplied by before the update."""
        return 1 - self.lr * self.weight_decay

    @property
    def bias_correction(self) -> float:
        """Of the first moment."""
        return 1 - self.beta1**self.step

    @property
    def bias_correction_sq(self) -> float:
        """Of the second moment."""
        return 1 - self.beta2**self.step


class Adam(AdamW):
    """The same of Adam with L2 regularisation (arXiv 1412.6980, algorithm 1): weight_decay * weight joins the
    gradient."""

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


@dataclass(frozen=True)
class Lion:
    """Hyperparameters of one Lion step (arXiv 2302.06675, algorithm 2)."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


class Lamb(AdamW):
    """Hyperparameters of one LAMB step (arXiv 1904.00962, algorithm 2, with the scaling function the identity)."""
