"""Measures what lossy settings do to the loss in 300 steps on a real text, against plain PyTorch, paired by seed.

`python benchmarks/lossy_margins.py [--seeds N] [--keep FOLDER [--only-kept]] [--write]`. Rows, text and oracles:
lossy_rows.py. `--keep`: a folder of what each row gave for each seed, so that a command that was ended is resumed, and
of changed rows only those are trained again (after other changes, delete it); `--only-kept` trains nothing. `--write`
writes results/lossy_margins_cpu_DATE.md and .json. Exit code 1 if a row is not within its margin, or if one of WORSE
is not outside.

[Note: margins]
A difference is a row's validation loss less the oracle's of the same seed. Its interval holds the mean difference over
seeds with 90 % (Student's t), so a row whose interval is inside of the margin is shown to be there with 95 % for each
end: a test of equivalence by two one-sided tests. A few seeds tell little about the spread of one row, so rows of one
margin share theirs: the root of the mean of their variances over seeds. The margin is a share of what the oracle
learns, its first training loss less its last validation loss: 1 % or 3 % (FINE and COARSE in lossy_rows.py). Rows that
must be outside show that the margin can tell a row that learns worse: the control has a tenth of the learning rate.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.lossy_rows import (  # noqa: E402
    COARSE,
    FINE,
    ORACLES,
    ROWS,
    WARMUP,
    LossyRow,
    LossyTask,
    Trained,
    train_oracle,
    train_row,
)
from benchmarks.stages_report import cpu_name  # noqa: E402
from orchestrator.launch.environment import GLIBC, TUNABLES  # noqa: E402
from zero_runtime.world import join_world, leave_world  # noqa: E402

LAST = 20
WORSE = ("control: a tenth of the rate", "1-bit Adam after 30")  # must be outside of their margins
UNROUNDED = "exact, fp32"
WITHIN, OUTSIDE, OPEN = "within", "outside", "not decided"
Seed = dict[str, dict[str, Trained]]  # "oracles" and "rows", each by name


class Difference(NamedTuple):
    """The mean of differences that are paired by seed, and the ends of its 90 % interval."""

    mean: float
    low: float
    high: float

    def verdict(self, margin: float) -> str:
        """Whether the interval is inside of the margin, beyond it, or neither. A loss that is not finite is outside."""
        if not math.isfinite(self.mean):
            return OUTSIDE
        if -margin <= self.low and self.high <= margin:
            return WITHIN
        return OUTSIDE if self.low > margin or self.high < -margin else OPEN


class Judged(NamedTuple):
    """A row over all seeds; losses in nats per token."""

    validation: float
    difference: Difference
    last: float  # mean training loss of the last steps, less the oracle's
    worst: float  # the most by which a training loss was above the oracle's of the same seed and batch
    worst_step: int
    margin: float
    verdict: str


class Spread(NamedTuple):
    """The standard deviation over seeds of a paired difference, and its degrees of freedom, at least 7."""

    deviation: float
    freedom: int

    @property
    def student(self) -> float:
        """Student's t that one in twenty exceeds: its expansion in 1 / freedom, wrong by less than 0.004 from 7 on."""
        z, over = statistics.NormalDist().inv_cdf(0.95), 1 / self.freedom
        return z + (z**3 + z) / 4 * over + (5 * z**5 + 16 * z**3 + 3 * z) / 96 * over**2

    def interval(self, values: Sequence[float]) -> Difference:
        mean, half = statistics.fmean(values), self.student * self.deviation / math.sqrt(len(values))
        return Difference(mean, mean - half, mean + half)


def differences(name: str, seeds: Sequence[Seed]) -> list[float]:
    """The row's validation loss less its oracle's, by seed."""
    oracle = ROWS[name].oracle
    return [one["rows"][name]["validation"] - one["oracles"][oracle]["validation"] for one in seeds]


def spread_of(share: float, seeds: Sequence[Seed]) -> Spread:
    """Of the rows with this margin, without those that are worse on purpose and the one that does not round."""
    names = [name for name in seeds[0]["rows"] if ROWS[name].share == share and name not in (*WORSE, UNROUNDED)]
    variances = [statistics.variance(differences(name, seeds)) for name in names]
    finite = [one for one in variances if math.isfinite(one)]
    if not finite:
        return Spread(math.inf, 8)  # nothing is decided
    return Spread(math.sqrt(statistics.fmean(finite)), len(finite) * (len(seeds) - 1))


def learned(oracles: Sequence[Trained]) -> float:
    """What an oracle learns: its first training loss less its validation loss, the mean over seeds."""
    return statistics.fmean(one["losses"][0] - one["validation"] for one in oracles)


def margin_of(row: LossyRow, oracles: Sequence[Trained]) -> float:
    """See [Note: margins]."""
    return row.share * learned(oracles)


def judged(name: str, seeds: Sequence[Seed], spread: Spread) -> Judged:
    """The row against its oracle."""
    row = ROWS[name]
    trained, oracles = [one["rows"][name] for one in seeds], [one["oracles"][row.oracle] for one in seeds]
    pairs = list(zip(trained, oracles, strict=True))
    difference = spread.interval(differences(name, seeds))
    above = [
        (mine - right if math.isfinite(mine) else math.inf, step)
        for one, other in pairs
        for step, (mine, right) in enumerate(zip(one["losses"], other["losses"], strict=True), 1)
        if step > WARMUP
    ]
    last = statistics.fmean(_last(one) - _last(other) for one, other in pairs)
    margin = margin_of(row, oracles)
    validation = statistics.fmean(one["validation"] for one in trained)
    return Judged(validation, difference, last, *max(above), margin, difference.verdict(margin))


def _last(trained: Trained) -> float:
    return statistics.fmean(trained["losses"][-LAST:])


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A folder with a file for each row or oracle of each seed, by the settings that decide its losses."""

    folder: Path

    def path(self, name: str, task: LossyTask) -> Path:
        what = replace(ROWS[name], words="", sends="", share=0.0) if name in ROWS else ORACLES[name]
        digest = hashlib.sha256(repr(what).encode()).hexdigest()[:12]
        return self.folder / f"seed{task.seed}_{task.steps}steps_{digest}.json"

    def has(self, name: str, task: LossyTask) -> bool:
        return self.path(name, task).exists()

    def write(self, name: str, task: LossyTask, trained: Trained) -> None:
        part = self.path(name, task).with_suffix(".part")
        part.write_text(json.dumps(trained))
        part.rename(self.path(name, task))

    def read(self, name: str, task: LossyTask) -> Trained:
        return dict(json.loads(self.path(name, task).read_text()))


Work = Sequence[tuple[str, LossyTask]]


def rank_main(rank: int, world: int, rendezvous: str, kept: Kept, work: Work) -> None:
    with join_world(Path(rendezvous), rank, world, torch.device("cpu")) as watch:
        for name, task in work:
            trained = train_row(name, task, watch)
            if rank == 0:
                kept.write(name, task, trained)
                print(f"seed {task.seed}, {name}: {trained['validation']:.4f}", flush=True)
    leave_world()


def train_missing(tasks: Sequence[LossyTask], kept: Kept) -> None:
    """Trains what is not kept yet."""
    for task in tasks:
        for name in ORACLES:
            if not kept.has(name, task):
                kept.write(name, task, train_oracle(name, task))
    for world in sorted({row.world for row in ROWS.values()}):
        rows = [name for name, row in ROWS.items() if row.world == world]
        work = [(name, task) for task in tasks for name in rows if not kept.has(name, task)]
        if work:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(rank_main, (world, f"{folder}/rendezvous", kept, work), nprocs=world)


def seeds_of(tasks: Sequence[LossyTask], kept: Kept) -> list[Seed]:
    """The oracles, and the rows that are kept for every seed."""
    rows = [name for name in ROWS if all(kept.has(name, task) for task in tasks)]
    named = (("oracles", list(ORACLES)), ("rows", rows))
    return [{kind: {name: kept.read(name, task) for name in names} for kind, names in named} for task in tasks]


# ---- report ----------------------------------------------------------------------------------------------------------


def judged_rows(seeds: Sequence[Seed]) -> dict[str, Judged]:
    spreads = {share: spread_of(share, seeds) for share in (FINE, COARSE)}
    return {name: judged(name, seeds, spreads[ROWS[name].share]) for name in seeds[0]["rows"]}


def failures(rows: Mapping[str, Judged]) -> list[str]:
    """What the claim lacks: a row that is not within its margin, one that is worse and not outside, one not trained."""
    wanted = {name: OUTSIDE if name in WORSE else WITHIN for name in rows}
    wrong = [f"{name}: {one.verdict}" for name, one in rows.items() if one.verdict != wanted[name]]
    return [*wrong, *(f"{name}: not trained" for name in ROWS if name not in rows)]


def table(rows: Mapping[str, Judged], seeds: Sequence[Seed]) -> list[str]:
    lines = [
        "| row | besides `zero=stage3 precision=bf16` | validation loss | less the oracle's, 90 % interval | last "
        f"{LAST} steps, less the oracle's | worst step | margin | verdict | bytes sent a step | formula |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in rows.items():
        row, trained = ROWS[name], seeds[0]["rows"][name]
        low_high = f"{one.difference.low:+.4f} to {one.difference.high:+.4f}"
        equal = "=" if trained["sent"] == trained["formula"] else f"{trained['formula']:,}, not"
        cells = [
            name,
            f"`{row.words}`" if row.words else "",
            f"{one.validation:.4f}",
            f"{one.difference.mean:+.4f} ({low_high})",
            f"{one.last:+.4f}",
            f"{one.worst:+.2f} at {one.worst_step}",
            f"{one.margin:.3f}",
            one.verdict,
            f"{trained['sent']:,}",
            f"{equal} {row.sends}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def oracle_lines(seeds: Sequence[Seed]) -> list[str]:
    lines = ["| oracle | first loss | validation loss | its spread over seeds | learned |", "|---|---|---|---|---|"]
    for name in ORACLES:
        oracles = [one["oracles"][name] for one in seeds]
        losses = [one["validation"] for one in oracles]
        first = statistics.fmean(one["losses"][0] for one in oracles)
        cells = (f"{first:.4f}", f"{statistics.fmean(losses):.4f}", f"{statistics.stdev(losses):.4f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {learned(oracles):.4f} |")
    return lines


def spread_lines(seeds: Sequence[Seed]) -> list[str]:
    found = {share: spread_of(share, seeds) for share in (FINE, COARSE)}
    return [
        f"Rows with a margin of {100 * share:.0f} % differ from the oracle by a standard deviation of "
        f"{spread.deviation:.4f} over seeds ({spread.freedom} degrees of freedom)."
        for share, spread in found.items()
    ]


def report(seeds: Sequence[Seed], steps: int) -> list[str]:
    rows = judged_rows(seeds)
    wrong = failures(rows)
    return [
        f"# What lossy settings do to the loss, {date.today()}",
        "",
        f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {version('torch')}; "
        f"{steps} steps, {len(seeds)} seeds.",
        "",
        f"Command: `{' '.join(['python benchmarks/lossy_margins.py', *sys.argv[1:]])}`",
        "",
        *oracle_lines(seeds),
        "",
        *table(rows, seeds),
        "",
        *spread_lines(seeds),
        "",
        f"Not as claimed: {'; '.join(wrong)}."
        if wrong
        else "All rows are within their margins, but for those that must be outside: " + ", ".join(WORSE),
    ]


def numbers(seeds: Sequence[Seed], rows: Mapping[str, Judged]) -> dict[str, Any]:
    """What the page is made of, without the losses of single steps."""

    def short(trained: Trained) -> Trained:
        return {key: value for key, value in trained.items() if key != "losses"} | {"last": _last(trained)}

    by_seed = [
        {kind: {name: short(one) for name, one in found.items()} for kind, found in one.items()} for one in seeds
    ]
    return {"seeds": by_seed, "judged": {name: one._asdict() for name, one in rows.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N - 1, at least 2; default: 5")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="folder of what each seed gave, to resume")
    parser.add_argument("--only-kept", action="store_true", help="train nothing: report the rows that every seed has")
    parser.add_argument("--write", action="store_true", help="write results/lossy_margins_cpu_DATE.md and .json")
    asked = parser.parse_args()
    if asked.only_kept and asked.keep is None:
        parser.error("--only-kept: expected --keep FOLDER with it, found none")
    if asked.seeds < 2:
        parser.error(f"--seeds: expected at least 2, which a spread needs, found {asked.seeds}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[TUNABLES] = GLIBC  # as our launcher sets it: freed memory stays with the process
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(asked.keep or Path(folder))
        kept.folder.mkdir(parents=True, exist_ok=True)
        tasks = [LossyTask(seed, asked.steps) for seed in range(asked.seeds)]
        if not asked.only_kept:
            train_missing(tasks, kept)
        seeds = seeds_of(tasks, kept)
    lines, rows = report(seeds, asked.steps), judged_rows(seeds)
    print("\n".join(lines))
    if asked.write:
        stem = ROOT / "benchmarks" / "results" / f"lossy_margins_cpu_{date.today()}"
        stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        stem.with_suffix(".json").write_text(json.dumps(numbers(seeds, rows), indent=1) + "\n", encoding="utf-8")
    return 1 if failures(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
