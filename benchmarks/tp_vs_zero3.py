"""Measures the rows of docs/tp_vs_zero3.md in rounds, and prints their table.

    python -m benchmarks.tp_vs_zero3 [--write]

`--write` writes results/tp_vs_zero3_cpu_DATE.md.

[Note: what is measured]
Two sweeps for each global batch, of the points of sweeps/tp_vs_zero3.yaml. The rows without offload take turns of ten
steps, six times, with ranks that stay alive, and further turns until their counted steps took 20 s. The offloaded row
takes turns with stage 3 three times; its ranks start again for each round, as states in files need it. A ratio to stage
3 is taken round by round, so that a load that both met is not in it.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.rank_repeats import swept  # noqa: E402
from benchmarks.stages_report import cpu_name  # noqa: E402
from orchestrator.rounds.comparison import RANGE, compare  # noqa: E402
from orchestrator.rounds.intervals import of_rounds  # noqa: E402
from orchestrator.rounds.recorded import ms_per_token, step_medians_ms, used_rounds  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BATCHES = (4, 32)  # sequences of a step, for all ranks
COMMON = ("sweeps=tp_vs_zero3", "measure=standard", "measure.validation_batches=0", "seed=0")
ROWS = (*COMMON, "offload=none")
OFFLOADED = (*COMMON, "zero=stage3", "parallel.tp=1", "measure.rounds=3")
HEADER = (
    f"| tokens a step | stage | tp | tokens/s (95 % range) | ratio to stage 3 ({RANGE}) | exposed ms of a step's ms "
    "| parameters, gradients, optimizer, MiB | activations MiB | sent a step: ZeRO + tp, MiB |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
MIB = 2**20
Point = Mapping[str, Any]  # as `report --json` describes it


def measured(batch: int) -> list[list[Point]]:
    """The points of the two sweeps with this global batch: without offload, and with it beside the same without."""
    found: list[list[Point]] = []
    for words in (ROWS, OFFLOADED):
        with tempfile.TemporaryDirectory() as folder:
            found.append([*swept([*words, f"batch.global_size={batch}"], Path(folder))])
    return found


def rows_of(points: Sequence[Point]) -> list[str]:
    """The rows of one sweep; their ratios are to its point of stage 3 without offload."""
    base = next(point for point in points if _is_base(point["config"]))
    return [_row(point, base) for point in points]


def _is_base(config: Mapping[str, Any]) -> bool:
    return bool(config["zero"]["stage"] == 3 and config["offload"]["optimizer"] == "device")


def _row(point: Point, base: Point) -> str:
    config, result = point["config"], point["result"]
    speed = of_rounds([1e3 / ms for ms in ms_per_token(result)])
    ratio = compare(base["result"], result)
    states = {state["component"]: state["measured_bytes"] / MIB for state in result["memory"]["states"]}
    sent = {"zero": 0.0, "tp": 0.0}
    for kind, volume in result["communication"]["data"].items():
        sent["tp" if kind.startswith("tensor_") else "zero"] += volume["bytes"] / MIB
    stage = str(config["zero"]["stage"])
    cells = (
        f"{result['batch']['tokens_per_step']:,}",
        stage if _is_base(config) or stage != "3" else f"{stage}, offloaded to NVMe",
        str(config["parallel"]["tp"]),
        f"{speed.middle:,.0f} ({speed.low:,.0f}-{speed.high:,.0f})",
        "1" if point is base else f"{ratio.ratio:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
        f"{result['phases_ms']['communication_exposed']:.0f} of {result['throughput']['step_ms']['median']:.0f}",
        ", ".join(f"{states[name]:.2f}" for name in ("params", "grads", "optimizer")),
        f"{result['memory']['activations_bytes'] / MIB:.1f}",
        f"{sent['zero']:.2f} + {sent['tp']:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def stability(sweeps: Sequence[Sequence[Point]]) -> list[str]:
    """How much the rounds of a row differ, and the load that they met."""
    spreads = {True: list[float](), False: list[float]()}
    shares = list[float]()
    for points in sweeps:
        for point in points:
            medians = step_medians_ms(point["result"])
            is_divided = point["config"]["parallel"]["tp"] > 1
            spreads[is_divided].append(statistics.stdev(medians) / statistics.mean(medians))
            shares += [one["others_share"] or 0.0 for one in used_rounds(point["result"])]
    divided, full = (f"{min(spreads[one]):.1%} to {max(spreads[one]):.1%}" for one in (True, False))
    return [
        f"- Between its rounds, the median step of a row with tp has a standard deviation of {divided} of its mean,",
        f"  that of a row without it one of {full}.",
        f"- Other processes took {statistics.median(shares):.0%} of the cores in the median round, {max(shares):.0%} "
        "at most.",
    ]


def block(by_batch: Mapping[int, Sequence[Sequence[Point]]], machine: str, today: str) -> str:
    """The machine, the table and what the rounds say of its rows."""
    lines = [f"{machine}; {today}. A round is ten steps; further ones may be longer or shorter.", "", HEADER]
    for without, offloaded in by_batch.values():
        lines += rows_of(without)
        lines += [row for row in rows_of(offloaded) if "offloaded" in row]
    sweeps = [points for both in by_batch.values() for points in both]
    return "\n".join([*lines, "", *stability(sweeps)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write results/tp_vs_zero3_cpu_DATE.md")
    asked = parser.parse_args()
    import torch

    machine = f"{cpu_name()}; torch {torch.__version__}, Python {platform.python_version()}"
    new = block({batch: measured(batch) for batch in BATCHES}, machine, date.today().isoformat())
    print(new)
    if asked.write:
        path = RESULTS / f"tp_vs_zero3_cpu_{date.today()}.md"
        path.write_text(f"# Tensor parallelism with stage 1 against stage 3\n\n{new}\n", encoding="utf-8")
        print(f"\nwritten: {path.relative_to(ROOT)}; compare docs/tp_vs_zero3.md with the table", file=sys.stderr)


if __name__ == "__main__":
    main()
