"""Finds settings that fit near one that is out of memory, and the bytes that each of them frees on a rank.

The needed bytes are predicted, including activations if they can be counted. If they cannot, all bytes that were held
and are neither model states nor buffers are taken for activations, in proportion to the micro-batch. The result is then
marked as an estimate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from orchestrator.config.schema import LossKind, MeasureKind, RunConfig
from orchestrator.config.state_groups import Offload
from orchestrator.planning.rules.scene import Scene, here
from orchestrator.planning.rules.table import check_parts
from orchestrator.text.units import size
from zero_runtime.activations.rule import RecomputeKind
from zero_runtime.offload_plan import Tier

STATES = ("params", "grads", "optimizer")
UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class PredictedPeak(NamedTuple):
    """Predicted bytes of a rank at the peak of a step; `complete` if they include activations."""

    bytes: int
    complete: bool


Needs = Callable[[Sequence[RunConfig]], list[PredictedPeak | None]]


class Neighbour(NamedTuple):
    """A configuration that may need less memory, and the overrides that lead to it."""

    overrides: str
    config: RunConfig


class Remedy(NamedTuple):
    """Overrides and the bytes that they free; `estimated` if the bytes of activations are estimated."""

    overrides: str
    freed_bytes: int
    estimated: bool


def bytes_of(text: str | None) -> int | None:
    """The bytes in a message of an allocator, such as "2.00 GiB" or "1024 bytes"; None for any other text."""
    match = re.fullmatch(r"([\d.]+) ?(\w+)?", (text or "").strip())
    if match is None or (match[2] or "bytes") not in UNITS:
        return None
    return int(float(match[1]) * UNITS[match[2] or "bytes"])


def remedies(config: RunConfig, memory: Mapping[str, Any], needs: Needs) -> list[Remedy]:
    """The settings that free at least the bytes that the failed allocation wanted, smallest changes first.

    memory: what a rank recorded when it was out of memory, with "wanted" and, by kind, the bytes "held".
    """
    wanted = bytes_of(memory.get("wanted"))
    if wanted is None:
        return []
    several = neighbours(config)
    now, *then = needs([config, *(neighbour.config for neighbour in several)])
    candidates = [
        _remedy(config, neighbour, now, need, memory.get("held") or {})
        for neighbour, need in zip(several, then, strict=True)
    ]
    return [remedy for remedy in candidates if remedy is not None and remedy.freed_bytes >= wanted]


def described(config: RunConfig, memory: Mapping[str, Any], needs: Needs) -> str:
    """The bytes that were held, and the settings that would free enough, separated by a semicolon."""
    held = {name: count for name, count in (memory.get("held") or {}).items() if count}
    lines = [f"held {', '.join(f'{name} {size(count)}' for name, count in held.items())}"] if held else []
    freeing = remedies(config, memory, needs)
    if freeing:
        listed = [
            f"{remedy.overrides} ({'about ' if remedy.estimated else ''}{size(remedy.freed_bytes)})"
            for remedy in freeing[:3]
        ]
        lines.append(f"would free enough: {'   or   '.join(listed)}")
    elif memory.get("wanted"):
        lines.append(f"no single setting frees {memory['wanted']}")
    return "; ".join(lines)


def neighbours(config: RunConfig) -> list[Neighbour]:
    """The settings to try, smallest changes first. None of them changes what the model learns, and none breaks a rule,
    as further stages do for an evaluation or for 1-bit messages."""
    halves = [config.batch.micro >> power for power in range(1, config.batch.micro.bit_length())]
    tried = [_smaller(config, micro) for micro in halves]
    if config.loss.kind is LossKind.full and config.parallel.tp == 1:
        tried.append(Neighbour("loss=tiled", replace(config, loss=replace(config.loss, kind=LossKind.tiled))))
    kinds: tuple[RecomputeKind, ...] = ("by_operation", "full")
    for kind in kinds:
        if config.recompute.kind not in (kind, "full"):
            other = replace(config, recompute=replace(config.recompute, kind=kind))
            tried.append(Neighbour(f"recompute={kind}", other))
    tried += [
        Neighbour(f"zero=stage{stage}", replace(config, zero=replace(config.zero, stage=stage)))
        for stage in range(config.zero.stage + 1, 4)
    ]
    if config.offload == Offload() and str(config.resources.device) == "cuda":
        tried.append(Neighbour("offload=optimizer_cpu", replace(config, offload=Offload(optimizer=Tier.HOST))))
    scene = here()
    broken = _broken(config, scene)
    return [one for one in tried if _broken(one.config, scene) <= broken]


def _broken(config: RunConfig, scene: Scene) -> set[str]:
    """The rules that a resolved configuration breaks on this machine, which need not be that of its run."""
    groups = {name: group for name, group in vars(config).items() if name != "output"}  # its rules probe the disk
    return {broken.rule for broken in check_parts(groups, scene)}


def _smaller(config: RunConfig, micro: int) -> Neighbour:
    """A smaller micro-batch, with more accumulation for the same global size if it divides that evenly. An evaluation
    accumulates nothing."""
    samples = config.batch.micro * config.batch.accumulation
    keeps_size = samples % micro == 0 and config.measure.kind is MeasureKind.train
    accumulation = samples // micro if keeps_size else config.batch.accumulation
    more = f" batch.accumulation={accumulation}" if keeps_size else ""
    global_size = micro * accumulation * config.batch_ranks
    batch = replace(config.batch, micro=micro, accumulation=accumulation, global_size=global_size)
    return Neighbour(f"batch.micro={micro}{more}", replace(config, batch=batch))


def _remedy(
    config: RunConfig, other: Neighbour, now: PredictedPeak | None, then: PredictedPeak | None, held: Mapping[str, int]
) -> Remedy | None:
    """The bytes that a neighbour frees; None if they can be neither predicted nor estimated."""
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
