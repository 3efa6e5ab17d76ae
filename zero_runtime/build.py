"""Builds a runtime's units from a model: plans them, opens their offload tier and fills them one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.collectives import Collectives
from zero_runtime.errors import PlanError
from zero_runtime.flat_layout import FlatLayout, LayoutRules
from zero_runtime.initial_values import InitialValues
from zero_runtime.kernels.registration import VARIABLE, Chosen, chosen
from zero_runtime.optim.configs import OptimizerConfig, SgdConfig
from zero_runtime.optim.loss_scaler import UNSCALED
from zero_runtime.optim.sharded import ShardedOptimizer
from zero_runtime.parameter_memory import check_parameters
from zero_runtime.parameter_reads import refuse_owned
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.settings import RuntimeSettings
from zero_runtime.shard_location import offloaded_shards
from zero_runtime.slices import WHOLE, Slices
from zero_runtime.state_tier import NOTHING_OFFLOADED, StateTier, is_offloaded, residence
from zero_runtime.tensor_source import TensorSource
from zero_runtime.unit import Unit
from zero_runtime.unit_planner import UnitRules, UnitSpec, move_buffers, plan_units
from zero_runtime.wings import BEGIN_INFERENCE, CHECK_OFFLOAD, OPEN_TIER, load
from zero_runtime.wire import check_scaled
from zero_runtime.world import world_size

NO_OPTIMIZER: OptimizerConfig = SgdConfig()  # of a runtime for inference: keeps no state, and has no unit to update


class BuiltUnits(NamedTuple):
    """The units, their optimizer, and the tier of the offloaded units."""

    units: list[Unit]
    optimizer: ShardedOptimizer
    tier: StateTier


def make_collectives(plan: ZeroPlan, settings: RuntimeSettings, clock: PhaseClock) -> Collectives:
    """The collectives of a plan over the default process group, which must be initialized."""
    data_world = settings.tensor_parallel.data_world(world_size())
    return Collectives(
        plan.shard_count(data_world),
        clock,
        settings.watch,
        tensor_degree=settings.tensor_parallel.degree,
        sequence_degree=settings.sequence_parallel.degree,
        group_ranks=plan.group_ranks(data_world),
    )


def check_kernels(found: Sequence[Chosen | None]) -> None:
    """Raise PlanError unless all ranks have the same implementation of the kernels; `found` is in rank order.

    Each replica of a state updates itself, so replicas with different last bits would drift apart unnoticed.
    """
    ranks: dict[Chosen | None, list[int]] = {}
    for rank, one in enumerate(found):
        ranks.setdefault(one, []).append(rank)
    if len({one.name for one in ranks if one is not None}) < 2:
        return
    parts = [
        f"{one.name} on rank {', '.join(map(str, own))}" + (f" ({one.trouble})" if one.trouble else "")
        for one, own in ranks.items()
        if one is not None
    ]
    raise PlanError(
        f"kernels: expected the same implementation on every rank, found {' and '.join(parts)}; repair the machines of "
        f"the ranks that use the reference, or set {VARIABLE}=reference on all ranks"
    )


def check_together(
    plan: ZeroPlan,
    precision: MixedPrecision,
    config: OptimizerConfig,
    settings: RuntimeSettings,
    device_type: str,
) -> None:
    """Raise ConfigError for settings that do not go together, as far as that depends neither on the model nor on ranks.

    To be called before process groups are made: a rank that refuses and ends while another one still connects would
    leave it with an error of the connection.
    """
    settings.offload.check(plan, device_type)
    settings.wire.check_plan(plan)
    config.check_run(plan, settings.clip_norm, settings.wire)
    settings.wire.check_precision(plan, precision)
    check_scaled(settings.wire, scales_loss=settings.loss_scale != UNSCALED)


def checked_plan(
    model: nn.Module,
    plan: ZeroPlan,
    precision: MixedPrecision,
    optimizer: OptimizerConfig | None,
    settings: RuntimeSettings,
    device_type: str,
) -> ZeroPlan:
    """The plan to follow. Before the model is changed, PlanError if another runtime owns it or a parameter cannot be
    trained, and ConfigError if the settings do not go together."""
    refuse_owned(model)
    check_parameters(model)
    tensor = settings.tensor_parallel
    tensor.check(optimizer)
    if settings.sequence_parallel.degree > 1:
        settings.sequence_parallel.check(model, ranks=tensor.data_world(world_size()), tensor_degree=tensor.degree)
    if optimizer is None:
        load(BEGIN_INFERENCE)(model, plan, settings.offload, settings.wire)
    check_together(plan, precision, optimizer or NO_OPTIMIZER, settings, device_type)
    return plan


class UnitBuilder:
    """Builds the units of one model; all ranks must build together.

    Unsupported plans and optimizers are refused before the model is changed.
    """

    def __init__(
        self,
        plan: ZeroPlan,
        precision: MixedPrecision,
        settings: RuntimeSettings,
        collectives: Collectives,
        device: torch.device,
        slices: Slices = WHOLE,
    ) -> None:
        self._plan = plan
        self._slices = slices
        self._precision = precision
        self._settings = settings
        self._collectives = collectives
        self._device = device

    def build(self, model: nn.Module, config: OptimizerConfig | None) -> BuiltUnits:
        """Plan the units, then fill them one after another, so that at most one is unsharded at a time.

        The optimizer is created in between, so that it can refuse a setting before the model's parameters are replaced.
        """
        settings, config = self._settings, config or NO_OPTIMIZER
        specs = plan_units(
            model,
            UnitRules(
                self._precision, settings.unit_numel, settings.keep_dtype, config.matrix_patterns, slices=self._slices
            ),
        )
        self._collectives.places.update((spec.name, place) for place, spec in enumerate(specs, start=1))
        for spec in specs:
            settings.wire.check_precision(self._plan, spec.precision)
        offloaded = offloaded_shards(settings.offload, specs, self._device.type)
        layouts = self._lay_out(specs, config)
        if any(shards.params or shards.optimizer for shards in offloaded):
            planned = list(zip(specs, layouts, offloaded, strict=True))
            load(CHECK_OFFLOAD)(planned, settings, config, self._plan, self._collectives, self._device.type)
        units = [
            Unit(
                spec,
                layout,
                self._plan,
                self._collectives,
                self._device,
                micro_batches=settings.micro_batches,
                offloaded=shards,
                wire=settings.wire,
            )
            for spec, layout, shards in zip(specs, layouts, offloaded, strict=True)
        ]
        optimizer = ShardedOptimizer(units, config, self._collectives, lazy_states=settings.lazy_states)
        self._agree_on_kernels()
        tier = NOTHING_OFFLOADED
        if any(is_offloaded(unit) for unit in units):
            tier = load(OPEN_TIER)(settings.offload, units, optimizer.states_of, self._collectives, self._device)
        optimizer.offload_to(tier)
        try:
            self._fill(model, units, tier)
        except BaseException:
            tier.close()
            raise
        return BuiltUnits(units, optimizer, tier)

    def _lay_out(self, specs: Sequence[UnitSpec], config: OptimizerConfig) -> list[FlatLayout]:
        aligned = self._settings.wire.aligned_numel(self._settings.tensor_parallel.degree)
        collectives = self._collectives
        rules = LayoutRules(collectives.shard_count, collectives.data_world, config.block_numel, aligned)
        return [rules.layout(spec.shapes, trainable=spec.trainable, coded=spec.is_coded) for spec in specs]

    def _agree_on_kernels(self) -> None:
        """Refuse different kernels on different ranks. Those for CPUs all have the reference's bits."""
        if self._device.type == "cuda" and self._collectives.world > 1:
            check_kernels(self._collectives.gather_objects(chosen(self._device)))

    def _fill(self, model: nn.Module, units: Sequence[Unit], tier: StateTier) -> None:
        """Give buffers and parameters their values: those of the model, drawn ones, or those of `settings.weights`."""
        settings = self._settings
        initial = InitialValues(model, seed=settings.seed, initialise=settings.initialise)
        initial.fill_buffers()  # its rules must see no parameter that is bound already
        move_buffers(model, self._device)
        self._share_buffers(model)
        given = self._given(units)
        for unit in units:
            with residence(tier, unit, writes=True, fresh=True):
                unit.materialize(initial, given)
        for unit in units:
            unit.parameters.bind_initialized()
        if settings.weights is not None:
            self._read(units, tier, settings.weights, given)

    def _share_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers to all ranks, as `Unit.materialize` does for parameters that have values."""
        for buffer in model.buffers():
            values = buffer.detach().contiguous()
            self._collectives.broadcast(values)
            if not buffer.is_contiguous():
                buffer.copy_(values)

    # ---- weights from a source -------------------------------------------------------------------------------------

    def _given(self, units: Sequence[Unit]) -> frozenset[str]:
        """Names of the meta parameters for which `settings.weights` has values.

        Raises PlanError if the source has a parameter that the model lacks or has in another shape.
        """
        source = self._settings.weights
        if source is None:
            return frozenset()
        shapes = {name: shape for unit in units for name, shape in unit.full_shapes.items()}
        for name in source.names():
            if shapes.get(name) != source.shape(name):
                wanted = list(shapes[name]) if name in shapes else "no parameter of this name"
                raise PlanError(f"weights: expected {name}: {wanted}, found {list(source.shape(name))}")
        initialized = {segment.name for unit in units for segment, param in unit.parameters.placed() if param.is_meta}
        return frozenset(source.names()) & initialized

    def _read(self, units: Sequence[Unit], tier: StateTier, source: TensorSource, given: frozenset[str]) -> None:
        """Fill the shards of the given parameters from the source.

        If a rank cannot read its part, all ranks raise; the others would otherwise wait for it forever.
        """

        def read_all() -> None:
            for unit in units:
                with residence(tier, unit, writes=True):
                    unit.read_values(source, given)

        agree(self._collectives, trouble_of(read_all))
