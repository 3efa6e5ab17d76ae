"""Builds a runtime's units from a model: plans them, opens their offload tier and fills them one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.collectives import Collectives
from zero_runtime.errors import CheckpointError, OffloadError, PlanError
from zero_runtime.flat_layout import FlatLayout
from zero_runtime.initial_values import InitialValues
from zero_runtime.memory.model import UnitSize, model_state_bytes
from zero_runtime.offload.copy_streams import copies_for
from zero_runtime.offload.host import HostTier
from zero_runtime.offload.memory import host_bytes, nvme_bytes
from zero_runtime.offload.nvme import NvmeTier
from zero_runtime.offload.plan import Tier, offloaded_units
from zero_runtime.offload.preflight import check_room
from zero_runtime.offload.tier import StateTier, residence
from zero_runtime.optim.configs import OptimizerConfig
from zero_runtime.optim.sharded import ShardedOptimizer
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.settings import RuntimeSettings, moves_of
from zero_runtime.shard_location import OffloadedShards
from zero_runtime.tensor_source import TensorSource
from zero_runtime.unit import Unit
from zero_runtime.unit_planner import UnitRules, UnitSpec, move_buffers, plan_units


class BuiltUnits(NamedTuple):
    """The units, their optimizer, and the tier of the offloaded units (None without any)."""

    units: list[Unit]
    optimizer: ShardedOptimizer
    tier: StateTier | None


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
    ) -> None:
        self._plan = plan
        self._precision = precision
        self._settings = settings
        self._collectives = collectives
        self._device = device

    def build(self, model: nn.Module, config: OptimizerConfig) -> BuiltUnits:
        """Plan the units, then fill them one after another, so that at most one is unsharded at a time.

        The optimizer is created in between, so that it can refuse a setting before the model's parameters are replaced.
        """
        settings = self._settings
        specs = plan_units(model, UnitRules(self._precision, settings.unit_numel, settings.keep_dtype))
        settings.offload.check(self._plan, self._device.type)
        self._check_room(specs, config)
        units = [
            Unit(
                spec,
                self._plan,
                self._collectives,
                self._device,
                micro_batches=settings.micro_batches,
                offloaded=offloaded,
                block_numel=config.block_numel if spec.trainable else 1,
            )
            for spec, offloaded in zip(specs, self._offloaded_shards(specs), strict=True)
        ]
        optimizer = ShardedOptimizer(units, config, self._collectives, lazy_states=settings.lazy_states)
        tier = self._open_tier(units, optimizer)
        try:
            self._fill(model, units, tier)
        except BaseException:
            if tier is not None:
                tier.close()
            raise
        return BuiltUnits(units, optimizer, tier)

    def _fill(self, model: nn.Module, units: Sequence[Unit], tier: StateTier | None) -> None:
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
            unit.bind_initialized()
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
        shapes = {segment.name: segment.shape for unit in units for segment in unit.layout.segments}
        for name in source.names():
            if shapes.get(name) != source.shape(name):
                wanted = list(shapes[name]) if name in shapes else "no parameter of this name"
                raise PlanError(f"weights: expected {name}: {wanted}, found {list(source.shape(name))}")
        initialized = {segment.name for unit in units for segment, param in unit.placed() if param.is_meta}
        return frozenset(source.names()) & initialized

    def _read(self, units: Sequence[Unit], tier: StateTier | None, source: TensorSource, given: frozenset[str]) -> None:
        """Fill the shards of the given parameters from the source.

        If a rank cannot read its part, all ranks raise; the others would otherwise wait for it forever.
        """

        def read_all() -> None:
            for unit in units:
                with residence(tier, unit, writes=True):
                    unit.read_values(source, given)

        agree(self._collectives, trouble_of(read_all))

    # ---- offloaded shards ------------------------------------------------------------------------------------------

    def _offloaded_shards(self, specs: Sequence[UnitSpec]) -> list[OffloadedShards]:
        """For each unit, which shards are offloaded: have no memory on this rank's device between their uses."""
        offload, device = self._settings.offload, self._device.type
        separate = offload.has_separate_memory(device)
        moves = {Tier.DEVICE: False, Tier.HOST: separate, Tier.NVME: True}
        if not moves[offload.params] and not moves[offload.optimizer]:
            return [OffloadedShards()] * len(specs)
        offloaded = OffloadedShards(moves[offload.params], moves[offload.optimizer], separate)
        return [offloaded if chosen else OffloadedShards() for chosen in offloaded_units(specs, offload.ratio)]

    def _check_room(self, specs: Sequence[UnitSpec], config: OptimizerConfig) -> None:
        """Refuse an offload plan that does not fit into this machine's memory or onto its disk, before allocating."""
        offload, settings = self._settings.offload, self._settings
        units = [
            (self._size(spec, offloaded, config), spec.precision)
            for spec, offloaded in zip(specs, self._offloaded_shards(specs), strict=True)
        ]
        if not any(size.params_offloaded or size.optimizer_offloaded for size, _ in units):
            return
        moves = moves_of(settings, config, self._collectives.shard_count)
        needed = (nvme_bytes if offload.uses_nvme else host_bytes)(units, moves)
        memory = needed.host
        # On a CPU the shards that are not offloaded take host memory too, and so does one unsharded unit at a time.
        if self._device.type == "cpu":
            memory += sum(self._state_bytes(size, kind, config.state_bytes) for size, kind in units)
            memory += max(size.numel * ITEMSIZE_BYTES[kind.compute or kind.param] for size, kind in units)
        folder = offload.scratch.folder if offload.scratch is not None and offload.uses_nvme else None
        check_room(self._collectives, folder, scratch=needed.scratch, memory=memory)

    def _size(self, spec: UnitSpec, offloaded: OffloadedShards, config: OptimizerConfig) -> UnitSize:
        layout = FlatLayout.build(
            [(name, tuple(param.shape)) for name, param in spec.params],
            shard_count=self._collectives.shard_count,
            world=self._collectives.world,
            block_numel=config.block_numel if spec.trainable else 1,
        )
        return UnitSize.of(
            layout,
            trainable=spec.trainable,
            params_offloaded=offloaded.params,
            optimizer_offloaded=offloaded.optimizer,
            separate_memory=offloaded.separate_memory,
        )

    def _state_bytes(self, size: UnitSize, kind: MixedPrecision, state_bytes: float) -> int:
        found = model_state_bytes(
            self._plan,
            kind,
            [size],
            world=self._collectives.world,
            micro_batches=self._settings.micro_batches,
            state_bytes=state_bytes,
        )
        return found.total

    def _open_tier(self, units: Sequence[Unit], optimizer: ShardedOptimizer) -> StateTier | None:
        """The tier of the offloaded units, None without any; if a rank cannot open its tier, all ranks raise."""
        held = [unit for unit in units if unit.params_offloaded or unit.states_offloaded]
        if not held:
            return None
        opened: list[StateTier] = []
        try:
            agree(self._collectives, trouble_of(lambda: opened.append(self._tier_of(held, optimizer))))
        except CheckpointError as error:
            for tier in opened:
                tier.close()
            raise OffloadError(str(error)) from None
        optimizer.offload_to(opened[0])
        return opened[0]

    def _tier_of(self, held: Sequence[Unit], optimizer: ShardedOptimizer) -> StateTier:
        offload = self._settings.offload
        copies = (offload.copies or copies_for)(self._device)
        if offload.scratch is not None and offload.uses_nvme:
            return NvmeTier(
                held,
                optimizer.states_of,
                offload.scratch,
                self._collectives.rank,
                copies=copies,
                holds_params=offload.params is Tier.NVME,
                speculative=offload.speculative,
            )
        assert copies is not None, "host offload needs copies between two memories"
        return HostTier(held, optimizer.states_of, copies, speculative=offload.speculative)
