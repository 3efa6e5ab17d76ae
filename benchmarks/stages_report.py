"""Writes results of benchmarks/stages.py as a Markdown page and as JSON, and several such runs as one short table.

`python benchmarks/stages_report.py RESULT.json ..` prints that table: a row for each stage, columns for each run.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.drift import drift_of, drift_verdict  # noqa: E402
from benchmarks.gpt import GptSize, starting_loss  # noqa: E402
from benchmarks.stages_task import LIMIT, PARTS, ROWS, SETTLED, STEADY, TITLES  # noqa: E402

Found = dict[str, Any]  # a result file: the measurements, the machine and the task


def main() -> None:
    if not sys.argv[1:]:
        sys.exit("stages_report.py: expected result files of stages.py (*.json), found none")
    print("\n".join(short_table([json.loads(Path(name).read_text()) for name in sys.argv[1:]])))


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def ratios(above: list[float], below: list[float]) -> list[float]:
    """Ratios round by round: a machine that is slow in one round is slow for both."""
    return [a / b for a, b in zip(above, below, strict=True)]


def of_limit(found: Found, name: str) -> list[float]:
    """The time of forward + backward alone over the row's time, by round: 1 if everything else costs nothing."""
    return ratios(found["seconds"][LIMIT], found["seconds"][name])


def of_parts(found: Found, name: str) -> list[float]:
    """(forward + backward + every other part, each alone) / row, by round."""
    seconds = found["seconds"]
    parts = (seconds[LIMIT], *(seconds[f"{name} {part}"] for part in PARTS))
    return ratios([sum(one) for one in zip(*parts, strict=True)], seconds[name])


def trained(found: Found) -> list[str]:
    return [name for name in ROWS if name in found["seconds"]]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; never outside the range of the values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: list[float], factor: float, form: str) -> str:
    """`median (lower quartile to upper)`."""
    low, middle, high = (f"{factor * value:{form}}" for value in quartiles(values))
    return f"{middle} ({low} to {high})"


def percent(values: list[float]) -> str:
    low, middle, high = (f"{100 * value:.0f}" for value in quartiles(values))
    return f"{middle} % ({low} to {high})"


def verdicts(found: Found) -> list[str]:
    """Verdicts about drift over the rounds: of step times, and of shares, which a drifting host should not change."""
    rows = {TITLES[name]: found["seconds"][name] for name in (LIMIT, *trained(found))}
    shares = {TITLES[name]: of_limit(found, name) for name in trained(found)}
    return [drift_verdict("step times", rows), drift_verdict("shares of forward + backward", shares)]


# ---- the page of one run ---------------------------------------------------------------------------------------------


def report_lines(found: Found) -> list[str]:
    task = found["task"]
    expected, allowed = starting_loss(GptSize(**task["size"]), tokens_of(task))
    losses = {name: found["losses"][name] for name in trained(found)}
    first, last = ([one[index] for one in losses.values()] for index in (0, -1))
    alone = [f"{part} alone, ms" for part in PARTS]
    lines = [
        f"# A step of each stage in {task['precision']}, {found['date']}",
        "",
        f"{task['world']} ranks on {found['machine']}; {found['versions']}; {task['precision']}, {task['size']}; "
        f"{task['rounds']} rounds after {task['warmup']}; load of the machine before: {found['load_before']:.1f}.",
        "",
        f"Command: `{found['command']}`",
        "",
        *(f"- {verdict}" for verdict in verdicts(found)),
        f"- Losses of {len(losses)} rows: {min(first):.4f} to {max(first):.4f} at the first step (expected "
        f"{expected:.3f} +- {allowed:.3f}), {min(last):.4f} to {max(last):.4f} at step "
        f"{task['warmup'] + task['rounds']}.",
        "",
        "Times are of the slower rank; medians with quartiles in brackets; shares and ratios are taken within a round.",
        "Of forward + backward: their time alone, at the first weights, over the row's. Of the parts: (forward +",
        "backward + the row's collectives + its gradients' copies into flat tensors and squares + its optimizer, each",
        "alone) / row. Drift: the median of the last third of the rounds over that of the first.",
        "",
        f"| row | ms | of forward + backward | {' | '.join(alone)} | of the parts | drift |",
        "|---" * (5 + len(PARTS)) + "|",
        *(time_row(found, name) for name in (LIMIT, *trained(found))),
    ]
    if found["memory"]:
        lines += ["", *memory_lines(found["memory"])]
    return lines


def time_row(found: Found, name: str) -> str:
    own = found["seconds"][name]
    cells = [TITLES[name], spread(own, 1e3, ".0f"), "" if name == LIMIT else percent(of_limit(found, name))]
    if name in ROWS:
        cells += [spread(found["seconds"][f"{name} {part}"], 1e3, ".0f") for part in PARTS]
        cells.append(percent(of_parts(found, name)))
    else:
        cells += [""] * (1 + len(PARTS))
    drift = drift_of(own)
    cells.append("not judged" if drift is None else str(drift))
    return f"| {' | '.join(cells)} |"


def memory_lines(memory: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        "Peak memory of the worse rank above what the imports took, each row in processes of its own (with the",
        "allocator's setting of our launcher); page faults of a step as a share of the",
        f"unsharded fp32 parameters, over steps {SETTLED + 1} to {SETTLED + STEADY} (a heap that still settles grows",
        "now and then); the loss of the last.",
        "",
        "| row | peak MiB, steady | peak MiB, with the start | faulted %, median step | faulted %, most | loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in memory.items():
        cells = [TITLES[name], f"{found['steady']:.0f}", f"{found['whole']:.0f}", f"{found['faulted']:.2f}"]
        cells += [f"{found['faulted_most']:.2f}", f"{found['last_loss']:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_report(found: Found, results: Path) -> None:
    """Writes the run's page and its numbers next to each other, and prints the page."""
    results.mkdir(exist_ok=True)
    lines = report_lines(found)
    stem = results / f"stages_{found['device']}_{found['task']['precision']}_{found['date']}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(found | {"verdicts": verdicts(found)}))
    print("\n".join(lines))
    print(f"\nwritten: {stem.with_suffix('.md')}")


# ---- the short table of several runs ---------------------------------------------------------------------------------


def short_table(runs: list[Found]) -> list[str]:
    """Share of forward + backward and peak memory per rank, by stage and run."""
    heads, rows = ["row"], [name for name in ROWS if any(name in run["seconds"] for run in runs)]
    for run in runs:
        precision = run["task"]["precision"]
        heads += [f"{precision}: of forward + backward", f"{precision}: MiB a rank"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in rows:
        cells = [TITLES[name]]
        for run in runs:
            peak = run["memory"].get(name)
            cells += [
                percent(of_limit(run, name)) if name in run["seconds"] else "-",
                f"{peak['steady']:.0f}" if peak else "-",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    for run in runs:
        task = run["task"]
        size = ", ".join(f"{value} {key}" for key, value in task["size"].items())
        lines += [
            "",
            f"{task['precision']}: {run['date']}, {task['world']} ranks on {run['machine']}; {run['versions']}; "
            f"{size}; {task['rounds']} rounds after {task['warmup']}; `{run['command']}`.",
            *(f"- {verdict}" for verdict in verdicts(run)),
        ]
    return lines


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine_now() -> Found:
    """Date, machine and versions, and the load of the machine before anything is measured."""
    cuda = torch.cuda.is_available()
    cpu = f"{cpu_name()} ({os.cpu_count()} cores, torch's kernels for {torch.backends.cpu.get_cpu_capability()})"
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    return {
        "date": str(date.today()),
        "device": "cuda" if cuda else "cpu",
        "machine": torch.cuda.get_device_name() if cuda else cpu,
        "versions": ", ".join(versions),
        "load_before": os.getloadavg()[0],
    }


def tokens_of(task: dict[str, Any]) -> int:
    return task["world"] * task["size"]["micro"] * task["size"]["seq"]


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
