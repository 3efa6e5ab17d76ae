"""How far apart plain PyTorch's losses are if the same mathematics is computed in other ways.

By this measure the distance of another engine's losses is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.wings.engines import foreign_runtime
from orchestrator.wings.engines.plain import variants
from orchestrator.worker.listeners import RankRun
from orchestrator.worker.loop import Loop
from zero_runtime.step_report import StepReport
from zero_runtime.watch.failure import is_out_of_memory


def spread_of(run: RankRun, steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The largest relative distance of a variant's loss and norm from those of the reference run, at each of its steps.

    The variants are trained one after the other in this process, from the same weights and on the same samples. Those
    that do not fit in memory are left out; empty if none fits.
    """
    found, ways = list[list[StepReport]](), variants(run.config)
    for number, (how, config) in enumerate(ways.items(), start=1):
        run.writer.tell("variant", number=number, of=len(ways), how=how)
        found += [one] if (one := _trained(run, config, len(steps))) else []
    if not found:
        return {}
    # A variant that skipped other steps (fp16) has trained otherwise, which is no rounding.
    skipped = [not step["updates"] for step in steps]
    alike = [reports for reports in found if [one.skipped for one in reports] == skipped]
    by_step = list(zip(*alike, strict=True)) if alike else [()] * len(steps)
    both = list(zip(steps, by_step, strict=True))
    return {
        "loss": [_farthest(step["loss"], [one.loss for one in ones]) for step, ones in both],
        "norm": [_farthest(step["norm"], [one.grad_norm for one in ones]) for step, ones in both],
    }


def _trained(run: RankRun, config: RunConfig, steps: int) -> list[StepReport]:
    """The reports of the first steps of another run of this process; none if it does not fit in memory."""
    found = list[StepReport]()
    try:
        built = foreign_runtime.build(config, run.runtime.device, None)
        loop = Loop(config, built, run.data)
        for _ in range(steps):
            report, _ = loop.step(run.measurement)
            loop.advance()
            found.append(report)
        built.runtime.close()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return []
    return found


def _farthest(value: float | None, others: Sequence[float]) -> float:
    """The largest relative distance of numbers from one; 0 where it is not known."""
    known = [abs(one - value) / abs(value) for one in others if value and math.isfinite(one)]
    return max(known, default=0.0)
