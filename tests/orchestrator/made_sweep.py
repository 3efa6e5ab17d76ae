"""Sweeps with invented numbers, written through the product's own records, to look at reports of any size.

python tests/orchestrator/made_sweep.py FOLDER [POINTS] writes one and its report.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from points import make_config
from stub_worker import make_result

from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.records import sweep_record
from orchestrator.records.record_file import append_event, write_json_atomic
from orchestrator.records.run_record import AttemptPaths, new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, SweepPaths, tell
from zero_runtime.precision import MixedPrecision

LIMIT = 34 << 20  # bytes of a rank
MEASURED_AT = 1_795_000_000.0
PARAMETERS = 1_200_000
WARMUP, STEPS = 5, 25


def configs(count: int, output: Path) -> list[tuple[RunConfig, tuple[str, ...]]]:
    """The first points of a product of settings, with their overrides; few of them have all kinds of settings."""
    stages, precisions = (0, 1, 2, 3), ("fp32", "bf16")
    micros = (2, 4, 8, 16, 32) if count > 16 else (4,)
    ranks = (1, 2, 4, 8, 16) if count > 16 else (2,)
    found = []
    for stage, precision, micro, world in islice(product(stages, precisions, micros, ranks), count):
        config = make_config(output, stage=stage)
        found.append(
            (
                replace(
                    config,
                    batch=replace(config.batch, micro=micro, accumulation=1, global_size=micro * world),
                    precision=replace(config.precision, dtypes=MixedPrecision(param=precision), compute=precision),
                    resources=replace(config.resources, ranks=world),
                    measure=replace(config.measure, warmup_steps=WARMUP, steps=STEPS),
                ),
                (f"zero=stage{stage}", f"precision={precision}", f"batch.micro={micro}", f"resources.ranks={world}"),
            )
        )
    return found


def numbers(config: RunConfig, chance: random.Random) -> dict[str, Any]:
    """A result whose speed and memory follow the settings roughly as real ones do."""
    world, stage, micro = config.resources.ranks or 1, config.zero.stage, config.batch.micro
    short = config.precision.dtypes.param == "bf16"
    speed = 4000 * world**0.9 * (1.38 if short else 1.0) * (1 - 0.03 * stage) * micro / (micro + 1.2)
    speed *= math.exp(chance.gauss(0, 0.02))
    width = chance.uniform(0.01, 0.06)
    result = make_result(config, speed)
    result["throughput"]["tokens_per_second"] = {
        "median": speed,
        "p10": speed * (1 - width),
        "p90": speed * (1 + width),
    }
    step = result["batch"]["tokens_per_step"] / speed * 1e3
    result["throughput"]["step_ms"] = {"median": step, "p10": step * (1 - width), "p90": step * (1 + width)}
    result["session"] = "made"
    result["rounds"] = [
        {"number": number, "began": 0.0, "step_ms": [step * (1 + chance.uniform(-width, width))]}
        for number in range(1, 7)
    ]
    shares = {"data": 0.01, "forward": 0.31, "backward": 0.55, "communication_exposed": 0.08, "optimizer": 0.05}
    result["phases_ms"] = {name: step * part for name, part in shares.items()}
    weights = PARAMETERS * (2 if short else 4)
    held = {
        "params": weights // (world if stage == 3 else 1),
        "grads": PARAMETERS * 4 // (world if stage > 1 else 1),
        "optimizer": PARAMETERS * (12 if short else 8) // (world if stage else 1),
    }
    result["memory"] |= {
        "states": [{"component": name, "predicted_bytes": size, "measured_bytes": size} for name, size in held.items()],
        "activations_bytes": micro * (300_000 if short else 550_000),
        "activations_predicted_bytes": micro * (300_000 if short else 550_000),
    }
    full = 2 * PARAMETERS * (world - 1) // world
    for name, itemsize in (("all_gather", 2 if short else 4), ("reduce_scatter", 4)):
        result["communication"]["data"][name] = {"calls": 6, "elements": full // 2, "bytes": full // 2 * itemsize}
    result["communication"] |= {"theory_elements": full // 2 * 2, "padding_elements": 0}
    result["loss"] |= {"first": 5.57, "last": loss_at(WARMUP + STEPS, config), "validation": 3.4}
    return result | {"measured_at": MEASURED_AT, "steps": WARMUP + STEPS}


def loss_at(step: int, config: RunConfig) -> float:
    return 3.1 + 2.4 * math.exp(-step / 9) + (0.01 if config.precision.dtypes.param == "bf16" else 0.0)


def write_sweep(output: Path, count: int, *, failed: Sequence[int] = ()) -> SweepPaths:
    """A sweep of that many points, all measured except for those in `failed`, which end in different ways."""
    chance = random.Random(1)
    planned, started = [], []
    for number, (config, overrides) in enumerate(configs(count, output)):
        label = "-".join(word.partition("=")[2] for word in overrides)
        data = to_dict(config)
        result = numbers(config, chance)
        held = {state["component"]: state["predicted_bytes"] for state in result["memory"]["states"]}
        needed = sum(held.values()) + result["memory"]["activations_bytes"]
        predicted = {**held, "activations": None, "needed": needed, "limit": LIMIT, "ranks_share": 1}
        state = (RunState.oom, RunState.pruned, RunState.refused)[number % 3] if number in failed else RunState.queued
        if state in (RunState.pruned, RunState.refused):
            predicted["needed"] = 2 * LIMIT
            reason = "needs 68.0 MiB in the backward of the loss, more than 34.0 MiB; would fit: batch.micro=2"
            planned.append(Planned(label, overrides, state, "", data, reason, predicted=predicted))
            continue
        attempt = new_attempt(output, data, label, "made-up")
        attempt.move(RunState.starting)
        attempt.move(RunState.running)
        if state is RunState.oom:
            attempt.move(RunState.oom, message="rank 1: out of memory in forward of step 3: wanted 1 GiB", rank=1)
        else:
            write_json_atomic(attempt.paths.result, result)
            write_steps(attempt.paths, config)
            attempt.move(RunState.ok)
        planned.append(Planned(label, overrides, RunState.queued, attempt.point, data, predicted=predicted))
        started.append((label, str(attempt.paths.root)))
    facts = {"command": ["-m", "sweeps=stages"], "folder": str(output), "rank_by": ""}
    sweep = sweep_record.open_sweep(output, "stages", planned, facts)
    for label, folder in started:
        tell(sweep, "started", label=label, attempt=folder, slots=["0", "1"])
        tell(sweep, "ended", label=label, attempt=folder, slots=["0", "1"])
    return sweep


def write_steps(attempt: AttemptPaths, config: RunConfig) -> None:
    for step in range(1, WARMUP + STEPS + 1):
        event = {"event": "step", "step": step, "warmup": step <= WARMUP, "loss": loss_at(step, config), "lr": 1e-3}
        speed = {"grad_norm": 1.5, "step_ms": 108.0, "tokens_per_second": 9400.0, "memory_mib": 512.0}
        append_event(attempt.metrics, {**event, **speed, "memory_kind": "rss"})
    append_event(attempt.metrics, {"event": "validation", "step": WARMUP + STEPS, "loss": 3.4})


def main(argv: Sequence[str]) -> int:
    from orchestrator.report import comparison

    output, count = Path(argv[0]).absolute(), int(argv[1]) if len(argv) > 1 else 200
    sweep = write_sweep(output, count, failed=range(count - 3, count) if count > 8 else ())
    print("\n".join(comparison.write(sweep, with_png=True)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
