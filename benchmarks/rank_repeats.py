"""How often repetitions of one sweep name the same winner, and how often `compare` finds a slowdown that is there.

[Note: what is repeated]
Each repetition is a whole command with fresh ranks. Without an option it is a sweep of four points at measure=standard;
its answer is the set of points in the first place: the winner, or those that tie. No rule gives one answer for a point
that is slower by just as much as its rounds can show: there it depends on the day's noise (`--points`). With
`--slowdown SHARE` it is a sweep of one point with four checkouts of the code that take turns: two are equal, and two
have a line that makes each step longer by this share. `compare --by resources.code` judges each slower one against an
equal one, and each kind against its own: two tries each of what has to be found and of what must not. One rank on one
core measures them, because two ranks also wait for each other, at speeds of their cores that change independently.

`--busy` adds a changing load: processes on all cores that compute and sleep for random times, with a seed. `--keep
FILE` has a line for each repetition, so that a command that was ended is resumed.

The report also has the noise of the machine: how much a point's rounds differ within a sweep, how much its speed
differs between sweeps, and the load of other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402
from orchestrator.report import changes  # noqa: E402
from orchestrator.report.changes import Judgement, Measured  # noqa: E402
from orchestrator.rounds.recorded import step_medians_ms, used_rounds  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
# Two equal points, which have to tie, and two slower ones: on one micro-batch stages 1 and 2 send the same.
POINTS = "zero=stage1,stage2 batch.micro=2,8 batch.global_size=16"
ALONE = ("zero=stage1", "batch.micro=2", "resources.ranks=1", "resources.threads=1")
MODEL = "model=llama_tiny precision=fp32 batch.seq=64 measure=standard measure.validation_batches=0"
ALLOWED = 0.95  # of the repetitions have the same answer; of the slowdowns are found
FALSE = 0.05  # of the equal checkouts may be called slower
THRESHOLD = 0.05
BUSY_S, IDLE_S = 5.0, 15.0  # means of the times for which a process of the changing load computes and sleeps
PACKAGES = ("conf", "kernels", "orchestrator", "zero_runtime")
# The checkouts, and which of them are compared: before and after.
EQUALS, SLOWERS = ("first", "second"), ("first_slower", "second_slower")
PAIRS = {"slower": tuple(zip(EQUALS, SLOWERS, strict=True)), "same": (EQUALS, SLOWERS)}
# Appended to the runtime of the slower checkouts. The median leaves out the times in which a point waits for its turn.
SLOWER = '''

def _slower(step, share):
    """`step`, which computes before it begins for this share of the median of the last steps."""
    import statistics
    import time

    entered, lasts = [], []

    def slower(self, *given, **named):
        entered.append(time.perf_counter())
        if len(entered) > 1:
            lasts.append(entered[1] - entered.pop(0) - (lasts and share * statistics.median(lasts[-9:]) or 0.0))
            until = time.perf_counter() + share * statistics.median(lasts[-9:])
            while time.perf_counter() < until:
                pass
        return step(self, *given, **named)

    return slower


ZeroRuntime.step = _slower(ZeroRuntime.step, {share})
'''
Points = Sequence[Mapping[str, Any]]  # of a sweep, as `report --json` describes them
Numbers = Mapping[str, Mapping[str, Any]]  # by point: what `numbers` keeps of them


def swept(words: Sequence[str], output: Path) -> list[dict[str, Any]]:
    """Runs a sweep from its beginning. Returns its points."""
    line = [sys.executable, "run.py", "-m", *words, f"output={output}", "tracking=none", "--fresh", "--json"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}: {done.stderr[-2000:]}")
    points: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return points


def winners(points: Points) -> list[str]:
    return sorted(point["label"] for point in points if point["place"] == 1)


def numbers(points: Points) -> Numbers:
    """What the report needs of each point."""
    return {
        point["label"]: {
            "place": point["place"],
            "rounds": [one["number"] for one in used_rounds(point["result"])],
            "rounds_ms": step_medians_ms(point["result"]),
            "reference_ms": [
                statistics.geometric_mean(one["reference_ms"])
                for one in used_rounds(point["result"])
                if one.get("reference_ms")
            ],
            "others": [one["others_share"] or 0.0 for one in used_rounds(point["result"])],
        }
        for point in points
    }


def noise(sweeps: Sequence[Numbers]) -> dict[str, float]:
    """Relative standard deviations: of a round's median within a sweep, of its ratio to the mean of the points that
    took turns, and of a point's speed between sweeps; and the share of the cores that others took in a round."""
    within, paired, shares = list[float](), list[float](), list[float]()
    by_label: dict[str, list[float]] = {}
    for points in sweeps:
        rounds = {label: dict(zip(point["rounds"], point["rounds_ms"], strict=True)) for label, point in points.items()}
        # A faster point makes more rounds, and loaded ones do not count.
        shared = set.intersection(*map(set, rounds.values()))
        means = {number: statistics.mean(medians[number] for medians in rounds.values()) for number in shared}
        for label, medians in rounds.items():
            by_label.setdefault(label, []).append(statistics.median(medians.values()))
            within.append(statistics.stdev(medians.values()) / statistics.mean(medians.values()))
            if len(rounds) > 1 and len(shared) > 1:
                ratios = [medians[number] / means[number] for number in shared]
                paired.append(statistics.stdev(ratios) / statistics.mean(ratios))
        shares += [share for point in points.values() for share in point["others"]]
    between = [statistics.stdev(each) / statistics.mean(each) for each in by_label.values() if len(each) > 1]
    found = {"within": within, "paired": paired, "between": between, "others": shares}
    return {name: statistics.median(values) for name, values in found.items() if values}


def reference_line(sweeps: Sequence[Numbers]) -> str:
    """How long the reference work took next to the steps of each point: the median over all rounds."""
    by_label: dict[str, list[float]] = {}
    for points in sweeps:
        for label, point in points.items():
            by_label.setdefault(label, []).extend(point["reference_ms"])
    told = ", ".join(f"{label} {statistics.median(took):.2f} ms" for label, took in by_label.items() if took)
    return f"- reference work next to a step (median over the rounds): {told or 'none'}"


class Kept:
    """The repetitions so far, in a file if there is one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        exists = file is not None and file.exists()
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and exists else []
        self.found: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def add(self, repetition: dict[str, Any]) -> None:
        self.found.append(repetition)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(repetition) + "\n")


def repeated(repeats: int, words: Sequence[str], kept: Kept) -> tuple[list[str], bool]:
    """The lines of the report on repetitions of a sweep, and whether enough of them agree."""
    for number in range(len(kept.found), repeats):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            points = swept(words, Path(folder))
        seconds = time.monotonic() - began
        kept.add({"answer": winners(points), "seconds": seconds, "points": numbers(points)})
        print(f"{number + 1}: {' = '.join(winners(points))}, {seconds:.0f} s", file=sys.stderr, flush=True)
    answers = Counter(tuple(one["answer"]) for one in kept.found)
    ((_, most),) = answers.most_common(1)
    seconds = statistics.median(one["seconds"] for one in kept.found)
    lines = [
        f"- the same answer in {most} of {repeats} repetitions of {seconds:.0f} s each",
        "",
        "| first place | repetitions |",
        "|---|---|",
        *(f"| {' = '.join(answer)} | {count} |" for answer, count in answers.most_common()),
        "",
    ]
    lines += [reference_line([one["points"] for one in kept.found])]
    return [*lines, *_noise_lines(noise([one["points"] for one in kept.found]))], most >= ALLOWED * repeats


def checkouts(folder: Path, share: float) -> dict[str, Path]:
    """Four copies of this code: two as it is and two slower ones."""
    made = {name: folder / name for name in (*EQUALS, *SLOWERS)}
    for path in made.values():
        for package in PACKAGES:
            shutil.copytree(ROOT / package, path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SLOWERS:
        with (made[name] / "zero_runtime" / "runtime.py").open("a", encoding="utf-8") as file:
            file.write(SLOWER.replace("{share}", str(share)))
    return made


def slowdowns(repeats: int, share: float, words: Sequence[str], kept: Kept) -> tuple[list[str], bool]:
    """The same for sweeps of checkouts: the slower ones are found, and no difference of equal ones is."""
    with tempfile.TemporaryDirectory() as folder:
        codes = checkouts(Path(folder), share)
        axis = f"resources.code={','.join(map(str, codes.values()))}"
        for number in range(len(kept.found), repeats):
            began = time.monotonic()
            points = swept([axis, *words], Path(folder, f"outputs{number}"))
            judged = {
                kind: [_judged(points, codes[before], codes[after]) for before, after in pairs]
                for kind, pairs in PAIRS.items()
            }
            kept.add({**judged, "seconds": time.monotonic() - began, "points": numbers(points)})
            told = ", ".join(
                f"{kind}: {each['judgement']} {each['time']:.3f}" for kind in judged for each in judged[kind]
            )
            print(f"{number + 1}: {told}, {kept.found[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    tries = {kind: [each for one in kept.found for each in one[kind]] for kind in PAIRS}
    found, false = (
        sum(each["judgement"] == Judgement.slower.name for each in tries[kind]) for kind in ("slower", "same")
    )
    ratios = {kind: [each["time"] for each in tries[kind]] for kind in PAIRS}
    lines = [
        f"- {repeats} sweeps of {statistics.median(one['seconds'] for one in kept.found):.0f} s each",
        f"- a slowdown of {share:.0%} is found in {found} of {len(tries['slower'])} tries (threshold {THRESHOLD:.0%}); "
        f"the measured ratios have the median {statistics.median(ratios['slower']):.3f} and the standard deviation "
        f"{statistics.stdev(ratios['slower']):.2%}",
        f"- equal checkouts: one is called slower in {false} of {len(tries['same'])} tries; median "
        f"{statistics.median(ratios['same']):.3f}, standard deviation {statistics.stdev(ratios['same']):.2%}",
        "",
    ]
    held = found >= ALLOWED * len(tries["slower"]) and false <= FALSE * len(tries["same"])
    return [*lines, *_noise_lines(noise([one["points"] for one in kept.found]))], held


def _judged(points: Points, before: Path, after: Path) -> dict[str, Any]:
    """What `compare --by resources.code` says of the points of two checkouts."""
    by_code = {point["config"]["resources"]["code"]: point for point in points}
    sides = [
        Measured(one["label"], one["point"], one["config"], one["result"], one["state"])
        for one in (by_code[str(before)], by_code[str(after)])
    ]
    (change,) = changes.by_setting(sides, "resources.code", THRESHOLD).points
    assert change.time is not None
    return {"judgement": change.judgement.name, "time": change.time.ratio, "low": change.time.low}


def _noise_lines(found: Mapping[str, float]) -> list[str]:
    words = {
        "within": "a round's median within a sweep",
        "paired": "the same, relative to the points that took turns with it",
        "between": "a point's speed between sweeps",
    }
    lines = [f"- spread (standard deviation) of {words[name]}: {found[name]:.2%}" for name in words if name in found]
    return [*lines, f"- share of the cores that other processes took in a round (median): {found['others']:.1%}"]


@contextmanager
def changing_load() -> Iterator[None]:
    """A process for each core that computes and sleeps for random times, until the end of the block."""
    program = [sys.executable, str(Path(__file__).resolve()), "--compute"]
    made = [subprocess.Popen([*program, str(seed)]) for seed in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for one in made:
            one.kill()
            one.wait()


def compute(seed: int) -> None:
    """Computes and sleeps in turn while its parent lives."""
    generator, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:
        time.sleep(generator.expovariate(1 / IDLE_S))
        until = time.monotonic() + generator.expovariate(1 / BUSY_S)
        while time.monotonic() < until:
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20, help="repetitions; default: 20")
    parser.add_argument("--slowdown", type=float, metavar="SHARE", help="sweeps of four checkouts, such as 0.05")
    parser.add_argument("--points", default=POINTS, help=f"the axes of the sweep; default: {POINTS}")
    parser.add_argument("--busy", action="store_true", help="next to a load that changes")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of the repetitions so far, to resume")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--compute", type=int, metavar="SEED", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=f"settings besides {MODEL}")
    asked = parser.parse_args()
    if asked.compute is not None:
        compute(asked.compute)
        return 0
    kept, words = Kept(asked.keep), [*MODEL.split(), *asked.words]
    with changing_load() if asked.busy else contextlib.nullcontext():
        if asked.slowdown:
            lines, held = slowdowns(asked.repeats, asked.slowdown, [*ALONE, *words], kept)
        else:
            lines, held = repeated(asked.repeats, [*asked.points.split(), *words], kept)
    typed = f"python benchmarks/rank_repeats.py {shlex.join(sys.argv[1:])}"
    if asked.keep:
        typed = typed.replace(str(asked.keep), asked.keep.name)  # its folder is this machine's
    head = [
        f"# {'Slowdowns that are found' if asked.slowdown else 'Repetitions of one sweep'}",
        "",
        f"`{typed}`, {date.today()}, {cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "",
    ]
    print("\n".join([*head, *lines]))
    if asked.write:
        name = "slowdowns_found" if asked.slowdown else "rank_repeats"
        path = RESULTS / f"{name}_cpu_{date.today()}.md"
        path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(kept.found, indent=1) + "\n", encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
