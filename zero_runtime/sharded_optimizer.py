"""AdamW over the master shards, unit by unit. It owns the moments; the units own everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import reference
from zero_runtime.errors import PlanError
from zero_runtime.unit import Unit


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW's constants (arXiv 1711.05101); the learning rate comes with each step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise PlanError(f"optimizer.{name}: expected a number in [0, 1), found {value}")
        if self.eps <= 0 or self.weight_decay < 0:
            raise PlanError(
                f"optimizer: expected eps > 0 and weight_decay >= 0, found eps={self.eps}, "
                f"weight_decay={self.weight_decay}"
            )


class ShardedOptimizer:
    """exp_avg_shard and exp_avg_sq_shard [S] fp32 of every trainable unit, and the step that uses them."""

    def __init__(self, units: list[Unit], config: AdamWConfig) -> None:
        self._units = [unit for unit in units if unit.trainable]
        self._config = config
        self._steps = 0
        self._moments = [(_zeros_like_master(unit), _zeros_like_master(unit)) for unit in self._units]

    def step(self, lr: float, grad_scale: torch.Tensor) -> None:
        """Update every master shard from its unit's grad_shard times grad_scale, then the parameter shards."""
        self._steps += 1
        settings = reference.AdamW(
            lr=lr,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            eps=self._config.eps,
            weight_decay=self._config.weight_decay,
            step=self._steps,
        )
        with torch.no_grad():
            for unit, (exp_avg, exp_avg_sq) in zip(self._units, self._moments, strict=True):
                assert unit.master_shard is not None
                assert unit.grad_shard is not None
                reference.adamw(unit.master_shard, unit.grad_shard, exp_avg, exp_avg_sq, grad_scale, settings)
                unit.refresh_param_shard()

    def states_of(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The unit's [S] states by name; none for a frozen unit."""
        for owner, (exp_avg, exp_avg_sq) in zip(self._units, self._moments, strict=True):
            if owner is unit:
                return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        return {}

    def free(self) -> None:
        """Let the states go."""
        self._units.clear()
        self._moments.clear()

    def state_tensors(self) -> list[torch.Tensor]:
        """The moments, for counting."""
        return [moment for pair in self._moments for moment in pair]


def _zeros_like_master(unit: Unit) -> torch.Tensor:
    assert unit.master_shard is not None
    return torch.zeros_like(unit.master_shard, dtype=torch.float32)
