"""The parameters of a unit whose frozen weights are stored and gathered as codes.

The full copy exists only while it is in use, at every stage: each gather reads it back from the codes, in the forward
and again in the backward, and a release frees it (see [Note: release by storage] in unit_parameters.py). Where the plan
shards parameters, a gather sends codes; else every rank holds all codes, and a gather sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from zero_runtime.codec import Codec
from zero_runtime.collectives import Collectives, Pending
from zero_runtime.errors import PlanError
from zero_runtime.flat_layout import FlatLayout, Segment
from zero_runtime.group_shard import GroupShard
from zero_runtime.initial_values import InitialValues
from zero_runtime.kernels.weight_codes import BLOCK_NUMEL, CHUNK_NUMEL, decode_weights_, encode_weights_, stored_bytes
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import CODE_BITS
from zero_runtime.shard_location import OffloadedShards
from zero_runtime.tensor_source import ReadInto
from zero_runtime.unit_parameters import DataState, Gather, UnitParameters
from zero_runtime.unit_planner import UnitSpec
from zero_runtime.wire import EXACT, Wire


class ReadCodes(Codec):
    """What is sent is what is stored; the full copy is read from it."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def decode(self, full: torch.Tensor, sent: torch.Tensor) -> None:
        decode_weights_(full, sent, self._bits)


class HeldCodes(GroupShard):
    """All codes of a unit on a rank, which reads the codes of its own shard from a source, and gets the others once."""

    def __init__(self, unit: str, values: torch.Tensor, collectives: Collectives) -> None:
        super().__init__(unit, values, collectives)
        self.own = values.chunk(collectives.shard_count)[collectives.shard_rank]

    def renew(self) -> None:
        if not self._is_current:
            self._is_current = True
            self._exchange = self._collectives.all_gather(self.values, self.own, self._unit)


class StoredCodes(UnitParameters):
    """param_shard: the codes of this rank's shard, uint8. group_shard: all codes, where the plan keeps
    full parameters on every rank; else None. See UnitParameters."""

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        plan: ZeroPlan,
        collectives: Collectives,
        device: torch.device,
        offloaded: OffloadedShards,
        wire: Wire = EXACT,
    ) -> None:
        assert spec.precision.weights is not None
        _refuse_together(spec, plan, offloaded, wire)
        self._bits = CODE_BITS[spec.precision.weights]
        self._holds_all = plan.keeps_full_params
        super().__init__(spec, layout, plan.freeing_params(), collectives, device, offloaded, wire)
        self._codec = ReadCodes(self._bits)

    def _decide_aliases(self, offloaded: OffloadedShards) -> None:
        self.param_dtype = torch.uint8  # in which nothing is computed, so that each full copy is a cast
        super()._decide_aliases(offloaded)

    def _allocate(self) -> None:
        self.unsharded_param = self._empty(self.layout.padded_numel, self._compute_dtype)
        self.unsharded_param.untyped_storage().resize_(0)
        self.master_shard = self.group_shard = None
        shard = stored_bytes(self.layout.shard_numel, self._bits)
        if self._holds_all:
            held = self._empty(shard * self.layout.shard_count, torch.uint8)
            self.group_shard = HeldCodes(self.name, held, self._collectives)
            self.param_shard = self.group_shard.own
        else:
            self.param_shard = self._empty(shard, torch.uint8)

    # ---- values ------------------------------------------------------------------------------------------------------

    def materialize(self, initial: InitialValues, given: Collection[str]) -> None:
        if self.state is DataState.STALE:  # as in UnitParameters
            self.move(DataState.UNSHARDING)
            self.move(DataState.UNSHARDED)
        with torch.no_grad():
            self._fill_storage()  # views need it
            self.param_shard.zero_()
            for segment, param in self.placed():
                if segment.name not in given:
                    self._take_values(segment, param, initial)
                self._bind(segment, param)

    def _take_values(self, segment: Segment, param: nn.Parameter, initial: InitialValues) -> None:
        values = initial.draw(segment.name, param) if param.is_meta else self._handed_over(segment.name, param)
        flat = values.reshape(-1)
        self.fill_weights([segment.name], lambda _name, start, out: out.copy_(flat[start : start + out.numel()]))

    def fill_weights(self, names: Iterable[str], read_into: ReadInto) -> None:
        """Read the values of each piece in fp32, some at a time, and store their codes."""
        size, device = CHUNK_NUMEL["cuda"], self.param_shard.device
        for piece in (self.pieces[name] for name in names if name in self.pieces):
            for at in range(0, piece.numel, size):
                numel = min(size, piece.numel - at)
                values = torch.zeros(-(-numel // BLOCK_NUMEL) * BLOCK_NUMEL, device=device)
                read_into(piece.name, piece.start + at, values[:numel])
                # A piece begins with a block; behind its end there is padding, or the next shard.
                first, last = (stored_bytes(piece.shard_offset + at + end, self._bits) for end in (0, values.numel()))
                encode_weights_(self.param_shard[first:last], values, self._bits)

    @property
    def weights(self) -> torch.Tensor:
        values = torch.empty(self.layout.shard_numel, device=self.param_shard.device)
        decode_weights_(values, self.param_shard, self._bits)
        return values

    # ---- gathers -----------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        if self.group_shard is None:
            super().start_gather()
            return
        self.move(DataState.UNSHARDING)
        self._fill_storage()
        self.group_shard.renew()
        self.gather = Gather(Pending(self.group_shard.wait), self.param_shard, self.group_shard.values)

    def join_gather(self) -> None:
        if self.group_shard is None:
            super().join_gather()
            return
        self.end_gather()
        self.group_shard.renew()
        self.group_shard.wait()


def _refuse_together(spec: UnitSpec, plan: ZeroPlan, offloaded: OffloadedShards, wire: Wire) -> None:
    """Raise PlanError for slices of matrices, for codes that are not on the device, and for others in messages."""
    key = f"precision.weights={spec.precision.weights}"
    if spec.slices.splits:
        raise PlanError(f"{key}: expected whole matrices, found slices; use parallel.tp=1")
    if offloaded.params:
        raise PlanError(f"{key}: expected codes on the device, found offload.params; use offload.params=device")
    if wire.gather is not None or plan.outer_sharding is not None:
        raise PlanError(
            f"{key}: expected gathers of the stored codes in one group of ranks, found zero.gather_dtype or "
            "zero.outer_sharding; use zero.gather_dtype=null zero.outer_sharding=null"
        )
