"""What all optimizer configurations have: their states and how these are held, limits, and parameter groups.

Standard library only: the memory model and the command line read these without torch. The learning rate is passed to
each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from zero_runtime.limits import NO_KEY, Limits
from zero_runtime.optim.groups import ParamGroup
from zero_runtime.plan import ZeroPlan
from zero_runtime.wire import Wire

MOMENTS = ("exp_avg", "exp_avg_sq")
SIGNED_MOMENTS = ("exp_avg",)
CODE_BLOCK_NUMEL = 256  # equals kernels.block_formats.BLOCK_NUMEL, whose module imports torch
STATE_ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "uint8": 1}
FP32_BYTES = 4
StateDType = Literal["fp32", "bf16"]
# A bf16 number has 8 significant bits: its neighbour below is at most 2^-7 of it away, and what is less than half of
# that away is rounded back to it. With a factor beta of the state, gradients of zero leave beta * state: if 1 - beta is
# below 2^-8, a state may stay for ever where it is, and a second moment that cannot fall stops its weight. So
# beta2=0.999 is refused, 0.95 and 0.99 are not.
MOST_BETA_BF16 = 1 - 2.0**-8


def scale_name(state: str) -> str:
    """Name of the tensor with the scales of a quantized state."""
    return f"{state}_scale"


class HeldState(NamedTuple):
    """One tensor of an optimizer's states. `per`: number of elements of a shard that one of its elements describes."""

    name: str
    dtype: str = "fp32"
    per: int = 1


@dataclass(frozen=True)
class OptimizerConfig:
    """Base class of the optimizer configurations. `groups.py` describes `groups` and `no_decay`.

    Constants are settings of the group `optimizer` (see limits.py). Those with the same name have the same limits.

    Outside the optimizer (in checkpoints, in `full_optimizer_state`) a state has
    one fp32 number per element and is identified by its name. `held_states` defines how it is stored in memory.
    """

    kind: ClassVar[str]  # its name in a configuration file
    # Whether each unit can be updated without the others, which offloaded units are.
    updates_units_alone: ClassVar[bool] = True

    groups: tuple[ParamGroup, ...] = field(default=(), kw_only=True, metadata=NO_KEY)
    no_decay: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        limits = Limits.of(self, "optimizer")
        for name in ("beta1", "beta2", "momentum"):  # the share of a mean that stays
            limits.must(name, lambda value: 0 <= value < 1, "from 0 to below 1")
        limits.must("eps", lambda value: value > 0, "above 0")
        limits.at_least(0, "weight_decay")
        self._check(limits)
        if vars(self).get("state_dtype", "fp32") != "fp32":
            limits.must("state_dtype", ("bf16",).__contains__, "fp32 or bf16")
            for name in ("beta1", "beta2", "momentum"):
                rule = f"at most {MOST_BETA_BF16} with optimizer.state_dtype=bf16, which cannot hold smaller changes"
                limits.must(name, lambda value: value <= MOST_BETA_BF16, rule, 0.95)
        limits.conclude()

    def _check(self, limits: Limits) -> None:
        """Records the limits that only this optimizer has."""

    @property
    def name(self) -> str:
        """The name that users see."""
        return type(self).__name__.removesuffix("Config")

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states of a trainable element outside the optimizer, without its master weight."""
        return MOMENTS

    @property
    def held_states(self) -> tuple[HeldState, ...]:
        """The tensors that hold the states, in the order in which updates take them."""
        dtype: str = vars(self).get("state_dtype", "fp32")
        return tuple(HeldState(name, dtype) for name in self.state_names)

    def held_by(self, *, matrices: bool) -> tuple[HeldState, ...]:
        """Those of the held states that a unit has: one of matrices that are updated whole, or another."""
        return self.held_states

    @property
    def state_bytes(self) -> float:
        """Bytes of the held states per element, of units that are not matrices."""
        return _bytes_of(self.held_by(matrices=False))

    @property
    def matrix_patterns(self) -> tuple[str, ...] | None:
        """Which matrices are updated whole, in units of their own: those that match one of these patterns, or, with no
        pattern, those of the repeated blocks (unit_planner.py). None if no matrix is."""
        return None

    @property
    def matrix_state_bytes(self) -> float | None:
        """Bytes of the held states per element of units of matrices; None if there are no such units."""
        return None if self.matrix_patterns is None else _bytes_of(self.held_by(matrices=True))

    @property
    def block_numel(self) -> int:
        """Every parameter and every shard must begin at a multiple of this number of elements."""
        return max((held.per for held in self.held_states), default=1)

    def check_run(self, plan: ZeroPlan, clip_norm: float | None, wire: Wire) -> None:
        """Raise ConfigError if this optimizer cannot run with these settings."""

    def compresses_in(self, step: int) -> bool:
        """Whether this step, counted from 1, takes each rank's own gradient and sends something else than its sum."""
        return False

    def kept_bytes(self, *, shard_count: int, world: int) -> float:
        """Bytes per element of the model that every rank keeps besides the states, over a mean of the ranks."""
        return 0.0

    @property
    def saved_as(self) -> str:
        """The name in a checkpoint. Optimizers with the same name can resume from each other's states."""
        return self.name

    @property
    def has_momentum(self) -> bool:
        """Whether a schedule may cycle its momentum (beta1 of the Adam family)."""
        return True

    @property
    def reads_on_host(self) -> bool:
        """Whether a step reads a device tensor's value on the host, which a dry run cannot do."""
        return False

    @property
    def decay(self) -> float:
        """The weight decay of a parameter whose group does not set one; every class has a field for it."""
        decay: float = vars(self)["weight_decay"]
        return decay


def _bytes_of(states: Iterable[HeldState]) -> float:
    return sum(STATE_ITEMSIZE_BYTES[held.dtype] / held.per for held in states)
