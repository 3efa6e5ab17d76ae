"""The optimizer that updates the master shards unit by unit. It owns its states; the units own everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zero_runtime.collectives import Collectives
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import PlanError
from zero_runtime.kernels import ops
from zero_runtime.optim.configs import (
    SIGNED_MOMENTS,
    HeldState,
    OptimizerConfig,
    refuse_host_reads,
    scale_name,
)
from zero_runtime.optim.groups import GroupTable
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.optim.quantized_state import CodedShard, RoundedShard
from zero_runtime.optim.rules import ElementwiseRule, Held, StepNumbers, UpdateRule, check_momentum
from zero_runtime.state_tier import NOTHING_OFFLOADED, Shards, StateTier, is_offloaded
from zero_runtime.unit import Unit
from zero_runtime.wings import UPDATE_RULES, load

ToldState = torch.Tensor | CodedShard | RoundedShard  # a state as others see it: in fp32, or converted to it


class ShardedOptimizer:
    """The states of every trainable unit, held as `OptimizerConfig.held_states` defines, and the step that uses them.

    `step` is not called for skipped steps: everything that these must not change (states, `updates`) is in this class.
    """

    def __init__(
        self, units: Iterable[Unit], config: OptimizerConfig, collectives: Collectives, *, lazy_states: bool = False
    ) -> None:
        """`lazy_states`: allocate states only when a step, a tier or a checkpoint asks for them."""
        units = list(units)
        self.config = config
        self.updates = 0  # number of updates made; the argument of a schedule
        names = [segment.name for unit in units for segment in unit.layout.segments]
        self._groups = GroupTable(config.groups, names, weight_decay=config.decay, no_decay=config.no_decay)
        self._units = [unit for unit in units if unit.trainable]
        self._helds = [
            Held(
                unit,
                self._groups.runs(unit.layout, collectives.shard_rank),
                {},
            )
            for unit in self._units
        ]
        self._unmade = True
        if not lazy_states:
            self._make_states()
        if any(isinstance(held.unit.master_shard, FakeTensor) for held in self._helds):
            refuse_host_reads(config)
        else:
            for device in {device for unit in self._units for device in (unit.device, _where(unit))}:
                ops.prepare(device)  # here and not in the first step, where the other ranks would wait for it
        self._by_unit = {unit.name: held for unit, held in zip(self._units, self._helds, strict=True)}
        self._offloaded = [unit for unit in self._units if is_offloaded(unit)]
        self._staying = [self._by_unit[unit.name] for unit in self._units if not is_offloaded(unit)]
        self._tier = NOTHING_OFFLOADED
        if self._offloaded and not config.updates_units_alone:
            raise PlanError(
                "offload: expected an optimizer that updates one unit after another (AdamW, Adam, Sgd, "
                f"Lion), found {config.name}; use one of them, or offload=none"
            )
        self._rule = _rule(config, self._helds, collectives)
        self._sums_over_ranks = True  # as units begin
        self._choose_gradients()

    def _make_states(self) -> None:
        if self._unmade:
            self._unmade = False
            for unit, held in zip(self._units, self._helds, strict=True):
                states = self.config.held_by(matrices=unit.matrices)
                held.states.update({state.name: _zeros(unit, state) for state in states})

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states of each element outside the optimizer, in order."""
        return self.config.state_names

    def step(self, lr: float | Rates, grad_scale: torch.Tensor, host_scale: torch.Tensor | None = None) -> None:
        """Update every master shard from its unit's grad_shard times grad_scale (0-dim fp32), then the parameter
        shards. If `lr` is one number, it is multiplied by each group's factor. host_scale: grad_scale as a CPU tensor,
        for units that are updated on the host."""
        self._make_states()
        host_scale = grad_scale if host_scale is None else host_scale
        numbers = self._numbers(lr, grad_scale)
        with torch.no_grad():
            self._rule.update(self._staying, numbers)
            if self._tier is not NOTHING_OFFLOADED:
                both = (numbers, replace(numbers, grad_scale=host_scale))
                self._tier.update(self._offloaded, partial(self._compute, both))
        self.updates += 1
        self._choose_gradients()

    def _choose_gradients(self) -> None:
        """Let the gradients of the next step be summed over the ranks, unless its update takes each rank's own."""
        over_ranks = not self.config.compresses_in(self.updates + 1)
        if over_ranks != self._sums_over_ranks:
            self._sums_over_ranks = over_ranks
            for unit in self._units:
                unit.gradients.sum_gradients(over_ranks=over_ranks)

    def check_rates(self, lr: float | Rates) -> None:
        """Raise PlanError if the rates are no rates, or do not fit the groups or the optimizer."""
        rates = _rates(lr)
        self._groups.check_rates(rates.lr)
        check_momentum(self.config, rates.momentum)

    def _numbers(self, lr: float | Rates, grad_scale: torch.Tensor) -> StepNumbers:
        """Numbers of the next step."""
        self.check_rates(lr)
        rates = _rates(lr)
        return StepNumbers(
            self.updates + 1, lambda settings: self._groups.rate(rates.lr, settings), rates.momentum, grad_scale
        )

    # ---- offloaded units -------------------------------------------------------------------------------------------

    def _compute(self, either: Sequence[StepNumbers], unit: Unit, shards: Shards) -> None:
        """Update the shards that a tier lends, with the numbers whose grad_scale is on the device of the shards."""
        numbers = next(one for one in either if one.grad_scale.device == shards.param_shard.device)
        self._rule.update([Held(shards, self._by_unit[unit.name].runs, shards.states)], numbers)

    def offload_to(self, tier: StateTier) -> None:
        """Use `tier` for the units that are offloaded."""
        self._tier = tier

    def begin_step(self) -> None:
        """Announce that `step` or `forget_step` will follow, so that the tier can start reading."""
        self._tier.expect(self._offloaded)

    def forget_step(self) -> None:
        """The step that was announced is skipped."""
        self._tier.forget()

    def counters(self) -> dict[str, float]:
        """Scalars kept in addition to the states, equal on every rank that has them: the number of updates, and a torch
        optimizer's own scalars by group. Groups of which this rank holds no elements are missing."""
        return {"updates": float(self.updates), **self._rule.counters(self._helds)}

    def load_counters(self, counters: Mapping[str, float]) -> None:
        """Resume from `counters` (the union over the ranks), after the states have been filled in place."""
        self.updates = int(counters["updates"])
        self._rule.resume(self._helds, counters)
        self._choose_gradients()

    def states_of(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The tensors that hold the unit's states, by name, in the order of its layout; empty for a frozen unit. They
        belong to the optimizer: filling them in place sets the states. Waits for an update that is under way."""
        unit.settle()
        self._make_states()
        return self.tensors_of(unit)

    def tensors_of(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The same tensors as they are now, without waiting: empty ones if they are in a file. For counting."""
        held = self._by_unit.get(unit.name)
        return {} if held is None else held.states

    def told_states_of(self, unit: Unit) -> dict[str, ToldState]:
        """The unit's states by name as fp32 values: the optimizer's own tensors, or an object that converts them."""
        held = self.states_of(unit)
        return {name: _told(held, name) for name in self.state_names if name in held}

    def free(self) -> None:
        """Release the states."""
        self._units.clear()
        self._offloaded.clear()
        self._helds.clear()
        self._staying.clear()
        self._by_unit.clear()
        self._rule.free()

    def state_tensors(self) -> list[torch.Tensor]:
        """All states and what the rule keeps besides, for counting."""
        return [*(state for held in self._helds for state in held.states.values()), *self._rule.tensors()]


def _rule(config: OptimizerConfig, helds: list[Held], collectives: Collectives) -> UpdateRule:
    place = UPDATE_RULES.get(config.kind)
    rule: UpdateRule = ElementwiseRule(config) if place is None else load(place)(config, helds, collectives)
    return rule


def _rates(lr: float | Rates) -> Rates:
    return lr if isinstance(lr, Rates) else Rates(lr)


def _where(unit: Unit) -> torch.device:
    """The device that updates the unit."""
    return torch.device("cpu") if unit.parameters.states_offloaded else unit.device


def _zeros(unit: Unit, held: HeldState) -> torch.Tensor:
    """One held state, all zeros; on the meta device if states are offloaded, to describe it to the tier."""
    assert unit.master_shard is not None
    device = torch.device("meta") if unit.parameters.states_offloaded else unit.device
    return torch.zeros(unit.layout.shard_numel // held.per, dtype=TORCH_DTYPE[held.dtype], device=device)


def _told(held: Mapping[str, torch.Tensor], name: str) -> ToldState:
    scales = held.get(scale_name(name))
    if scales is not None:
        return CodedShard(held[name], scales, signed=name in SIGNED_MOMENTS)
    return held[name] if held[name].dtype == torch.float32 else RoundedShard(held[name])
