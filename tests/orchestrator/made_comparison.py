"""A comparison of engines with invented numbers, written through the product's own records, to look at its report.

python tests/orchestrator/made_comparison.py FOLDER writes one and its report.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from made_sweep import LIMIT, PARAMETERS, numbers, write_steps
from points import make_config

from orchestrator.config.engine import EngineChoice, EngineKind
from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.records import sweep_record
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, SweepPaths, tell
from zero_runtime.precision import MixedPrecision

STEPS = 20
NOTE = "below 1e9 live parameters stage 3 releases nothing after a forward"


class Row(NamedTuple):
    """A point of the comparison. speed: of its rounds, by that of the first. off: of its losses from plain PyTorch's.
    moments: their dtype. fails: how it ends, if it has no result."""

    label: str
    engine: str
    stage: int
    precision: str = "fp32"
    speed: float = 1.0
    off: float = 0.0
    moments: str = "fp32"
    at_limit: bool = False
    fails: RunState | None = None


def rows(precision: str) -> list[Row]:
    """Rows of a precision at the same batch; the fastest has bf16 moments, which no other row has."""
    near = 1e-7 if precision == "fp32" else 2e-4
    return [
        Row(f"plain-{precision}", "plain", 0, precision, 0.5),
        *(Row(f"zero-stage{stage}-{precision}", "zero", stage, precision, 1 - 0.05 * stage) for stage in (1, 2, 3)),
        *(
            Row(f"deepspeed-stage{stage}-{precision}", "deepspeed", stage, precision, 0.9 - 0.1 * stage, near)
            for stage in (1, 2, 3)
        ),
        *(Row(f"fsdp2-stage{stage}-{precision}", "fsdp2", stage, precision, 0.75, near / 2) for stage in (2, 3)),
        Row(f"ddp-{precision}", "ddp", 0, precision, 1.3, 50 * near, "bf16"),
    ]


ROWS = (
    *rows("fp32"),
    *rows("bf16"),
    Row("zero-stage3-bf16-at_limit", "zero", 3, "bf16", 1.2, at_limit=True),
    Row("deepspeed-stage3-bf16-at_limit", "deepspeed", 3, "bf16", 1.3, 1e-4, at_limit=True),
    Row("ddp-bf16-at_limit", "ddp", 0, "bf16", at_limit=True, fails=RunState.oom),
)
SAME_BATCH = tuple(row for row in ROWS if not row.at_limit)


def write_comparison(output: Path, chosen: Sequence[Row] = ROWS) -> SweepPaths:
    """The sweep with these rows."""
    chance, planned, started = random.Random(2), [], []
    for row in chosen:
        config, overrides = _config(output, row)
        data = to_dict(config)
        if row.at_limit:
            data["batch"]["at_limit"] = True
        predicted = {"activations": None, "needed": LIMIT // 2, "limit": LIMIT, "ranks_share": 1}
        attempt = new_attempt(output, data, row.label, "made-up")
        attempt.move(RunState.starting)
        attempt.move(RunState.running)
        if row.fails is not None:
            attempt.move(row.fails, message="rank 1: out of memory in forward of step 3: wanted 1 GiB", rank=1)
        else:
            write_json_atomic(attempt.paths.result, result_of(row, config, chance))
            write_steps(attempt.paths, config)
            attempt.move(RunState.ok)
        planned.append(Planned(row.label, overrides, RunState.queued, attempt.point, data, predicted=predicted))
        started.append((row.label, str(attempt.paths.root)))
    facts = {"command": ["-m", "sweeps=engines"], "folder": str(output), "rank_by": ""}
    sweep = sweep_record.open_sweep(output, "engines", planned, facts)
    for label, folder in started:
        tell(sweep, "started", label=label, attempt=folder, slots=["0", "1"])
        tell(sweep, "ended", label=label, attempt=folder, slots=["0", "1"])
    return sweep


def _config(output: Path, row: Row) -> tuple[RunConfig, tuple[str, ...]]:
    base = make_config(output, stage=row.stage)
    versions = {"torch": "2.13.0+cu130", **({"deepspeed": "0.19.8"} if row.engine == "deepspeed" else {})}
    config = replace(
        base,
        engine=EngineChoice(EngineKind(row.engine), versions=versions, counted=True),
        precision=replace(base.precision, dtypes=MixedPrecision(param=row.precision), compute=row.precision),
        resources=replace(base.resources, ranks=1 if row.engine == "plain" else 2),
        measure=replace(base.measure, warmup_steps=5, steps=25),
    )
    words = (f"engine={row.engine}", f"zero=stage{row.stage}", f"precision={row.precision}")
    return config, (*words, *(["batch.at_limit=true"] if row.at_limit else []))


def result_of(row: Row, config: RunConfig, chance: random.Random) -> dict[str, Any]:
    """A result whose work is that of the other rows, but for its losses and the dtype of its moments."""
    found = numbers(config, chance)
    tokens = found["batch"]["tokens_per_step"]
    times = [
        {"number": number, "began": 0.0, "step_ms": [tokens / (8e3 * row.speed) * 1e3 * (1 + 0.001 * (number % 3))] * 2}
        for number in range(1, 7)
    ]
    speed = 8e3 * row.speed
    found["rounds"] = times
    found["throughput"]["tokens_per_second"] = {"median": speed, "p10": speed * 0.99, "p90": speed * 1.01}
    found["engine"] = {
        "kind": row.engine,
        "versions": dict(config.engine.versions),
        "settings": {"zero_optimization": {"stage": row.stage}, "gradient_clipping": 0.0}
        if row.engine == "deepspeed"
        else {},
        "notes": [NOTE] if row.engine == "deepspeed" and row.stage == 3 else [],
    }
    found["memory"]["peak_above_start_bytes"] = (20 << 20) - (2 << 20) * row.stage
    found["memory"]["peak_predicted_bytes"] = (19 << 20) - (2 << 20) * row.stage
    states = 4 * PARAMETERS
    found["dtypes"] = {"params": {row.precision: states}, "grads": {"fp32": states}} | {
        name: {row.moments: states if row.moments == "fp32" else states // 2} for name in ("exp_avg", "exp_avg_sq")
    }
    if row.precision != "fp32":
        found["dtypes"]["master"] = {"fp32": states}
    sent = {"reduce_scatter": {"fp32": {"calls": 6, "elements": PARAMETERS // 2, "bytes": 2 * PARAMETERS}}}
    found["work"] = {
        "weights": "0a1b2c3d4e5f6071",
        "trained": [12, "99aabbccddeeff00"],
        "steps": [_step(number, row, chance) for number in range(1, STEPS + 1)],
        "messages": {} if row.engine == "plain" else sent,
        "control_bytes": 64,
    }
    work = found["work"]
    work["late"] = {**work, "steps": work["steps"][:5], "dtypes": found["dtypes"]}
    if row.engine == "plain":
        far = 5e-9 if row.precision == "fp32" else 1e-3
        found["work"]["spread"] = {name: [far * (1 + 0.1 * at) for at in range(STEPS)] for name in ("loss", "norm")}
    if row.engine not in ("zero", "plain"):
        found["communication"] = {"data": {}, "control_bytes": 64}
    return found


def _step(number: int, row: Row, chance: random.Random) -> dict[str, Any]:
    far = row.off * chance.uniform(0.2, 1) * math.sqrt(number / STEPS)
    loss = (3.1 + 2.4 * math.exp(-number / 9)) * (1 + far)
    counted = {"tokens": f"{number:016x}", "sequences": 16, "micro_batches": 4, "updates": 1}
    return {**counted, "loss": loss, "norm": 1.5 * (1 + far)}


def main(argv: Sequence[str]) -> int:
    from orchestrator.report import comparison

    print("\n".join(comparison.write(write_comparison(Path(argv[0]).absolute()), with_png=True)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
