"""Measures how long `fit` takes to answer, as a whole command: with an empty cache, and from the cache.

`python benchmarks/fit_time.py [--rounds N] [--write] [SETTINGS]`. Each round has a cache of its own and asks, in this
order: the question, the same question, its first row's arithmetic, and the question for twice as many nodes. Before,
untimed, the first question's host memory is sampled: the proportional set size (PSS) of the command and its children.
So Python's bytecode is there when times are taken, as after any first command, whatever PYTHONDONTWRITEBYTECODE says.
`--write` writes results/fit_time_cpu_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402

LINE = ("model=llama2_70b", "hardware=h100_80gb", "resources.ranks=64", "resources.nodes=8", "batch.seq=4096")
ROW = "stage3-full"
LARGER = ("resources.ranks=128", "resources.nodes=16")
COLD, SAME, EXPLAIN, OTHER = "empty cache", "the same again", f"--explain {ROW}", " ".join(LARGER)
SAMPLED_S = 0.02
MIB = 1 << 20
Times = dict[str, list[tuple[float, float]]]  # wall and CPU seconds of each question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write results/fit_time_cpu_DATE.md and .json")
    parser.add_argument("settings", nargs="*", default=LINE, help=f"of the question; default: {' '.join(LINE)}")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    times: Times = {}
    with tempfile.TemporaryDirectory() as cache:
        peak = peak_bytes(asked.settings, cache)
    for _ in range(asked.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name, words in questions(asked.settings).items():
                times.setdefault(name, []).append(seconds_of(words, cache))
    lines = report(asked.settings, times, peak, load)
    print("\n".join(lines))
    if asked.write:
        stem = ROOT / "benchmarks" / "results" / f"fit_time_cpu_{date.today()}"
        stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        stem.with_suffix(".json").write_text(json.dumps({"seconds": times, "peak_bytes": peak}), encoding="utf-8")


def questions(settings: Sequence[str]) -> dict[str, list[str]]:
    """The words of each question of a round, in order."""
    given = list(settings)
    larger = [
        *(word for word in given if word.partition("=")[0] not in ("resources.ranks", "resources.nodes")),
        *LARGER,
    ]
    return {COLD: given, SAME: given, EXPLAIN: [*given, "--explain", ROW], OTHER: larger}


def command(words: Sequence[str]) -> list[str]:
    return [sys.executable, str(ROOT / "run.py"), "fit", *words]


def seconds_of(words: Sequence[str], cache: str) -> tuple[float, float]:
    """Wall and CPU seconds of a question, children included. RuntimeError if it was not answered."""
    before, start = os.times(), time.perf_counter()
    ended = subprocess.run(command(words), env=environment(cache), capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    if ended.returncode:
        raise RuntimeError(f"fit {' '.join(words)} ended with {ended.returncode}: {ended.stderr}")
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def environment(cache: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "XDG_CACHE_HOME": cache}


def peak_bytes(words: Sequence[str], cache: str) -> int:
    """The most bytes of host memory that the question's processes held at one time."""
    child = subprocess.Popen(
        command(words), env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    root, most = psutil.Process(child.pid), 0
    while child.poll() is None:
        with suppress(psutil.Error):
            most = max(most, sum(map(pss, (root, *root.children(recursive=True)))))
        time.sleep(SAMPLED_S)
    return most


def pss(process: psutil.Process) -> int:
    """Pages shared by several processes count as a part of each; 0 for a process that has ended."""
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def report(settings: Sequence[str], times: Times, peak: int, load: float) -> list[str]:
    """The lines of the report."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    rounds = len(times[COLD])
    return [
        f"# How long fit takes to answer, {date.today()}",
        "",
        f"{cpu_name()}, {os.cpu_count()} cores; Python {sys.version.split()[0]}, {libraries}; {rounds} rounds; load "
        f"{load:.1f} before.",
        "",
        f"Command: `{' '.join(['python benchmarks/fit_time.py', *sys.argv[1:]])}`; the question: `fit "
        f"{' '.join(settings)}`",
        "",
        "| question | wall s, median | least | most | CPU s, median |",
        "|---|---|---|---|---|",
        *(row(name, found) for name, found in times.items()),
        "",
        f"Host memory of the first question: at most {peak / MIB:,.0f} MiB of all processes together.",
    ]


def row(name: str, found: Sequence[tuple[float, float]]) -> str:
    wall, cpu = zip(*found, strict=True)
    cells = [statistics.median(wall), min(wall), max(wall), statistics.median(cpu)]
    return f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"


if __name__ == "__main__":
    main()
