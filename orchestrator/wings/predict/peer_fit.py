"""What fits by another engine's byte rules: the rows of `zlab fit --as ENGINE`. Pure.

The engine's own terms are those of zero_runtime/predict/memory/peers.py. The activations are those that are counted for
the same model here, since they belong to the model's code and not to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from orchestrator.config.schema import LossKind, RunConfig
from orchestrator.wings.predict.step import ConfigMemory
from zero_runtime.offload_plan import Tier
from zero_runtime.plan import Partition
from zero_runtime.predict.memory import peers
from zero_runtime.predict.memory.activation_count import LinearTrace
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.peers import DeepSpeedSettings, PeerMemory, PeerModel
from zero_runtime.predict.memory.step_memory import TOKEN_BYTES

HALVES = ("bf16", "fp16")  # the rules are for these dtypes


@dataclass(frozen=True)
class PeerFit:
    """One row. micro: the largest micro-batch that fits with the most that libraries take; 0 if none does. activations:
    the most bytes of them in one micro-batch of that size, or of 1; peak: with the engine's terms, as allocated."""

    label: str
    overrides: tuple[str, ...]
    config: RunConfig
    memory: PeerMemory
    limit_bytes: int
    overhead: DeviceOverhead
    micro: int
    capped: bool
    activations: int
    peak: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        return {
            "engine": self.memory.engine,
            "label": self.label,
            "overrides": list(self.overrides),
            "ranks": self.config.resources.ranks,
            "micro": self.micro,
            "micro_capped": self.capped,
            "limit_bytes": self.limit_bytes,
            "resting_bytes": self.memory.resting,
            "activations_bytes": self.activations,
            "peak_bytes": self.peak,
            "terms": [[term.what, term.moment.value, term.nbytes] for term in self.memory.terms],
        }


def _deepspeed(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    offload = config.offload
    if offload.uses_nvme or config.recompute.kind not in ("none", "full"):
        return None
    settings = DeepSpeedSettings(
        optimizer_on_host=offload.optimizer is Tier.HOST, params_on_host=offload.params is Tier.HOST
    )
    if config.zero.plan.optimizer is Partition.REPLICATED and settings.optimizer_on_host:
        return None
    return peers.deepspeed(model, config.zero.plan, config.resources.ranks, settings)


def _fsdp2(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    """Parameters that are gathered again in the backward, or kept from the forward on."""
    plan = config.zero.plan
    if plan.grads is Partition.REPLICATED or _offloads(config):
        return None
    reshards = plan.params is Partition.SHARDED
    return peers.fsdp2(model, config.resources.ranks, reshards=reshards)


def _megatron(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    plan = config.zero.plan
    if plan.grads is Partition.SHARDED or _offloads(config):
        return None
    return peers.megatron(model, config.resources.ranks, distributed_optimizer=plan.optimizer is Partition.SHARDED)


ENGINES: dict[str, Callable[[PeerModel, RunConfig], PeerMemory | None]] = {
    "deepspeed": _deepspeed,
    "fsdp2": _fsdp2,
    "megatron": _megatron,
}


def _offloads(config: RunConfig) -> bool:
    return config.offload.params is not Tier.DEVICE or config.offload.optimizer is not Tier.DEVICE


def peer_model(shapes: Mapping[str, Any]) -> PeerModel:
    """The numbers of elements, from the shapes that a child process has found. A block's name ends with its number."""
    blocks: list[tuple[int, ...]] = []
    others: list[int] = []
    for unit in shapes["units"]:
        numels = tuple(prod(shape) for _, shape in unit["shapes"])
        if unit["name"].rpartition(".")[2].isdigit():
            blocks.append(numels)
        else:
            others += numels
    return PeerModel(tuple(blocks), tuple(others))


def peer_fit(
    engine: str,
    label: str,
    overrides: tuple[str, ...],
    memory: ConfigMemory,
    shapes: Mapping[str, Any],
    limit_bytes: int,
    overhead: DeviceOverhead,
) -> PeerFit | None:
    """How large a micro-batch fits; None if the engine's rules do not know the settings, or nothing was counted."""
    config = memory.config
    is_full = config.loss.kind is LossKind.full and config.parallel.group == 1
    is_known = is_full and config.precision.dtypes.param in HALVES
    rules = ENGINES[engine](peer_model(shapes), config) if is_known else None
    if rules is None or not memory.parts:
        return None
    room, micro_batches = limit_bytes - overhead.most, config.batch.accumulation

    def peak(micro: int, activations: int) -> int:
        part = memory.parts[0]
        inputs = part.tokens * TOKEN_BYTES * micro + part.buffers
        return rules.peak(activations, micro_batches=micro_batches) + inputs

    micro = 0
    for part in memory.parts:
        for tried in _bisected(part.linear, lambda one, linear=part.linear: peak(one, _highest(linear, one)) <= room):  # type: ignore[misc]
            micro = max(micro, tried)
    part = next(part for part in memory.parts if part.linear.low <= max(micro, 1) <= part.linear.high)
    activations = _highest(part.linear, max(micro, 1))
    return PeerFit(
        label,
        overrides,
        config,
        rules,
        limit_bytes,
        overhead,
        micro,
        micro == memory.highest_traced,
        activations,
        peak(max(micro, 1), activations),
    )


def _bisected(linear: LinearTrace, fits: Callable[[int], bool]) -> list[int]:
    """The largest micro-batch of a trace that fits, as a list of at most one; larger ones need more."""
    if not fits(linear.low):
        return []
    low, high = linear.low, linear.high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return [low]


def _highest(linear: LinearTrace, micro: int) -> int:
    """The most bytes of activations that exist at one time."""
    more = micro - linear.low
    return max(base + slope * more for segment in linear.segments for _, (base, slope) in segment)
