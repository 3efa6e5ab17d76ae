"""Compares predicted step times with measured ones on CPU ranks, and what `choose` takes with the best of all.

`python benchmarks/predicted_speed.py [--rounds N] [--spaces N] [--write]`. Each space is a set of points that differ in
some settings. Its parts of a step are measured first, by the code of `calibrate`, and then each point in several
rounds, in rotated order. A point's time is the median of its rounds, its range their least and most.

[Note: the same processes]
The parts and the points of a space are measured by the same processes. On a virtual machine with two cores the same
step of the same code differed more between two starts of processes than between two rounds of one start, and such a
difference would be counted as an error of the prediction.

[Note: choose in hindsight]
For each space, the candidates are those that `choose` would confirm (`plan/choice.py`), and their short runs are the
first round. What it takes is compared with the best of all points by the other rounds, which took no part in the
choice. A difference below the spread of the rounds is noise of the machine: what it takes is beaten only if all rounds
of another point are faster than all of its rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402
from orchestrator.compose import arguments  # noqa: E402
from orchestrator.compose.line import composed  # noqa: E402
from orchestrator.config.schema import RunConfig  # noqa: E402
from orchestrator.launch.environment import GLIBC, TUNABLES  # noqa: E402
from orchestrator.plan import memory_cache, speed  # noqa: E402
from orchestrator.plan.choice import NEAR  # noqa: E402
from orchestrator.plan.point import Point  # noqa: E402
from orchestrator.plan.points import judged  # noqa: E402
from orchestrator.plan.prediction import hardware_name  # noqa: E402
from orchestrator.plan.rules.scene import here  # noqa: E402
from orchestrator.plan.speed import Speed, TimingJob, speed_of  # noqa: E402
from orchestrator.plan.step import Memories  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
RUNS = 4  # as in `choose`
WARM_UP = 3
ROUND_S = 1.2  # time of one point in one round
LEAST, MOST = 4, 40  # steps of one point in one round
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
    """A point: its predicted seconds of a step, and the measured ones of each round."""

    space: str
    label: str
    predicted: Speed
    rounds: list[float]
    tokens: int

    @property
    def measured_s(self) -> float:
        return statistics.median(self.rounds)

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted.time.total_s / self.measured_s - 1

    def per_token(self, seconds: float) -> float:
        return seconds / self.tokens


# ---- measurement -----------------------------------------------------------------------------------------------------


def rank_main(
    rank: int, world: int, folder: str, jobs: Sequence[TimingJob], configs: Sequence[RunConfig], rounds: int
) -> None:
    """The parts of a step and all rounds of the points, on this rank. Rank 0 writes the answers of the jobs, and the
    seconds of a step by round and point."""
    from orchestrator.worker.calibrate import Calibration
    from orchestrator.worker.setup import build_data, build_runtime, prepare_process
    from orchestrator.workloads.data import slice_for_rank
    from orchestrator.workloads.models import token_losses
    from zero_runtime.watch.watch import WatchSettings
    from zero_runtime.world import WorldSettings, join_world, leave_world

    device = prepare_process(configs[0], rank)
    found = [[0.0] * len(configs) for _ in range(rounds)]
    with join_world(Path(folder, "store"), rank, world, device, WorldSettings(watch=WatchSettings(300))) as watch:
        plain = [job.plain() for job in jobs]
        answers = Calibration(device, watch, lambda _job: None).answers(plain, budget_s=math.inf)
        for number in range(rounds):
            for place in [(place + number) % len(configs) for place in range(len(configs))]:
                config = configs[place]
                watch.journal.begin("start")
                runtime, _ = build_runtime(config, device, watch)
                data = build_data(config)
                samples = config.batch.global_size or 1

                def step(index: int) -> float:
                    begin = time.perf_counter()
                    offset, count = slice_for_rank(samples, rank, world)  # noqa: B023
                    ids, labels = data.train_batch(index * samples + offset, count)  # noqa: B023
                    tokens = runtime.sum_over_ranks(int((labels != -100).sum()))  # noqa: B023
                    micro = config.batch.micro  # noqa: B023
                    for start in range(0, count, micro):
                        part = slice(start, start + micro)
                        batch = torch.from_numpy(ids[part]), torch.from_numpy(labels[part])
                        loss = token_losses(runtime.model, *batch, config.loss.tile_tokens) / tokens  # noqa: B023
                        last = start + micro >= count
                        if config.zero.reduce_at_boundary and not last:  # noqa: B023
                            with runtime.no_sync():  # noqa: B023
                                runtime.backward(loss)  # noqa: B023
                        else:
                            runtime.backward(loss)  # noqa: B023
                        del loss
                    runtime.step(1e-4)  # noqa: B023
                    return time.perf_counter() - begin

                warm = [step(index) for index in range(WARM_UP)]
                slowest = float(runtime.collectives.sum_over_ranks_(torch.tensor(warm[-1], dtype=torch.float64)))
                count = min(max(int(ROUND_S * world / slowest), LEAST), MOST)
                seconds = [step(WARM_UP + index) for index in range(count)]
                found[number][place] = statistics.median(seconds)
                runtime.close()
    if rank == 0:
        Path(folder, "seconds").write_bytes(pickle.dumps((answers, found)))
    leave_world()


def measured(
    jobs: Sequence[TimingJob], configs: Sequence[RunConfig], rounds: int
) -> tuple[dict[str, Any], list[list[float]]]:
    """The answers of the jobs by key, and by point the seconds of its rounds."""
    world = configs[0].resources.ranks or 1
    os.environ |= {TUNABLES: GLIBC, "OMP_NUM_THREADS": str(configs[0].resources.threads)}
    with tempfile.TemporaryDirectory() as folder:
        args = (world, folder, jobs, configs, rounds)
        torch.multiprocessing.start_processes(rank_main, args, nprocs=world, start_method="spawn")
        answers, by_round = pickle.loads(Path(folder, "seconds").read_bytes())
    return answers, [[found[place] for found in by_round] for place in range(len(configs))]


def compared(name: str, line: str, rounds: int) -> list[Compared]:
    """The points of a space."""
    words = ["--multirun", *line.split(), "resources.device=cpu", "tracking=none"]
    points, problems = judged(composed(arguments.split(words)), here())
    assert not problems, problems
    found = [point for point in points if isinstance(point, Point)]
    configs = [point.config for point in found]
    hardware = hardware_name(configs[0])
    jobs = speed.missing(configs, hardware, fresh=True)
    answers, rounds_s = measured(jobs, configs, rounds)
    speed.store(hardware, [(job, answers[job.key]) for job in jobs])
    memories = Memories(memory_cache.answers(configs, configs))
    rows = []
    for point, seconds in zip(found, rounds_s, strict=True):
        memory = memories.of(point.config)
        predicted = None if memory is None else speed_of(memory, hardware)
        assert predicted is not None, f"{point.label} was not predicted"
        tokens = (point.config.batch.global_size or 0) * point.config.batch.seq
        rows.append(Compared(name, point.label, predicted, seconds, tokens))
    return rows


# ---- report ----------------------------------------------------------------------------------------------------------


def tau(rows: Sequence[Compared]) -> tuple[float, int]:
    """Kendall's tau of the predicted order, over the pairs of one space whose measured ranges do not overlap, and the
    number of these pairs."""
    right = wrong = 0
    for one, other in combinations(rows, 2):
        if one.space != other.space:
            continue
        mine, theirs = ([row.per_token(seconds) for seconds in row.rounds] for row in (one, other))
        if max(mine) < min(theirs) or max(theirs) < min(mine):
            is_faster = one.per_token(one.predicted.time.total_s) < other.per_token(other.predicted.time.total_s)
            agrees = is_faster == (statistics.median(mine) < statistics.median(theirs))
            right, wrong = right + agrees, wrong + (not agrees)
    return (right - wrong) / max(right + wrong, 1), right + wrong


class Regret(NamedTuple):
    """What `choose` would take in a space; by how much more time a token takes than in the best point; the spread of
    the rounds (most / least - 1, median over the points); and whether another point is faster in all rounds."""

    label: str
    slower: float
    spread: float
    is_beaten: bool


def regret(rows: Sequence[Compared]) -> Regret:
    """See [Note: choose in hindsight]."""
    ranked = sorted(rows, key=lambda row: row.per_token(row.predicted.time.total_s))
    fastest = ranked[0].per_token(ranked[0].predicted.time.total_s)
    near = [row for row in ranked if NEAR * row.per_token(row.predicted.time.total_s) <= fastest][:RUNS]
    chosen = min(near, key=lambda row: row.per_token(row.rounds[0]))

    def later(row: Compared) -> float:
        return row.per_token(statistics.median(row.rounds[1:] or row.rounds))

    spread = statistics.median(max(row.rounds) / min(row.rounds) - 1 for row in rows)
    fastest_round = chosen.per_token(min(chosen.rounds))
    is_beaten = any(row.per_token(max(row.rounds)) < fastest_round for row in rows)
    return Regret(chosen.label, later(chosen) / min(map(later, rows)) - 1, spread, is_beaten)


def report(rows: Sequence[Compared], seconds: float) -> list[str]:
    errors = sorted(abs(row.error) for row in rows)
    of_order, pairs = tau(rows)
    bias = statistics.median(row.error for row in rows)
    lines = [
        "# Predicted and measured step times on CPU ranks",
        "",
        f"`python benchmarks/predicted_speed.py --write`, {date.today()}, {cpu_name()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {seconds:.0f} s",
        "",
        f"- {len(rows)} points in {len({row.space for row in rows})} spaces: median error "
        f"{statistics.median(errors):.1%}, worst {errors[-1]:.1%}, median with its sign {bias:+.1%}",
        f"- order: Kendall's tau {of_order:.2f} over the {pairs} pairs of a space whose measured ranges do not overlap",
    ]
    spaces = {space: [row for row in rows if row.space == space] for space in dict.fromkeys(row.space for row in rows)}
    regrets = {space: regret(of_space) for space, of_space in spaces.items()}
    within = sum(one.slower <= ALLOWED_REGRET for one in regrets.values())
    unbeaten = sum(not one.is_beaten for one in regrets.values())
    lines += [
        f"- choose, with at most {RUNS} runs: no point is faster in all rounds in {unbeaten} of {len(regrets)} spaces; "
        f"by medians within {ALLOWED_REGRET:.0%} of the best in {within}",
        "",
        "| space | points | chosen | slower than the best | beaten | spread of the rounds | error | tau (pairs) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for space, of_space in spaces.items():
        chosen = regrets[space]
        median = statistics.median(abs(row.error) for row in of_space)
        order, count = tau(of_space)
        beaten = "yes" if chosen.is_beaten else "no"
        lines.append(
            f"| {space} | {len(of_space)} | {chosen.label} | {chosen.slower:.1%} | {beaten} | {chosen.spread:.1%} | "
            f"{median:.1%} | {order:.2f} ({count}) |"
        )
    lines += [
        "",
        "| space | point | predicted ms | measured ms | least | most | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = min(row.rounds), max(row.rounds)
        numbers = [1e3 * one for one in (row.predicted.time.total_s, row.measured_s, low, high)]
        lines.append(
            f"| {row.space} | {row.label} | {' | '.join(f'{one:.1f}' for one in numbers)} | {row.error:+.1%} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--spaces", type=int, default=len(SPACES), help="only the first so many")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    asked = parser.parse_args()
    began, rows = time.monotonic(), []
    for name, line in list(SPACES.items())[: asked.spaces]:
        rows += compared(name, line, asked.rounds)
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
