"""Optimizer configurations without tensors: constants, names of the states, and parameter groups.

Standard library only: the memory model and the command line read these without torch. The learning rate is passed to
each step.

[Note: what torch's optimizers keep]
`_TORCH_STATES` lists each element-wise optimizer of torch.optim with the states that it keeps for each element, and
the argument that switches a state on. An optimizer that is not listed cannot run on shards and is refused by name.

[Note: bf16 states]
A bf16 number has 8 significant bits: its neighbour below is at most 2^-7 of it away, and what is less than half of that
away is rounded back to it. With a factor beta of the state, gradients of zero leave beta * state: if 1 - beta is below
2^-8, a state may stay for ever where it is, and a second moment that cannot fall stops its weight. So with bf16 states
every such factor must be at most 1 - 2^-8 (0.99609375): beta2=0.999 is refused, 0.95 and 0.99 are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from zero_runtime.errors import PlanError
from zero_runtime.limits import NO_KEY, Limits, keyed, nearest
from zero_runtime.optim.groups import ParamGroup
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES
from zero_runtime.wire import Wire

MOMENTS = ("exp_avg", "exp_avg_sq")
SIGNED_MOMENTS = ("exp_avg",)
CODE_BLOCK_NUMEL = 256  # equals kernels.block_formats.BLOCK_NUMEL, whose module imports torch
STATE_ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "uint8": 1}
FP32_BYTES = 4
StateDType = Literal["fp32", "bf16"]
MOST_BETA_BF16 = 1 - 2.0**-8  # see [Note: bf16 states]
_ALWAYS = ""


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

    [Note: states told and states held] Outside the optimizer (in checkpoints, in `full_optimizer_state`) a state has
    one fp32 number per element and is identified by its name. `held_states` defines how it is stored in memory.
    """

    kind: ClassVar[str]  # its name in a configuration file
    # Whether each unit can be updated without the others, which offloaded units are.
    updates_units_alone: ClassVar[bool] = True

    groups: tuple[ParamGroup, ...] = field(default=(), kw_only=True, metadata=NO_KEY)
    no_decay: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        limits = Limits.of(self, "optimizer")
        for name in ("beta1", "beta2"):
            limits.must(name, lambda value: 0 <= value < 1, "from 0 to below 1")
        limits.must("eps", lambda value: value > 0, "above 0")
        limits.at_least(0, "momentum", "weight_decay")
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


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """AdamW's constants (arXiv 1711.05101): weight decay is decoupled from the gradient.

    By default norms and biases are not decayed, unlike in torch.optim.AdamW; `no_decay=False` decays them too.
    state_dtype: of the moments in memory; bf16 halves them and rounds each once in a step ([Note: bf16 states]).
    """

    kind = "adamw"

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    state_dtype: StateDType = field(default="fp32", kw_only=True)


@dataclass(frozen=True)
class AdamConfig(AdamWConfig):
    """Adam's constants (arXiv 1412.6980): weight decay is L2 in the gradient, as in torch.optim.Adam."""

    kind = "adam"

    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW with 8-bit moments (arXiv 2110.02861): one code per element, one scale per 256 elements of a parameter."""

    kind = "adamw8bit"

    state_dtype: StateDType = field(default="fp32", kw_only=True, metadata=NO_KEY)

    @property
    def held_states(self) -> tuple[HeldState, ...]:
        return tuple(
            held
            for name in MOMENTS
            for held in (HeldState(name, "uint8"), HeldState(scale_name(name), "fp32", CODE_BLOCK_NUMEL))
        )

    @property
    def saved_as(self) -> str:
        return "AdamW"


@dataclass(frozen=True)
class OneBitAdamConfig(AdamWConfig):
    """1-bit Adam's constants (arXiv 2102.02888). After `warmup_updates` updates of AdamW the second moment stays as it
    is, and ranks average the signs of their momentum with error feedback instead of their gradients."""

    kind = "onebitadam"
    updates_units_alone = False

    warmup_updates: int = 100
    state_dtype: StateDType = field(default="fp32", kw_only=True, metadata=NO_KEY)

    def _check(self, limits: Limits) -> None:
        limits.at_least(1, "warmup_updates")

    def compresses_in(self, step: int) -> bool:
        return step > self.warmup_updates

    def check_run(self, plan: ZeroPlan, clip_norm: float | None, wire: Wire) -> None:
        limits = Limits({}, "optimizer")
        if not plan.keeps_full_grads or plan.shard_ranks is not None:
            found = "sharded ones" if not plan.keeps_full_grads else f"zero.shard_ranks={plan.shard_ranks}"
            rule = "optimizer.kind=onebitadam needs each rank's full gradients, and all ranks in one group"
            limits.refuse(rule, found, "optimizer=adamw")
        if clip_norm is not None:
            rule = "optimizer.kind=onebitadam cannot clip: it never makes the sum of the gradients"
            limits.refuse(rule, f"optimizer.clip_norm={clip_norm}", "optimizer.clip_norm=null")
        if wire.reduce is not None:
            rule = "zero.reduce_dtype has no gradients to reduce with optimizer.kind=onebitadam"
            limits.refuse(rule, wire.reduce, "zero.reduce_dtype=null zero.error_feedback=false")
        limits.conclude()

    def kept_bytes(self, *, shard_count: int, world: int) -> float:
        return FP32_BYTES * ((1 if shard_count == 1 else 2) + 1 / world)


@dataclass(frozen=True)
class LambConfig(AdamWConfig):
    """LAMB's constants (arXiv 1904.00962): each parameter's update is scaled by |weights| / |update|."""

    kind = "lamb"
    updates_units_alone = False

    eps: float = 1e-6
    state_dtype: StateDType = field(default="fp32", kw_only=True, metadata=NO_KEY)


@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """Lion's constants (arXiv 2302.06675): the update is the sign of an interpolated momentum."""

    kind = "lion"

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    state_dtype: StateDType = field(default="fp32", kw_only=True)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg",)


@dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """SGD's constants, as in torch.optim.SGD; without momentum it keeps no state."""

    kind = "sgd"

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    state_dtype: StateDType = field(default="fp32", kw_only=True)

    def _check(self, limits: Limits) -> None:
        if self.nesterov and not self.momentum:
            fixes = (
                "optimizer.momentum=0.9 optimizer.dampening=0.0",
                "optimizer.dampening=0.0 optimizer.nesterov=false",
            )
            limits.refuse("optimizer.nesterov needs optimizer.momentum above 0", self.momentum, *fixes)
        elif self.nesterov and self.dampening:
            fixes = ("optimizer.dampening=0.0", "optimizer.nesterov=false")
            limits.refuse("optimizer.nesterov needs optimizer.dampening=0.0", self.dampening, *fixes)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0


MATRIX_STATES = ("momentum_buffer",)
LrScaling = Literal["match_rms_adamw", "original"]


@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon's constants (Keller Jordan, 2024), and AdamW's for all parameters that are not matrices of the blocks.

    A matrix's update is its momentum, orthogonalised by `ns_steps` Newton-Schulz steps in `ns_dtype`. lr_scaling:
    match_rms_adamw multiplies the rate of a matrix by 0.2 * sqrt(larger side), which gives updates the size of AdamW's,
    so that both can have one rate (arXiv 2502.16982); original by sqrt(max(1, rows / columns)). `adamw_lr_ratio`: the
    rate of AdamW's part, relative to the schedule's. `matrices`: patterns of the names of the matrices that are
    orthogonalised; [] are those of the repeated blocks, without embeddings.
    """

    kind = "muon"
    updates_units_alone = False

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    lr_scaling: LrScaling = "match_rms_adamw"
    matrices: list[str] = field(default_factory=list)
    adamw_lr_ratio: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def _check(self, limits: Limits) -> None:
        limits.must("momentum", lambda value: value < 1, "below 1")
        limits.must("ns_steps", lambda value: 1 <= value < 100, "from 1 to 99")
        limits.must("ns_dtype", ("bf16", "fp32").__contains__, "bf16 or fp32")
        limits.must("lr_scaling", ("match_rms_adamw", "original").__contains__, "match_rms_adamw or original")
        limits.must("adamw_lr_ratio", lambda value: value > 0, "above 0")

    @property
    def adamw(self) -> AdamWConfig:
        """The constants for the parameters that are not orthogonalised."""
        return AdamWConfig(self.beta1, self.beta2, self.eps, self.weight_decay)

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*MATRIX_STATES, *MOMENTS)

    def held_by(self, *, matrices: bool) -> tuple[HeldState, ...]:
        return tuple(held for held in self.held_states if (held.name in MATRIX_STATES) == matrices)

    @property
    def matrix_patterns(self) -> tuple[str, ...] | None:
        return tuple(self.matrices)


_ADAM_STATES = {"exp_avg": _ALWAYS, "exp_avg_sq": _ALWAYS}
_TORCH_STATES: dict[str, dict[str, str]] = {
    "ASGD": {"ax": _ALWAYS},
    "Adadelta": {"square_avg": _ALWAYS, "acc_delta": _ALWAYS},
    "Adagrad": {"sum": _ALWAYS},
    "Adam": {**_ADAM_STATES, "max_exp_avg_sq": "amsgrad"},
    "AdamW": {**_ADAM_STATES, "max_exp_avg_sq": "amsgrad"},
    "Adamax": {"exp_avg": _ALWAYS, "exp_inf": _ALWAYS},
    "NAdam": _ADAM_STATES,
    "RAdam": _ADAM_STATES,
    "RMSprop": {"square_avg": _ALWAYS, "momentum_buffer": "momentum", "grad_avg": "centered"},
    "Rprop": {"prev": _ALWAYS, "step_size": _ALWAYS},
    "SGD": {"momentum_buffer": "momentum"},
}
TORCH_NAMES = tuple(_TORCH_STATES)
TORCH_REFUSED = {
    "Adafactor": "its second moment is kept by rows and columns of a whole matrix",
    "LBFGS": "it needs a closure that evaluates the model again within a step, and products over all parameters",
    "Muon": "it orthogonalises whole matrices, which optimizer=muon does on shards",
    "SparseAdam": "it takes sparse gradients alone, and the runtime's are dense",
}
_TORCH_BETAS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")
TORCH_WITHOUT_DECAY = ("Rprop",)
_TORCH_READS_ON_HOST = ("ASGD",)  # its eta and mu are tensors on the device, and it branches on them
# Arguments that the runtime sets, not the user: how a step runs and where its numbers come from.
TORCH_OURS = ("params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class TorchConfig(OptimizerConfig):
    """An element-wise optimizer of torch.optim, given by its class name and arguments and run on the shards.

    See [Note: what torch's optimizers keep]. The arguments must not include lr, which is passed to each step, nor
    weight_decay, which belongs to the groups.
    """

    kind = "torch"
    updates_units_alone = False

    class_name: str = field(default="", metadata=keyed("name", "Adagrad"))
    arguments: dict[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.0

    def _check(self, limits: Limits) -> None:
        name = self.class_name
        if problem := torch_problem(name):
            limits.refuse(problem, name, f"optimizer.name={nearest(name, TORCH_NAMES) or 'Adagrad'}")
        if ours := [argument for argument in self.arguments if argument in TORCH_OURS]:
            rule = f"optimizer.arguments are those of torch.optim.{name} but {', '.join(TORCH_OURS)}"
            limits.refuse(rule, ", ".join(ours), "optimizer.arguments={}")
        decays = {self.weight_decay, *(group.weight_decay or 0.0 for group in self.groups)}
        if name in TORCH_WITHOUT_DECAY and decays != {0.0}:
            limits.refuse(f"torch.optim.{name} has no weight decay", max(decays), "optimizer.weight_decay=0")

    @property
    def name(self) -> str:
        return f"torch.optim.{self.class_name}"

    @property
    def state_names(self) -> tuple[str, ...]:
        states = _TORCH_STATES[self.class_name]
        return tuple(name for name, switch in states.items() if switch == _ALWAYS or self.arguments.get(switch))

    @property
    def uses_betas(self) -> bool:
        """Whether its momentum is the first of its betas."""
        return self.class_name in _TORCH_BETAS

    @property
    def has_momentum(self) -> bool:
        return self.uses_betas or bool(self.arguments.get("momentum"))

    @property
    def reads_on_host(self) -> bool:
        return self.class_name in _TORCH_READS_ON_HOST


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    config.kind: config
    for config in (
        *(AdamWConfig, AdamW8bitConfig, AdamConfig, SgdConfig, LionConfig, LambConfig, MuonConfig, OneBitAdamConfig),
        TorchConfig,
    )
}


def _bytes_of(states: Iterable[HeldState]) -> float:
    return sum(STATE_ITEMSIZE_BYTES[held.dtype] / held.per for held in states)


def whole_itemsize(config: OptimizerConfig) -> int:
    """Bytes of an element in the dtype in which matrices are updated whole; 0 if none is."""
    return ITEMSIZE_BYTES[config.ns_dtype] if isinstance(config, MuonConfig) else 0


def torch_problem(class_name: str) -> str:
    """Why this class of torch.optim cannot run on shards, and which classes can; empty if this class can."""
    if class_name in _TORCH_STATES:
        return ""
    reason = TORCH_REFUSED.get(class_name, "it is not known to be element-wise")
    return (
        f"torch.optim.{class_name or '?'} cannot run on shards of parameters: {reason}; "
        f"expected one of {', '.join(TORCH_NAMES)}"
    )


def refuse_host_reads(config: OptimizerConfig) -> None:
    """Raise PlanError if a step of this optimizer would read a tensor's value on the host."""
    if config.reads_on_host:
        raise PlanError(
            f"optimizer {config.name}: a dry run has no values, and this optimizer reads some on the host in each "
            "step; choose another optimizer for the dry run (one with as many states needs as much memory)"
        )
