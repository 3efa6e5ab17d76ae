"""Compares predicted step times with measured ones on CPU ranks, and what `choose` takes with the best of all.

`python benchmarks/predicted_speed.py [--rounds N] [--final N] [--space TEXT] [--write]`. Each space is a set of points
that differ in some settings. In each round the parts of a step are measured by the code of `calibrate`, and then the
points (timed_points.py). A round's error is that of its own prediction; a point's error is the median of those of its
rounds.

[Note: the same processes]
The parts and the points of a space are measured by the same processes. On a virtual machine with two cores the same
step of the same code differed more between two starts of processes than between two rounds of one start, and such a
difference would be counted as an error of the prediction.

[Note: turns]
All points of a space are alive at the same time and make a step in turn, so that a machine whose speed changes does so
for all of them alike. Two points are compared turn by turn.

[Note: choose in hindsight]
For each space, the candidates are those that `choose` would confirm by the first round's prediction
(`wings/predict/choice.py`), and the turns of the first round are their short runs. After the rounds, what it takes and
all points that may be the fastest make further turns of their own, in the same processes. By these alone
paired_turns.py decides how much slower it is than the best. If no other point may be the fastest, there are no such
turns and it is the best.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import timed_points  # noqa: E402
from benchmarks.paired_turns import Slower, contenders, final_turns, slower  # noqa: E402
from benchmarks.stages_report import cpu_name  # noqa: E402
from benchmarks.timed_points import FINAL_STEPS, Final, Round  # noqa: E402
from orchestrator.compose import arguments  # noqa: E402
from orchestrator.compose.line import composed  # noqa: E402
from orchestrator.planning.point import Point  # noqa: E402
from orchestrator.planning.points import judged  # noqa: E402
from orchestrator.planning.rules.scene import here  # noqa: E402
from orchestrator.rounds.comparison import SpeedVerdict, of_turns  # noqa: E402
from orchestrator.rounds.intervals import LEAST, percentile  # noqa: E402
from orchestrator.wings.predict import memory_cache, speed  # noqa: E402
from orchestrator.wings.predict.choice import NEAR, ShortRun, best_run  # noqa: E402
from orchestrator.wings.predict.prediction import hardware_name  # noqa: E402
from orchestrator.wings.predict.speed import Speed, TimingJob, speed_of  # noqa: E402
from orchestrator.wings.predict.step import Memories  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
RUNS = 4  # as in `choose`
ALLOWED_MEDIAN, ALLOWED_WORST, ALLOWED_TAU, ALLOWED_REGRET = 0.10, 0.25, 0.8, 0.03


def llama(width: int, layers: int, vocab: int = 512, kv_heads: int = 4) -> str:
    shape = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
    }
    return " ".join(["model=llama_tiny", *(f"model.config.{key}={value}" for key, value in shape.items())])


def gpt2(width: int, layers: int, vocab: int = 512) -> str:
    shape = {"vocab_size": vocab, "n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": 256}
    return " ".join(["model=gpt2", *(f"model.config.{key}={value}" for key, value in shape.items())])


STAGES = "zero=stage0,stage1,stage2,stage3"
SPACES = {
    "Llama 128 x 4, micro-batches": f"{llama(128, 4)} precision=fp32 batch.seq=128 {STAGES} batch.micro=1,4,16",
    "Llama 256 x 6, recomputation": f"{llama(256, 6)} precision=fp32 batch.seq=128 batch.micro=2 {STAGES} "
    "recompute=none,full",
    "Llama 256 x 4, grouped heads, bf16": f"{llama(256, 4, kv_heads=2)} precision=bf16 batch.seq=128 {STAGES} "
    "batch.micro=1,4",
    "GPT-2 256 x 4": f"{gpt2(256, 4)} precision=fp32 batch.seq=64 {STAGES} batch.micro=2,8",
    "GPT-2 192 x 8, bf16, recomputation": f"{gpt2(192, 8)} precision=bf16 batch.seq=128 batch.micro=2 {STAGES} "
    "recompute=none,by_operation",
    "Llama 512 x 3, accumulation": f"{llama(512, 3)} precision=fp32 batch.seq=64 batch.micro=2 {STAGES} "
    "batch.accumulation=1,4",
    "Llama 384 x 4, reduction at the boundary": f"{llama(384, 4)} precision=fp32 batch.seq=64 batch.micro=2 "
    "batch.accumulation=3 zero=stage2,stage3 zero.reduce_at_boundary=true,false zero.prefetch=0,1",
    "Llama 192 x 4, 8,192 tokens, losses": f"{llama(192, 4, vocab=8192)} precision=fp32 batch.seq=128 batch.micro=4 "
    f"{STAGES} loss=full,tiled",
    "Llama 256 x 4, one rank, two threads": f"{llama(256, 4)} precision=fp32 resources.ranks=1 zero=stage0 "
    "batch.seq=128 recompute=none,by_operation,full batch.micro=1,2,8",
    "GPT-2 320 x 3, optimizers": f"{gpt2(320, 3)} precision=fp32 batch.seq=64 batch.micro=2 "
    "zero=stage0,stage2,stage3 optimizer=adamw,adamw8bit,sgd",
}


@dataclass(frozen=True)
class Compared:
    """A point: of each round its predicted speed, and the measured seconds of a step in each turn; and those in the
    further turns of a contender."""

    space: str
    label: str
    predicted: list[Speed]
    rounds: list[list[float]]
    tokens: int
    final: list[float] = field(default_factory=list)

    @property
    def predicted_s(self) -> float:
        return statistics.median(one.time.total_s for one in self.predicted)

    @property
    def seconds(self) -> list[float]:
        """Of all turns."""
        return [one for turns in self.rounds for one in turns]

    @property
    def range_s(self) -> tuple[float, float]:
        """The p10 and p90 of the measured seconds."""
        return percentile(self.seconds, 0.1), percentile(self.seconds, 0.9)

    @property
    def error(self) -> float:
        """predicted / measured - 1, see the module's docstring."""
        pairs = zip(self.predicted, self.rounds, strict=True)
        return statistics.median(one.time.total_s / statistics.median(turns) - 1 for one, turns in pairs)

    def per_token(self, seconds: float) -> float:
        return seconds / self.tokens

    def short_run(self) -> ShortRun:
        """What `choose` would see of it: the prediction and the turns of the first round, in tokens per second."""
        predicted = self.tokens / self.predicted[0].time.total_s
        return ShortRun(predicted, self.tokens / statistics.median(self.rounds[0]))

    def is_slower(self, other: Compared, rivals: int) -> bool:
        """Whether its turns of the first round show that it is slower than another point."""
        mine, theirs = ([row.per_token(seconds) for seconds in row.rounds[0]] for row in (self, other))
        if len(mine) < LEAST:
            return self is not other
        return of_turns(mine, theirs, family=rivals).verdict is SpeedVerdict.slower


def compared(name: str, line: str, rounds: int, final: int | None) -> list[Compared]:
    """The points of a space. final: at most so many further turns of its contenders."""
    words = ["--multirun", *line.split(), "resources.device=cpu", "tracking=none"]
    points, problems = judged(composed(arguments.split(words)), here())
    assert not problems, problems
    found = [point for point in points if isinstance(point, Point)]
    configs = [point.config for point in found]
    memories = Memories(memory_cache.answers(configs, configs))
    speed.forget(configs, hardware_name(configs[0]))
    jobs = speed.missing(configs, hardware_name(configs[0]))
    rows: list[Compared] = []

    def decide(measured: Sequence[Round]) -> Final:
        rows.extend(_rows(name, found, memories, jobs, measured))
        chosen, turns = what_choose_takes(rows).label, per_token(rows)
        labels, margin = contenders(turns, chosen)
        count = final_turns(turns, labels, FINAL_STEPS, final)
        print(
            f"{name}: {len(labels)} contenders (margin {margin:.1%}), {count} further turns",
            file=sys.stderr,
            flush=True,
        )
        return Final([place for place, row in enumerate(rows) if row.label in labels], count)

    further = timed_points.measured(jobs, configs, rounds, decide)
    return [replace(row, final=further.get(place, [])) for place, row in enumerate(rows)]


def _rows(
    name: str, points: Sequence[Point], memories: Memories, jobs: Sequence[TimingJob], measured: Sequence[Round]
) -> list[Compared]:
    """The points with the predictions and the turns of all rounds."""
    hardware = hardware_name(points[0].config)
    known = [memories.of(point.config) for point in points]
    predicted: list[list[Speed]] = [[] for _ in points]
    for answers, _ in measured:
        speed.forget([point.config for point in points], hardware)  # each round predicts alone
        speed.store(hardware, [(job, answers[job.key]) for job in jobs])
        for point, memory, speeds in zip(points, known, predicted, strict=True):
            one = None if memory is None else speed_of(memory, hardware)
            assert one is not None, f"{point.label} was not predicted"
            speeds.append(one)
    rows = []
    for place, (point, speeds) in enumerate(zip(points, predicted, strict=True)):
        seconds = [[turn[place] for turn in one.turns] for one in measured]
        tokens = (point.config.batch.global_size or 0) * point.config.batch.seq
        rows.append(Compared(name, point.label, speeds, seconds, tokens))
    return rows


# ---- report ----------------------------------------------------------------------------------------------------------


def tau(rows: Sequence[Compared]) -> tuple[float, int]:
    """Kendall's tau of the predicted order, over the pairs of one space whose measured ranges (p10 to p90) do not
    overlap, and the number of these pairs."""
    right = wrong = 0
    for one, other in combinations(rows, 2):
        if one.space != other.space:
            continue
        mine, theirs = ([row.per_token(seconds) for seconds in row.range_s] for row in (one, other))
        if mine[1] < theirs[0] or theirs[1] < mine[0]:
            is_faster = one.per_token(one.predicted_s) < other.per_token(other.predicted_s)
            agrees = is_faster == (mine[1] < theirs[0])
            right, wrong = right + agrees, wrong + (not agrees)
    return (right - wrong) / max(right + wrong, 1), right + wrong


def what_choose_takes(rows: Sequence[Compared]) -> Compared:
    """See [Note: choose in hindsight]."""
    runs = {row.label: row.short_run() for row in rows}
    ranked = sorted(rows, key=lambda row: -runs[row.label].predicted)
    least = NEAR * runs[ranked[0].label].predicted
    near = [row for row in ranked if runs[row.label].predicted >= least][:RUNS]
    fastest = max(near, key=lambda row: runs[row.label].median)
    label = best_run(runs, [row.label for row in near if not row.is_slower(fastest, max(1, len(near) - 1))])
    return next(row for row in rows if row.label == label)


def per_token(rows: Sequence[Compared]) -> dict[str, list[float]]:
    """Of each point the seconds per token in all turns of the rounds."""
    return {row.label: [row.per_token(seconds) for seconds in row.seconds] for row in rows}


def regret(rows: Sequence[Compared]) -> Slower:
    """By how much what `choose` takes in a space is slower than the best, see [Note: choose in hindsight]."""
    chosen = what_choose_takes(rows)
    if not chosen.final:
        return Slower(0.0, 0.0, 0.0, (chosen.label,))
    turns = {row.label: [row.per_token(seconds) for seconds in row.final] for row in rows if row.final}
    return slower(turns, chosen.label)


def report(rows: Sequence[Compared], seconds: float) -> list[str]:
    errors = sorted(abs(row.error) for row in rows)
    of_order, pairs = tau(rows)
    bias = statistics.median(row.error for row in rows)
    lines = [
        "# Predicted and measured step times on CPU ranks",
        "",
        f"`python benchmarks/predicted_speed.py {shlex.join(sys.argv[1:])}`, {date.today()}, {cpu_name()}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}, {seconds:.0f} s, "
        f"{len(rows[0].rounds)} rounds",
        "",
        f"- {len(rows)} points in {len({row.space for row in rows})} spaces: median error "
        f"{statistics.median(errors):.1%}, worst {errors[-1]:.1%}, median with its sign {bias:+.1%}",
        f"- order: Kendall's tau {of_order:.2f} over the {pairs} pairs of a space whose p10-p90 do not overlap",
    ]
    spaces = {space: [row for row in rows if row.space == space] for space in dict.fromkeys(row.space for row in rows)}
    regrets = {space: regret(of_space) for space, of_space in spaces.items()}
    within = sum(one.ratio <= ALLOWED_REGRET for one in regrets.values())
    lines += [
        f"- choose, with at most {RUNS} runs: within {ALLOWED_REGRET:.0%} of the best in {within} of {len(regrets)} "
        "spaces",
        "",
        "| space | points | chosen | best | slower | 95 % of it | contenders (turns) | error | tau (pairs) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for space, of_space in spaces.items():
        judged_by, chosen = regrets[space], what_choose_takes(of_space)
        contending = max(sum(bool(row.final) for row in of_space), 1)
        median = statistics.median(abs(row.error) for row in of_space)
        order, count = tau(of_space)
        lines.append(
            f"| {space} | {len(of_space)} | {chosen.label} | {' or '.join(judged_by.best)} | {judged_by.ratio:+.1%} | "
            f"{judged_by.low:+.1%} to {judged_by.high:+.1%} | {contending} ({len(chosen.final)}) | {median:.1%} | "
            f"{order:.2f} ({count}) |"
        )
    lines += ["", "| space | point | predicted ms | measured ms | p10 | p90 | turns | error |", "|---|" + "---|" * 7]
    for row in rows:
        times = [row.predicted_s, statistics.median(row.seconds), *row.range_s]
        numbers = " | ".join(f"{1e3 * one:.1f}" for one in times)
        lines.append(f"| {row.space} | {row.label} | {numbers} | {len(row.seconds)} | {row.error:+.1%} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2, help="at least 1; default: 2")
    parser.add_argument("--final", type=int, metavar="N", help="at most N further turns of what may be the fastest")
    parser.add_argument("--space", default="", metavar="TEXT", help="only spaces whose name contains TEXT")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    asked = parser.parse_args()
    spaces = {name: line for name, line in SPACES.items() if asked.space.lower() in name.lower()}
    if not spaces or asked.rounds < 1 or (asked.final is not None and asked.final < 1):
        known = "; ".join(SPACES)
        parser.error(f"expected --rounds and --final of at least 1 and a --space among: {known}")
    began, rows = time.monotonic(), list[Compared]()
    for name, line in spaces.items():
        rows += compared(name, line, asked.rounds, asked.final)
        errors = [row.error for row in rows if row.space == name]
        print(f"{name}: {len(errors)} points, {min(errors):+.1%} to {max(errors):+.1%}", file=sys.stderr, flush=True)
    lines = report(rows, time.monotonic() - began)
    print("\n".join(lines))
    if asked.write:
        path = RESULTS / f"predicted_speed_cpu_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        plain: list[dict[str, Any]] = [asdict(row) for row in rows]
        path.with_suffix(".json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    errors = [abs(row.error) for row in rows]
    held = statistics.median(errors) <= ALLOWED_MEDIAN and max(errors) <= ALLOWED_WORST and tau(rows)[0] >= ALLOWED_TAU
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
