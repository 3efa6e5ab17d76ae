"""How often repetitions of one sweep name the same winner, and how often `compare` finds a slowdown that is there.

[Note: what is repeated]
Each repetition is a whole command with fresh ranks: a sweep of four points at measure=standard. Its answer is the set
of points in the first place: the winner, or those that tie. `--slowdown SHARE` runs pairs of sweeps of one point
instead: in one kind of pair a rank of the second sweep sleeps for this share of a step (ZLAB_FAULT=slow), in the other
both are the same.

The report also has the noise of the machine: how much a point's rounds differ within a sweep, how much its speed
differs between sweeps, and the load of other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402
from orchestrator.report import changes  # noqa: E402
from orchestrator.report.changes import Judgement, Measured  # noqa: E402
from orchestrator.rounds.recorded import step_medians_ms, used_rounds  # noqa: E402
from orchestrator.worker.faults import VARIABLE  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
POINTS = "zero=stage0,stage1,stage2,stage3"
MODEL = "model=llama_tiny precision=fp32 batch.seq=64 batch.micro=2 measure=standard measure.validation_batches=0"
ALLOWED = 0.95  # of the repetitions have the same answer; of the slowdowns are found
FALSE = 0.05  # of the pairs without a slowdown may be called slower
THRESHOLD = 0.05


def swept(words: Sequence[str], output: Path, fault: str = "") -> list[dict[str, Any]]:
    """Runs a sweep from its beginning. Returns its points, as `report --json` describes them."""
    line = [sys.executable, "run.py", "-m", *words, f"output={output}", "tracking=none", "--fresh", "--json"]
    environment = {**os.environ, **({VARIABLE: fault} if fault else {})}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}: {done.stderr[-2000:]}")
    points: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return points


def winners(points: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(sorted(point["label"] for point in points if point["place"] == 1))


def noise(sweeps: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Relative standard deviations: of a round's median within a sweep, of its ratio to the mean of the points that
    took turns, and of a point's speed between sweeps; and the share of the cores that others took in a round."""
    within, paired, shares = list[float](), list[float](), list[float]()
    by_label: dict[str, list[float]] = {}
    for points in sweeps:
        rounds = {point["label"]: step_medians_ms(point["result"]) for point in points}
        means = [statistics.mean(turn) for turn in zip(*rounds.values(), strict=True)]
        for label, medians in rounds.items():
            by_label.setdefault(label, []).append(statistics.median(medians))
            within.append(statistics.stdev(medians) / statistics.mean(medians))
            if len(rounds) > 1:
                ratios = [one / mean for one, mean in zip(medians, means, strict=True)]
                paired.append(statistics.stdev(ratios) / statistics.mean(ratios))
        shares += [one["others_share"] or 0.0 for point in points for one in used_rounds(point["result"])]
    between = [statistics.stdev(each) / statistics.mean(each) for each in by_label.values() if len(each) > 1]
    found = {"within": within, "paired": paired, "between": between, "others": shares}
    return {name: statistics.median(values) for name, values in found.items() if values}


def repeated(repeats: int, words: Sequence[str]) -> tuple[list[str], bool, dict[str, Any]]:
    """The lines of the report on repetitions, whether enough agree, and the numbers."""
    sweeps, seconds = list[list[dict[str, Any]]](), list[float]()
    for number in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            sweeps.append(swept(words, Path(folder)))
            seconds.append(time.monotonic() - began)
        print(f"{number + 1}: {' = '.join(winners(sweeps[-1]))}, {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
    answers = Counter(map(winners, sweeps))
    ((_, most),) = answers.most_common(1)
    lines = [
        f"- the same answer in {most} of {repeats} repetitions of {statistics.median(seconds):.0f} s each",
        "",
        "| first place | repetitions |",
        "|---|---|",
        *(f"| {' = '.join(answer)} | {count} |" for answer, count in answers.most_common()),
    ]
    numbers = {"sweeps": [_numbers(points) for points in sweeps], "noise": noise(sweeps)}
    return [*lines, "", *_noise_lines(numbers["noise"])], most >= ALLOWED * repeats, numbers


def _numbers(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        point["label"]: {"place": point["place"], "rounds_ms": step_medians_ms(point["result"])} for point in points
    }


def _noise_lines(found: Mapping[str, float]) -> list[str]:
    words = {
        "within": "a round's median within a sweep",
        "paired": "the same, relative to the points that took turns with it",
        "between": "a point's speed between sweeps",
    }
    lines = [f"- spread (standard deviation) of {words[name]}: {found[name]:.2%}" for name in words if name in found]
    return [*lines, f"- share of the cores that other processes took in a round (median): {found['others']:.1%}"]


def slowdowns(tries: int, share: float, words: Sequence[str]) -> tuple[list[str], bool, dict[str, Any]]:
    """The same for pairs of sweeps: a slowdown of this share is found, and none is not."""
    judged: dict[str, list[Judgement]] = {"slower": [], "same": []}
    sweeps = list[list[dict[str, Any]]]()
    for number in range(tries):
        with tempfile.TemporaryDirectory() as folder:
            before = swept(words, Path(folder, "before"))
            ms = statistics.median(step_medians_ms(before[0]["result"]))
            fault = f"slow@step1:rank0:{share * ms:.3f}ms"
            after = {"slower": swept(words, Path(folder, "slower"), fault), "same": swept(words, Path(folder, "same"))}
        sweeps += [before, after["same"]]
        for kind, points in after.items():
            (change,) = changes.changes([_side(before)], [_side(points)], THRESHOLD, ("before", kind)).points
            judged[kind].append(change.judgement)
        told = ", ".join(f"{kind}: {found[-1].value}" for kind, found in judged.items())
        print(f"{number + 1}: {told}", file=sys.stderr, flush=True)
    found, false = (sum(one is Judgement.slower for one in judged[kind]) for kind in ("slower", "same"))
    lines = [
        f"- a slowdown of {share:.0%} is found in {found} of {tries} pairs of sweeps (threshold {THRESHOLD:.0%})",
        f"- without one, {false} of {tries} pairs are called slower",
        "",
    ]
    numbers = {"judged": {kind: [one.name for one in each] for kind, each in judged.items()}, "noise": noise(sweeps)}
    return [*lines, *_noise_lines(numbers["noise"])], found >= ALLOWED * tries and false <= FALSE * tries, numbers


def _side(points: Sequence[Mapping[str, Any]]) -> Measured:
    (point,) = points
    return Measured(point["label"], point["point"], point["config"], point["result"], point["state"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20, help="repetitions, or pairs of sweeps; default: 20")
    parser.add_argument("--slowdown", type=float, metavar="SHARE", help="pairs of sweeps instead, such as 0.05")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    parser.add_argument("words", nargs="*", help=f"settings besides {MODEL}")
    asked = parser.parse_args()
    began = time.monotonic()
    words = [*MODEL.split(), *asked.words]
    if asked.slowdown:
        lines, held, numbers = slowdowns(asked.repeats, asked.slowdown, ["zero=stage1", *words])
    else:
        lines, held, numbers = repeated(asked.repeats, [*POINTS.split(), *words])
    typed = " ".join(["python benchmarks/rank_repeats.py", *sys.argv[1:]])
    head = [
        f"# {'Slowdowns that are found' if asked.slowdown else 'Repetitions of one sweep'}",
        "",
        f"`{typed}`, {date.today()}, {cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{time.monotonic() - began:.0f} s",
        "",
    ]
    print("\n".join([*head, *lines]))
    if asked.write:
        name = "slowdowns_found" if asked.slowdown else "rank_repeats"
        path = RESULTS / f"{name}_cpu_{date.today()}.md"
        path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
