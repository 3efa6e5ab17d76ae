"""Optimizer configurations without tensors: the constants of each optimizer. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from zero_runtime.errors import PlanError
from zero_runtime.limits import NO_KEY, Limits, keyed, nearest
from zero_runtime.optim.config_base import CODE_BLOCK_NUMEL as CODE_BLOCK_NUMEL
from zero_runtime.optim.config_base import FP32_BYTES, MOMENTS, StateDType
from zero_runtime.optim.config_base import MOST_BETA_BF16 as MOST_BETA_BF16
from zero_runtime.optim.config_base import SIGNED_MOMENTS as SIGNED_MOMENTS
from zero_runtime.optim.config_base import STATE_ITEMSIZE_BYTES as STATE_ITEMSIZE_BYTES
from zero_runtime.optim.config_base import HeldState as HeldState
from zero_runtime.optim.config_base import OptimizerConfig as OptimizerConfig
from zero_runtime.optim.config_base import scale_name as scale_name
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES
from zero_runtime.wire import Wire


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """AdamW's constants (arXiv 1711.05101): weight decay is decoupled from the gradient.

    By default norms and biases are not decayed, unlike in torch.optim.AdamW; `no_decay=False` decays them too.
    state_dtype: of the moments in memory; bf16 halves them and rounds each once in a step (config_base.py: which betas
    it allows). corrects_bias: whether the moments are corrected for their start at 0.
    """

    kind = "adamw"

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    state_dtype: StateDType = field(default="fp32", kw_only=True)
    corrects_bias: bool = field(default=True, kw_only=True, metadata=NO_KEY)


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
    """LAMB's constants (arXiv 1904.00962): each parameter's update is scaled by |weights| / |update|.

    min_coeff, max_coeff: limits of this ratio. correction: of the moments' bias; in the `moments`, as in the paper, or
    in the `rate`, as in DeepSpeed's FusedLamb, whose first updates are smaller.
    """

    kind = "lamb"
    updates_units_alone = False

    eps: float = 1e-6
    min_coeff: float | None = None
    max_coeff: float | None = None
    correction: Literal["moments", "rate", "none"] = "moments"
    state_dtype: StateDType = field(default="fp32", kw_only=True, metadata=NO_KEY)

    def _check(self, limits: Limits) -> None:
        limits.at_least(0, min_coeff=0.01)
        limits.must("correction", ("moments", "rate", "none").__contains__, "moments, rate or none")
        low, high = self.min_coeff or 0.0, self.max_coeff
        if high is not None and not low <= high < math.inf:
            rule = f"optimizer.max_coeff must be finite and at least min_coeff={low}"
            limits.refuse(rule, high, "optimizer.max_coeff=10.0 optimizer.min_coeff=0.01")


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
        limits.must("dampening", lambda value: 0 <= value <= 1, "from 0 to 1")
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

    def check_run(self, plan: ZeroPlan, clip_norm: float | None, wire: Wire) -> None:
        limits = Limits({}, "optimizer")
        if plan.outer_sharding is not None:
            rule = "optimizer.kind=muon sends parts of matrices inside a shard group: zero.outer_sharding must be null"
            limits.refuse(rule, plan.outer_sharding, "zero.outer_sharding=null", "optimizer=adamw")
        limits.conclude()

    @property
    def matrix_patterns(self) -> tuple[str, ...] | None:
        return tuple(self.matrices)


_ALWAYS = ""
_ADAM_STATES = {"exp_avg": _ALWAYS, "exp_avg_sq": _ALWAYS}
# Each element-wise optimizer of torch.optim with the states that it keeps for each element, and the argument that
# switches a state on. One that is not listed cannot run on shards and is refused by name.
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
    "Adafactor": "its second moment is kept by rows and columns of a whole matrix; the nearest is Lion, with one state",
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

    The arguments must not include lr, which is passed to each step, nor
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


@dataclass(frozen=True)
class ProbedConfig(TorchConfig):
    """An optimizer of any class whose update a probe found element-wise (deepspeed/probed_optimizer.py).

    given: an instance, which has its constants. numbers: its states that are one number, as examples of their types.
    """

    name: str = field(default="", metadata=NO_KEY)
    state_names: tuple[str, ...] = field(default=(), metadata=NO_KEY)
    uses_betas: bool = field(default=False, metadata=NO_KEY)
    given: Any = field(default=None, metadata=NO_KEY)
    numbers: dict[str, Any] = field(default_factory=dict, metadata=NO_KEY)

    def _check(self, limits: Limits) -> None:
        """The probe has checked it."""


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    config.kind: config
    for config in (
        *(AdamWConfig, AdamW8bitConfig, AdamConfig, SgdConfig, LionConfig, LambConfig, MuonConfig, OneBitAdamConfig),
        TorchConfig,
    )
}


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
