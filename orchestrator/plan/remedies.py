"""What would fit, or would have fitted: settings near one that does not, and the bytes that each frees on a rank.

What a setting needs is predicted, activations included where they can be counted. Where they cannot, what was held and
is neither states nor buffers is taken to be activations, in proportion to the micro-batch: an estimate, and called so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from orchestrator.config.schema import LossKind, RecomputeKind, RunConfig
from orchestrator.config.state_groups import Offload, OffloadDevice
from orchestrator.text.units import size

STATES = ("params", "grads", "optimizer")
UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class PredictedPeak(NamedTuple):
    """Predicted bytes of a rank at the worst moment of a step; `complete` where activations are counted in."""

    bytes: int
    complete: bool


Needs = Callable[[Sequence[RunConfig]], list[PredictedPeak | None]]


class Neighbour(NamedTuple):
    """A setting that may need less, by the overrides that lead to it."""

    overrides: str
    config: RunConfig


class Remedy(NamedTuple):
    """Overrides, and the bytes that they free; `estimated` where activations are among them."""

    overrides: str
    freed_bytes: int
    estimated: bool


def bytes_of(text: str | None) -> int | None:
    """Of an allocator's words: "2.00 GiB", "1024 bytes"."""
    found = re.fullmatch(r"([\d.]+) ?(\w+)?", (text or "").strip())
    if found is None or (found[2] or "bytes") not in UNITS:
        return None
    return int(float(found[1]) * UNITS[found[2] or "bytes"])


def remedies(config: RunConfig, memory: Mapping[str, Any], needs: Needs) -> list[Remedy]:
    """The settings that free at least what was wanted, those that change least first."""
    wanted = bytes_of(memory.get("wanted"))
    if wanted is None:
        return []
    several = neighbours(config)
    now, *then = needs([config, *(one.config for one in several)])
    found = [_remedy(config, one, now, need, memory.get("held") or {}) for one, need in zip(several, then, strict=True)]
    return [one for one in found if one is not None and one.freed_bytes >= wanted]


def told(config: RunConfig, memory: Mapping[str, Any], needs: Needs) -> str:
    """What was held, and what would free enough, in one line each."""
    held = {name: count for name, count in (memory.get("held") or {}).items() if count}
    lines = [f"held {', '.join(f'{name} {size(count)}' for name, count in held.items())}"] if held else []
    found = remedies(config, memory, needs)
    if found:
        listed = [f"{one.overrides} ({'about ' if one.estimated else ''}{size(one.freed_bytes)})" for one in found[:3]]
        lines.append(f"would free enough: {'   or   '.join(listed)}")
    elif memory.get("wanted"):
        lines.append(f"no single setting frees {memory['wanted']}")
    return "; ".join(lines)


def neighbours(config: RunConfig) -> list[Neighbour]:
    """The settings worth a try, those that change least first: none of them changes what is learned."""
    halves = [config.batch.micro >> power for power in range(1, config.batch.micro.bit_length())]
    found = [_smaller(config, micro) for micro in halves]
    if config.loss.kind is LossKind.full:
        found.append(Neighbour("loss=tiled", replace(config, loss=replace(config.loss, kind=LossKind.tiled))))
    for kind in (RecomputeKind.by_operation, RecomputeKind.full):
        if config.recompute.kind not in (kind, RecomputeKind.full):
            other = replace(config, recompute=replace(config.recompute, kind=kind))
            found.append(Neighbour(f"recompute={kind}", other))
    found += [
        Neighbour(f"zero=stage{stage}", replace(config, zero=replace(config.zero, stage=stage)))
        for stage in range(config.zero.stage + 1, 4)
    ]
    if config.offload == Offload() and str(config.resources.device) == "cuda":
        found.append(Neighbour("offload=optimizer_cpu", replace(config, offload=Offload(optimizer=OffloadDevice.cpu))))
    return found


def _smaller(config: RunConfig, micro: int) -> Neighbour:
    """The same work in more micro-batches, where they divide."""
    whole = config.batch.micro * (config.batch.accumulation or 1)
    divides = whole % micro == 0
    accumulation = whole // micro if divides else config.batch.accumulation
    more = f" batch.accumulation={accumulation}" if divides else ""
    batch = replace(config.batch, micro=micro, accumulation=accumulation)
    return Neighbour(f"batch.micro={micro}{more}", replace(config, batch=batch))


def _remedy(
    config: RunConfig, other: Neighbour, now: PredictedPeak | None, then: PredictedPeak | None, held: Mapping[str, int]
) -> Remedy | None:
    """None where nobody can say what it frees."""
    if now is None or then is None:
        return None
    if now.complete and then.complete:
        return Remedy(other.overrides, now.bytes - then.bytes, estimated=False)
    before, after = config.batch.micro, other.config.batch.micro
    if before != after:
        activations = sum(count for name, count in held.items() if name not in (*STATES, "buffers"))
        return Remedy(other.overrides, activations * (before - after) // before, estimated=True)
    is_of_states = other.config.recompute == config.recompute and other.config.loss == config.loss
    return Remedy(other.overrides, now.bytes - then.bytes, estimated=False) if is_of_states else None
