"""What would have fitted: settings near one that was out of memory, and the bytes that each frees on a rank.

States come from the memory model. What is neither states nor buffers is taken to be activations, in proportion to the
micro-batch; that is an estimate, and is called so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from orchestrator.schema import RunConfig
from orchestrator.state_groups import Offload, Place
from orchestrator.units import size

STATES = ("params", "grads", "optimizer")
UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
States = Callable[[RunConfig], int | None]  # predicted bytes of a rank's model states


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


def remedies(config: RunConfig, memory: Mapping[str, Any], states: States) -> list[Remedy]:
    """The settings that free at least what was wanted, those that change least first."""
    wanted = bytes_of(memory.get("wanted"))
    if wanted is None:
        return []
    return [one for one in _candidates(config, memory.get("held") or {}, states) if one.freed_bytes >= wanted]


def told(config: RunConfig, memory: Mapping[str, Any], states: States) -> str:
    """What was held, and what would free enough, in one line each."""
    held = {name: count for name, count in (memory.get("held") or {}).items() if count}
    lines = [f"held {', '.join(f'{name} {size(count)}' for name, count in held.items())}"] if held else []
    found = remedies(config, memory, states)
    if found:
        listed = [f"{one.overrides} ({'about ' if one.estimated else ''}{size(one.freed_bytes)})" for one in found[:3]]
        lines.append(f"would free enough: {'   or   '.join(listed)}")
    elif memory.get("wanted"):
        lines.append(f"no single setting frees {memory['wanted']}")
    return "; ".join(lines)


def _candidates(config: RunConfig, held: Mapping[str, int], states: States) -> list[Remedy]:
    found = []
    micro, now = config.batch.micro, states(config)
    if micro > 1:
        found.append(_smaller(config, held, max(1, micro // 2)))
    if micro > 3:
        found.append(_smaller(config, held, 1))
    for stage in range(config.zero.stage + 1, 4):
        other = replace(config, zero=replace(config.zero, stage=stage))
        found += _states_freed(f"zero=stage{stage}", now, states(other))
    if config.offload == Offload() and str(config.resources.device) == "cuda":
        other = replace(config, offload=Offload(optimizer=Place.cpu))
        found += _states_freed("offload=optimizer_cpu", now, states(other))
    return found


def _smaller(config: RunConfig, held: Mapping[str, int], micro: int) -> Remedy:
    """The same work in more micro-batches, where they divide."""
    whole = config.batch.micro * (config.batch.accumulation or 1)
    more = f" batch.accumulation={whole // micro}" if whole % micro == 0 else ""
    activations = sum(count for name, count in held.items() if name not in (*STATES, "buffers"))
    return Remedy(f"batch.micro={micro}{more}", activations * (config.batch.micro - micro) // config.batch.micro, True)


def _states_freed(overrides: str, now: int | None, then: int | None) -> list[Remedy]:
    return [] if now is None or then is None else [Remedy(overrides, now - then, estimated=False)]
