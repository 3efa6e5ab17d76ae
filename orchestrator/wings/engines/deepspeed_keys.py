"""Which keys of engine.deepspeed DeepSpeed has, and what two of its own settings follow from.

The keys are those of the table that zero-lab's own engine reads, whose names a test compares with the package. The
package itself is not asked: its import takes seconds, replaces parts of torch, and it may be in another environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Broken, nearest
from zero_runtime.deepspeed.keys import HOMES, TOP
from zero_runtime.deepspeed.schema import AUTO, KINDS, Key
from zero_runtime.limits import as_typed
from zero_runtime.offload_plan import Tier


def broken_keys(given: Mapping[str, Any], table: Mapping[str, Key] = TOP, path: str = "") -> Iterator[Broken]:
    """A broken rule for each unknown key, which DeepSpeed would ignore or refuse in its ranks, and for each value of
    another kind. Sections whose own table is not known are not judged."""
    for name, value in given.items():
        if name not in table:
            homes = HOMES.get(name) or [f"{path}{near}" for near in [nearest(name, table)] if near]
            rule = f"engine.deepspeed.{path}".rstrip(".") + " has the keys of DeepSpeed's configuration"
            yield Broken(rule, name, tuple(f"engine.deepspeed.{home}" for home in homes))
        elif isinstance(value, Mapping) and (inner := table[name].table):
            yield from broken_keys(value, inner, f"{path}{name}.")
        elif value not in (None, AUTO) and not KINDS[table[name].kind](value):
            where = f"engine.deepspeed.{path}{name}"
            yield Broken(f"{where} must be {table[name].kind}", as_typed(value), (f"~{where}",))


def by_bf16_optimizer(config: RunConfig) -> bool:
    """Whether DeepSpeed wraps the optimizer in its BF16_Optimizer, in the place of that of stages 1 and 2."""
    return (config.zero.stage, config.precision.dtypes.param, config.offload.optimizer) == (1, "bf16", Tier.DEVICE)


def without_unused_norm(config: RunConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The settings, in which the norm is left out where nothing uses it, as by the others, and where DeepSpeed can."""
    zero, used = given["zero_optimization"], given["gradient_clipping"] or config.precision.scales_loss
    if config.zero.stage in (1, 2) and not (used or "offload_optimizer" in zero or by_bf16_optimizer(config)):
        zero.setdefault("compute_grad_norm", False)
    return given
