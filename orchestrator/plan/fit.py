"""Which settings of a model fit onto a GPU, and with how large a micro-batch: the rows of `zlab fit`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.plan.step import ConfigMemory
from zero_runtime.memory.counted_unit import COMPONENTS, GATHERED, GRADS, OPTIMIZER, PARAMS, TRANSFERS, WHOLE_GRADS
from zero_runtime.memory.device_overhead import NO_OVERHEAD, DeviceOverhead
from zero_runtime.memory.step_memory import Peak

WORDS = {
    PARAMS: "parameters",
    OPTIMIZER: "optimizer states and masters",
    GRADS: "gradients",
    GATHERED: "gathered parameters",
    WHOLE_GRADS: "gradients before their reduction",
    TRANSFERS: "shards in transfer",
}


@dataclass(frozen=True)
class Fit:
    """One configuration on one kind of GPU.

    limit_bytes: the memory that a rank may allocate from; overhead: what libraries take of it. micro: the largest
    micro-batch that fits with the most that they take; 0 if none does. most_micro: the largest that may fit, with the
    least. capped: every traced micro-batch fits. peak: of the worst moment at `micro`, or at 1 if none fits.
    """

    label: str
    overrides: tuple[str, ...]
    config: RunConfig
    limit_bytes: int
    overhead: DeviceOverhead
    micro: int
    most_micro: int
    capped: bool
    peak: Peak
    host_bytes: int
    scratch_bytes: int
    sent_bytes: int

    @property
    def used_bytes(self) -> tuple[int, int]:
        """The memory of the device in use at the peak, at least and at most."""
        return self.peak.total + self.overhead.least, self.peak.total + self.overhead.most

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of a rank."""
        return max(self.micro, 1) * self.config.batch.seq

    @property
    def binds(self) -> str:
        """The largest part of the peak, in words."""
        name, _ = max(parts(self.peak), key=lambda part: part[1])
        return name

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        return {
            "label": self.label,
            "overrides": list(self.overrides),
            "micro": self.micro,
            "micro_at_most": self.most_micro,
            "micro_capped": self.capped,
            "limit_bytes": self.limit_bytes,
            "used_bytes_least": self.used_bytes[0],
            "used_bytes_most": self.used_bytes[1],
            "peak_bytes": self.peak.total,
            "peak_when": self.peak.when,
            "peak_parts_bytes": dict(parts(self.peak)),
            "binds": self.binds,
            "host_bytes_per_rank": self.host_bytes,
            "scratch_bytes_per_rank": self.scratch_bytes,
            "sent_bytes_per_step": self.sent_bytes,
        }


def parts(peak: Peak) -> list[tuple[str, int]]:
    """What the peak consists of, in words, without parts of no bytes."""
    found = [(WORDS[name], peak.states.get(name, 0)) for name in COMPONENTS]
    found += [
        ("activations of the blocks", peak.blocks),
        ("embedding, head and loss", peak.outside),
        ("gradients of activations", peak.backward),
        ("token ids and labels", peak.inputs),
        ("the model's buffers", peak.buffers),
    ]
    return [(name, count) for name, count in found if count]


def fit_of(
    label: str, overrides: Sequence[str], memory: ConfigMemory, limit_bytes: int, overhead: DeviceOverhead = NO_OVERHEAD
) -> Fit | None:
    """How large a micro-batch of the configuration fits; None if its activations could not be counted."""
    micro = memory.largest(limit_bytes - overhead.most)
    peak = memory.peak(max(micro, 1))
    if peak is None:
        return None
    away = memory.away()
    return Fit(
        label,
        tuple(overrides),
        memory.config,
        limit_bytes,
        overhead,
        micro,
        memory.largest(limit_bytes - overhead.least),
        micro == memory.highest_traced,
        peak,
        away.host,
        away.scratch,
        memory.sent_bytes(),
    )


def order(fits: Sequence[Fit]) -> list[Fit]:
    """The rows that fit first, and among them those whose step has the least to do beside the model's own work: copies
    to the host, then recomputation, then data to send. The larger micro-batch first among equals."""
    return sorted(fits, key=_cost)


def _cost(fit: Fit) -> tuple[Any, ...]:
    config = fit.config
    recompute = {"none": 0, "by_operation": 1, "every_nth": 1, "full": 2}[str(config.recompute.kind)]
    offloads = (fit.host_bytes > 0) + (fit.scratch_bytes > 0)
    return (fit.micro == 0, offloads, recompute, fit.sent_bytes, -fit.micro)
