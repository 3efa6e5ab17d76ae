"""Measures which share of a step logging costs: writing its event, and the tracker that copies events to MLflow.

`python benchmarks/logging_cost.py [--pairs N] [--turn-s S] [--write]`. One process trains a small model on all cores,
so that the tracker has no core of its own, with short steps, of which logging is a large share. It takes turns: in one
each step writes its event, and a real tracker with a new SQLite store follows; in the other there are no events, and
the tracker is stopped (SIGSTOP). The order is A B B A. Two answers are printed: the ratio of the mean steps of a pair
of turns, with the interval of the pairs; and what logging takes by its own clocks: the time of the writes,
and the tracker's CPU time as if no core were idle. The second hardly depends on what else the machine does. `--write`
writes results/logging_cost_cpu_DATE.md and .json. Exit code 1 if either is 1 % or more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpt import Gpt, GptSize  # noqa: E402
from benchmarks.stages_report import cpu_name  # noqa: E402
from orchestrator.config.schema import (  # noqa: E402
    Model,
    ResolvedBatch,
    ResolvedResources,
    RunConfig,
    Tracking,
    TrackingKind,
    to_dict,
)
from orchestrator.records.record_file import EventAppender  # noqa: E402
from orchestrator.records.run_record import Attempt, new_attempt  # noqa: E402
from orchestrator.records.run_state import RunState  # noqa: E402
from orchestrator.rounds.comparison import RANGE, of_turns  # noqa: E402
from orchestrator.tracking.feed import Tracker, start_tracker  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LIMIT = 0.01
SIZE = GptSize(layers=2, width=128, heads=4, vocab=1024, seq=128, micro=4)


@dataclass
class LoggingTurns:
    """Seconds of a mean step in each turn, with logging and without; of the turns with logging also their length, the
    time of the writes and the tracker's CPU time, in seconds."""

    logged: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    writing: float = 0.0
    tracking: float = 0.0

    def lines(self, cores: int) -> list[str]:
        ratio = of_turns(self.logged, self.bare)
        step = self.seconds / self.steps
        return [
            f"- a step: {1e3 * step:.1f} ms; {len(self.logged)} pairs of turns",
            f"- paired turns: logging costs {100 * (ratio.ratio - 1):+.2f} % of the step "
            f"({RANGE} {100 * (ratio.low - 1):+.2f} to {100 * (ratio.high - 1):+.2f} %)",
            f"- by its own clocks: {100 * self.accounted(cores):.2f} %, of which the writes "
            f"{100 * self.writing / self.seconds:.2f} % ({1e6 * self.writing / self.steps:.0f} us a step) and the "
            f"tracker {100 * self.tracking / self.seconds / cores:.2f} % of {cores} cores",
        ]

    def accounted(self, cores: int) -> float:
        """The share of the step that the writes and the tracker take, if the tracker finds no idle core."""
        return self.writing / self.seconds + self.tracking / self.seconds / cores

    def holds(self, cores: int) -> bool:
        return self.accounted(cores) < LIMIT and of_turns(self.logged, self.bare).ratio - 1 < LIMIT


def trainer() -> Callable[[], float]:
    """A function that makes one training step and returns its loss."""
    torch.manual_seed(0)
    model = Gpt(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(SIZE.vocab, (SIZE.micro, SIZE.seq + 1))

    def step() -> float:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measured(pairs: int, turn_s: float, output: Path) -> LoggingTurns:
    """Makes the turns, after a warm-up of one turn of each kind."""
    config = RunConfig(
        model=Model("gpt", "llama", {}),
        output=str(output),
        batch=ResolvedBatch(accumulation=1, global_size=4),
        resources=ResolvedResources(ranks=1, threads=1),
        tracking=Tracking(TrackingKind.mlflow),
    )
    attempt = new_attempt(output, to_dict(config), "logging", "cpu")
    tracker = start_tracker(config, output, attempt.paths)
    tracker.wait_for_store()
    attempt.move(RunState.starting)
    attempt.move(RunState.running)
    try:
        return _turns(pairs, turn_s, attempt, tracker)
    finally:
        attempt.move(RunState.cancelled, message="the benchmark has ended")
        tracker.close()
        for warning in tracker.warnings():
            print(warning, file=sys.stderr)


def _turns(pairs: int, turn_s: float, attempt: Attempt, tracker: Tracker) -> LoggingTurns:
    step, events, found = trainer(), EventAppender(attempt.paths.metrics), LoggingTurns()
    child = psutil.Process(tracker.pid)
    number = 0

    def turn(*, logs: bool, counts: bool) -> None:
        nonlocal number
        child.send_signal(signal.SIGCONT if logs else signal.SIGSTOP)
        used, writing, steps, began = sum(child.cpu_times()[:2]), 0.0, 0, time.perf_counter()
        while (now := time.perf_counter()) - began < turn_s:
            loss = step()
            steps, number = steps + 1, number + 1
            if logs:
                before = time.perf_counter()
                seconds = before - now
                numbers = {"grad_norm": 1.0, "loss_scale": 1.0, "lr": 1e-3, "memory_mib": 500.0, "memory_kind": "rss"}
                speed = {"step_ms": 1e3 * seconds, "tokens_per_second": SIZE.micro * SIZE.seq / seconds}
                made = {"step": number, "warmup": False, "loss": loss, "skipped": False}
                events.append({"event": "step", "time": time.time(), **made, **numbers, **speed})
                writing += time.perf_counter() - before
        seconds = time.perf_counter() - began
        if not counts:
            return
        (found.logged if logs else found.bare).append(seconds / steps)
        if logs:
            found.steps += steps
            found.seconds += seconds
            found.writing += writing
            found.tracking += sum(child.cpu_times()[:2]) - used

    for pair in range(-1, pairs):
        for logs in (True, False) if pair % 2 == 0 else (False, True):
            turn(logs=logs, counts=pair >= 0)
    child.send_signal(signal.SIGCONT)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=26, help="default: 26, about four minutes")
    parser.add_argument("--turn-s", type=float, default=4.0, help="seconds of a turn; default: 4")
    parser.add_argument("--write", action="store_true", help="write results/logging_cost_cpu_DATE.md and .json")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(asked.pairs, asked.turn_s, Path(folder))
    typed = " ".join(["python benchmarks/logging_cost.py", *sys.argv[1:]])
    head = [
        "# What logging costs",
        "",
        f"`{typed}`, {date.today()}, {cpu_name()}, {cores} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}",
        "",
    ]
    lines = [*head, *found.lines(cores), f"- below {100 * LIMIT:g} %: {'yes' if found.holds(cores) else 'no'}"]
    print("\n".join(lines))
    if asked.write:
        path = RESULTS / f"logging_cost_cpu_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(vars(found), indent=1) + "\n", encoding="utf-8")
    return 0 if found.holds(cores) else 1


if __name__ == "__main__":
    sys.exit(main())
