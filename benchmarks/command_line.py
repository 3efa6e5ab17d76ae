"""Measures how long the command line takes when it starts nothing: typos, help, broken rules, plans, `fit`.

`python benchmarks/command_line.py [--rounds N]`. Every line runs once per round, in turn with an interpreter that does
nothing; prints medians of wall and CPU seconds and each line's ratio to that interpreter within the same round. The
lines of BUDGETS run once, CPU seconds of their child processes included: exit 1 if one takes more on this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402

# Most CPU seconds. What was counted before is in the cache for the plan's second run, and for no `fit`.
PLAN = "-m zero=stage0,stage1,stage2,stage3 batch.micro=1,2,4,8 optimizer.lr=range(0.001,0.065,0.001) --plan"
MODELS = ("qwen2_5_0_5b", "llama2_7b", "llama2_70b")
BUDGETS = {PLAN: 5.0} | {f"fit model={name} hardware=8xa100_80gb batch.seq=2048": 8.0 for name in MODELS}
BARE = "python -c pass"
LINES = ("--help", "zero=stge2", "zero.stagee=2", "++zero.bogus=1", "status", "data=text", "-m sweeps=stages data=text")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    times: dict[str, list[tuple[float, float]]] = {line: [] for line in (BARE, *LINES)}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for line, found in times.items():
                words = ["-c", "pass"] if line == BARE else [str(ROOT / "run.py"), *line.split()]
                found.append(seconds_of([sys.executable, *words], folder))
    print(f"{cpu_name()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}, {rounds} rounds")
    print(f"{'line':<30} {'wall s':>8} {'cpu s':>8} {'of the bare interpreter (wall)':>32}")
    for line, found in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*found, strict=True))
        ratio = statistics.median(one[0] / bare[0] for one, bare in zip(found, times[BARE], strict=True))
        print(f"{line:<30} {wall:>8.3f} {cpu:>8.3f} {ratio:>32.1f}")
    sys.exit(not within_budgets())


def within_budgets() -> bool:
    """Prints CPU seconds beside the most that each line may take."""
    kept = []
    for line, most in BUDGETS.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            command = [sys.executable, str(ROOT / "run.py"), *line.split()]
            wall, cpu = [seconds_of(command, folder) for _ in range(2 if line == PLAN else 1)][-1]
        kept.append(cpu <= most)
        print(
            f"{wall:>8.3f} wall s {cpu:>8.3f} of {most:g} cpu s{'' if kept[-1] else ', too slow'}  {line}", flush=True
        )
    return all(kept)


def seconds_of(command: list[str], folder: str) -> tuple[float, float]:
    """Wall and CPU seconds of a command, whatever its exit code."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used


if __name__ == "__main__":
    main()
