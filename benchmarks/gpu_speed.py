"""Compares predicted with measured step times of ZeRO stages on the GPUs of this machine.

`python benchmarks/gpu_speed.py [--precision fp32|bf16] [--most-percent N] [sizes]`. Needs torch, numpy and safetensors.
The parts of a step are measured as `calibrate` measures them (zero_runtime/predict/timing/), and what a real step takes
in addition to them from a step of stage 2; so the comparison is that of stages 0, 1 and 3. Exit codes: 0 all errors are
at most N %, 1 one is larger, 2 no CUDA device. `--device cpu` tries the command out on CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpt import Gpt, GptSize, draw_tokens, loss_of  # noqa: E402
from zero_runtime.accounting import unit_sizes  # noqa: E402
from zero_runtime.activations.rule import RecomputeRule  # noqa: E402
from zero_runtime.collectives import Collectives  # noqa: E402
from zero_runtime.initial_values import parameters_on_meta  # noqa: E402
from zero_runtime.optim.configs import AdamWConfig  # noqa: E402
from zero_runtime.phase_clock import PhaseClock  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.predict.memory.activation_count import Trace  # noqa: E402
from zero_runtime.predict.memory.counted_unit import CountRules  # noqa: E402
from zero_runtime.predict.timing.costs import StepCosts  # noqa: E402
from zero_runtime.predict.timing.machine_timer import Repeated, time_copies, time_links, time_updates  # noqa: E402
from zero_runtime.predict.timing.segment_timer import SegmentTimer, typical  # noqa: E402
from zero_runtime.predict.timing.segments import Key  # noqa: E402
from zero_runtime.predict.timing.step_time import step_time, surplus_s  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402
from zero_runtime.unit_planner import UnitRules  # noqa: E402
from zero_runtime.watch.watch import RankWatch  # noqa: E402
from zero_runtime.world import WorldSettings, join_world, leave_world  # noqa: E402

STAGES = (0, 1, 2, 3)
ANCHOR = 2  # the stage whose step shows what real steps take in addition
SIZES = [1 << power for power in (14, 18, 20, 22, 24, 26)]  # bytes of the tensors of collectives and copies
UPDATED = [1 << power for power in (14, 18, 20, 22, 24)]  # elements of the shards that are updated
TURNS, WARM_UP, STEPS = 5, 3, 3  # turns of the stages, those before, and the timed steps of a stage in a turn
SEGMENTS = 10  # timed forwards and backwards of the model alone
LR = 1e-4
OPTIMIZER = AdamWConfig()


@dataclass(frozen=True)
class Pair:
    """The predicted and the measured seconds of a step."""

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


def report(pairs: Mapping[int, Pair], most: float) -> tuple[list[str], bool]:
    """A line for each stage, and whether all errors but that of the anchor, which is none, are at most `most`."""
    lines = ["stage  predicted ms  measured ms  error"]
    held = True
    for stage, pair in pairs.items():
        numbers = f"{stage:5}  {1e3 * pair.predicted_s:12.2f}  {1e3 * pair.measured_s:11.2f}  {pair.error:+.1%}"
        lines.append(numbers + ("  (its surplus is measured)" if stage == ANCHOR else ""))
        held = held and (stage == ANCHOR or abs(pair.error) <= most)
    return lines, held


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def measured(size: GptSize, kind: MixedPrecision, device: torch.device, watch: RankWatch | None) -> dict[int, Pair]:
    """By stage the predicted and the measured time, on this rank together with all others."""
    collectives = Collectives(1, PhaseClock(device), watch)
    repeated = Repeated(collectives, device)
    tokens = draw_tokens(size, seed=0).to(device)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    marks, segments = _segments(size, kind, repeated, ids, labels)
    costs = {shards: _costs(shards, kind, repeated, device, watch) for shards in {1, collectives.world}}
    runtimes = {stage: _runtime(size, stage, kind, device, watch) for stage in STAGES}
    try:
        steps = {stage: repeated.mean(own) for stage, own in _steps_s(runtimes, ids, labels, repeated).items()}
        predictions = {
            stage: _Prediction(runtime, collectives.world, marks, segments) for stage, runtime in runtimes.items()
        }
    finally:
        for runtime in reversed(runtimes.values()):
            runtime.close()
    world = collectives.world
    collectives.free()
    more_s = predictions[ANCHOR].surplus(steps[ANCHOR], costs[world])
    of_stage = {stage: costs[ZeroPlan.from_stage(stage).shard_count(world)] for stage in STAGES}
    return {
        stage: Pair(predictions[stage].seconds(replace(of_stage[stage], surplus_s=more_s)), steps[stage])
        for stage in STAGES
    }


def _segments(
    size: GptSize, kind: MixedPrecision, repeated: Repeated, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[list[Key], list[float]]:
    """The marks of a micro-batch, and the seconds of the model's own work between them."""
    with parameters_on_meta():
        model = Gpt(size)

    def mean_loss(built: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(built, ids, labels) / labels.numel()

    timer = SegmentTimer(model, UnitRules(kind), RecomputeRule("none"), [ids, labels], mean_loss)
    timer.step()  # which may compile and allocate
    steps = []
    for _ in range(SEGMENTS):
        repeated.mean(0.0)  # ranks begin together
        steps.append(timer.step())
    marks = steps[0][0]
    seconds = typical(steps).map(repeated.mean).in_order(marks)
    assert seconds is not None
    return marks, seconds


def _costs(
    shards: int, kind: MixedPrecision, repeated: Repeated, device: torch.device, watch: RankWatch | None
) -> StepCosts:
    """The costs of a step whose states are sharded over so many ranks."""
    collectives = Collectives(shards, PhaseClock(device), watch)
    try:
        links = time_links(repeated, collectives, device, SIZES)
    finally:
        collectives.free()
    settings = RuntimeSettings(clip_norm=1.0, watch=watch)
    return StepCosts(
        **{name: getattr(links, name) for name in ("gather", "reduce", "replica", "control_s")},
        copy=time_copies(repeated, device, SIZES),
        update=time_updates(repeated, device, ZeroPlan.from_stage(0), kind, OPTIMIZER, settings, UPDATED),
        compute_slowdown=links.compute_slowdown,
        link_slowdown=links.link_slowdown,
    )


def _runtime(
    size: GptSize, stage: int, kind: MixedPrecision, device: torch.device, watch: RankWatch | None
) -> ZeroRuntime:
    with parameters_on_meta():
        model = Gpt(size)
    settings = RuntimeSettings(clip_norm=1.0, watch=watch)
    return ZeroRuntime(model, ZeroPlan.from_stage(stage), kind, OPTIMIZER, settings, device)


def _steps_s(
    runtimes: Mapping[int, ZeroRuntime], ids: torch.Tensor, labels: torch.Tensor, repeated: Repeated
) -> dict[int, float]:
    """The median times of a step that follows others, as in training. The stages take turns: a machine that becomes
    faster while it warms up, or slower, does so for all of them."""

    def step(runtime: ZeroRuntime) -> None:
        tokens = runtime.sum_over_ranks(labels.numel())
        runtime.backward(loss_of(runtime.model, ids, labels) / tokens)
        runtime.step(LR)

    times: dict[int, list[float]] = {stage: [] for stage in runtimes}
    for turn in range(WARM_UP + TURNS):
        for stage, runtime in runtimes.items():
            step(runtime)  # whose allocations and caches the timed ones find
            own = [repeated.once(partial(step, runtime)) for _ in range(STEPS)]
            times[stage] += own if turn >= WARM_UP else []
    return {stage: statistics.median(own) for stage, own in times.items()}


class _Prediction:
    """What predicts the step of a runtime, without the costs."""

    def __init__(self, runtime: ZeroRuntime, world: int, marks: list[Key], segments: list[float]) -> None:
        plan, by_messages = runtime.plan, runtime.device.type == "cpu"
        shards = plan.shard_count(world)
        self._trace = Trace(marks=[(0, kind, unit) for kind, unit in marks])
        self._units = list(zip(unit_sizes(runtime), (unit.precision for unit in runtime.units), strict=True))
        self._rules = CountRules(plan, shards, world // shards, 1, OPTIMIZER.state_bytes, by_messages=by_messages)
        self._segments = segments

    def seconds(self, costs: StepCosts) -> float:
        parts = step_time(self._trace, self._units, self._rules, self._segments, costs, prefetch=1)
        return parts.total_s

    def surplus(self, step_s: float, costs: StepCosts) -> float:
        return surplus_s(step_s, self._trace, self._units, self._rules, self._segments, costs, prefetch=1)


def rank_main(rank: int, world: int, folder: str, size: GptSize, kind: MixedPrecision, device_type: str) -> None:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with join_world(f"file://{folder}/world", rank, world, device, WorldSettings()) as watch:
        pairs = measured(size, kind, device, watch)
        if rank == 0:
            Path(folder, "found").write_text(json.dumps({stage: asdict(pair) for stage, pair in pairs.items()}))
    leave_world()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--most-percent", type=float, default=25.0, help="the largest error of a step's time")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for name, value in asdict(GptSize(24, 1024, 16, 50304, 1024, 8)).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_speed.py: expected a CUDA device, found none; nothing was run", file=sys.stderr)
        return 2
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = GptSize(args.layers, args.width, args.heads, args.vocab, args.seq, args.micro)
    world = torch.cuda.device_count() if args.device == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (world, folder, size, MixedPrecision(args.precision), args.device), nprocs=world)
        found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
    lines, held = report({int(stage): Pair(**pair) for stage, pair in found.items()}, args.most_percent / 100)
    print("\n".join(lines))
    verdict = "all errors are" if held else "expected all errors to be"
    print(f"{world} ranks, {args.precision}: {verdict} at most {args.most_percent:g} %")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
