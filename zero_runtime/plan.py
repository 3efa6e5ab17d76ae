"""The table of ZeRO stages: which model states are sharded, and when full copies are freed.

Only this file defines the stages, and only the readers of DeepSpeed's configurations and checkpoints name them besides;
all other code of the runtime queries a `ZeroPlan`. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from zero_runtime.errors import PlanError
from zero_runtime.limits import Broken, ConfigError, Limits


class Partition(Enum):
    """How one model state is distributed over the data-parallel ranks.

    GROUP: over the ranks of a shard group, where SHARDED is over all ranks; see `ZeroPlan.held_params`.
    """

    REPLICATED = "replicated"
    GROUP = "group"
    SHARDED = "sharded"


class Phase(Enum):
    """The parts of a training step after which a full copy may be freed or become stale."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"

    __hash__ = object.__hash__  # that of Enum is a Python function, called several times for each unit


R, S = Partition.REPLICATED, Partition.SHARDED
OuterSharding = Literal["optim"]

# (params, grads, optimizer), arXiv 1910.02054 section 5: each stage shards one more state.
_STAGES = {0: (R, R, R), 1: (R, R, S), 2: (R, S, S), 3: (S, S, S)}


@dataclass(frozen=True)
class ZeroPlan:
    """One row of the table. Only rows that the ZeRO paper defines are valid.

    shard_ranks: sharded states are split over groups of this many consecutive ranks and replicated across the groups
    (hybrid sharding: a group inside a node, replicas across nodes); None splits them over all ranks.

    outer_sharding: what is replicated across the groups is sharded too, so that gradients, masters and optimizer states
    are split over all ranks. Each group still holds all parameters in the dtype that is gathered, so full copies are
    gathered inside a group. "optim": the groups exchange new parameters once after a step.
    """

    params: Partition
    grads: Partition
    optimizer: Partition
    shard_ranks: int | None = None
    outer_sharding: OuterSharding | None = None

    def __post_init__(self) -> None:
        row = (self.params, self.grads, self.optimizer)
        if row not in _STAGES.values():
            names = ", ".join(state.value for state in row)
            raise PlanError(
                f"no ZeRO stage has (params, grads, optimizer) = ({names}): expected each state to be sharded "
                "only where the ones after it are; use ZeroPlan.from_stage(0 | 1 | 2 | 3)"
            )
        limits = Limits(vars(self), "zero")
        limits.at_least(1, shard_ranks=None)
        if self.shard_ranks is not None and self.optimizer is R:
            rule = "zero.shard_ranks needs a stage that shards something"
            limits.refuse(rule, "stage 0", "zero.shard_ranks=null", "zero.stage=1")
        limits.must("outer_sharding", ("optim",).__contains__, "optim or null", None)
        if self.outer_sharding is not None and not limits.broken:
            self._check_outer_sharding(limits)
        limits.conclude()

    def _check_outer_sharding(self, limits: Limits) -> None:
        if self.params is R:
            rule = (
                "zero.outer_sharding needs zero.stage=3: the other stages keep full parameters on every rank, and "
                "shard the rest over all ranks with zero.shard_ranks=null"
            )
            limits.refuse(rule, f"stage {self.stage}", "zero.outer_sharding=null", "zero.stage=3")
        elif self.shard_ranks is None:
            rule = "zero.outer_sharding needs zero.shard_ranks, the ranks of a group such as a node"
            limits.refuse(rule, None, "zero.outer_sharding=null")

    @classmethod
    def from_stage(
        cls, stage: int, *, shard_ranks: int | None = None, outer_sharding: OuterSharding | None = None
    ) -> ZeroPlan:
        """The plan of ZeRO stage 0 (plain data parallelism), 1, 2 or 3."""
        if stage not in _STAGES:
            raise ConfigError([Broken("zero.stage must be 0, 1, 2 or 3", repr(stage), ("zero.stage=2",))])
        return cls(*_STAGES[stage], shard_ranks=shard_ranks, outer_sharding=outer_sharding)

    @property
    def stage(self) -> int:
        """The number of the row, for people and for DeepSpeed's files: the runtime asks for states instead."""
        row = (self.params, self.grads, self.optimizer)
        return next(stage for stage, states in _STAGES.items() if states == row)

    def shard_count(self, world: int) -> int:
        """Number of ranks that a sharded state is split over; a divisor of `world`."""
        group_ranks = self.group_ranks(world)
        return group_ranks if self.outer_sharding is None else world

    def group_ranks(self, world: int) -> int:
        """Number of ranks of a shard group, from which a full copy is gathered; a divisor of `world`.

        Equal to `shard_count` unless the plan has outer sharding.
        """
        count = (self.shard_ranks or world) if self.optimizer is S else 1
        if world % count:
            raise PlanError(f"zero.shard_ranks={count}: expected a divisor of the {world} ranks")
        return count

    @property
    def held_params(self) -> Partition:
        """How the parameters that a rank holds between their uses are distributed."""
        return self.params if self.outer_sharding is None else Partition.GROUP

    def ranks_of(self, partition: Partition, world: int) -> int:
        """Number of ranks that a state of this partition is split over."""
        if partition is R:
            return 1
        return self.group_ranks(world) if partition is Partition.GROUP else self.shard_count(world)

    def check_inference(self) -> None:
        """ConfigError if this plan shards only what inference does not have: gradients and optimizer states."""
        if self.outer_sharding is not None:
            rule = "zero.outer_sharding shards gradients and optimizer states, which inference does not have"
            raise ConfigError([Broken(rule, self.outer_sharding, ("zero.outer_sharding=null",))])
        if self.params is R and self.optimizer is S:
            rule = (
                "inference has no gradients and no optimizer states, which are all that stages 1 and 2 shard: expected "
                "zero.stage=3, which shards the parameters, or zero.stage=0"
            )
            found = "zero.stage=1" if self.grads is R else "zero.stage=2"
            raise ConfigError([Broken(rule, found, ("zero.stage=3", "zero.stage=0"))])

    def freeing_params(self) -> ZeroPlan:
        """A plan that frees full copies after their use, for parameters that are stored in another form."""
        return self if self.params is S else ZeroPlan(S, S, S, shard_ranks=self.shard_ranks)

    @property
    def keeps_full_params(self) -> bool:
        """Whether every rank keeps the full parameters in memory throughout; else they are freed between uses."""
        return self.params is R

    @property
    def keeps_full_grads(self) -> bool:
        """Whether every rank keeps the full gradients until the step; else only its shard of their sum."""
        return self.grads is R

    @property
    def reduces_every_backward(self) -> bool:
        """Whether gradients are reduced after each micro-batch, or summed locally until the last one."""
        return not self.keeps_full_grads

    def releases_params_after(self, phase: Phase) -> bool:
        """Whether the full parameters are freed or become stale after `phase`. They are stale after every step."""
        return phase is Phase.STEP or not self.keeps_full_params
