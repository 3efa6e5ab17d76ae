"""Compares the predicted peak memory of a training step with the bytes that torch's allocator counts on CPU ranks.

`python benchmarks/predicted_peaks.py [--count N] [--seed N]`; writes benchmarks/results/. The combinations of settings
are chosen by `covering` from the seed: every two values of different settings that are allowed together occur in one;
and those of OUTER.
The prediction comes from the configuration alone.

[Note: what is compared]
Measured: the bytes of the runtime's tensors before a step (a census), plus the most that torch's allocator had given
out above that during the step. Predicted: `StepMemory.peak`, plus the host buffers of offload, which are CPU memory
here. Not in either: token ids, labels and buffers of the model, which exist before the step and need no prediction.
Not predicted: memory that kernels allocate and free inside one operation, storages of one number, and the CPU's random
state that each recomputing block keeps.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import pickle
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402
from orchestrator.config.comm import Comm, CommKind  # noqa: E402
from orchestrator.config.optimizer import Optimizer  # noqa: E402
from orchestrator.config.schema import (  # noqa: E402
    Device,
    Loss,
    LossKind,
    Model,
    ResolvedBatch,
    ResolvedResources,
    RunConfig,
)
from orchestrator.config.state_groups import Offload, Precision, Zero  # noqa: E402
from orchestrator.wings.predict import memory_cache  # noqa: E402
from orchestrator.wings.predict.activations import Tracing  # noqa: E402
from orchestrator.wings.predict.shapes import units_of as shapes_of  # noqa: E402
from orchestrator.wings.predict.step import ConfigMemory, units_of  # noqa: E402
from orchestrator.wings.predict.transport import SHM, transport  # noqa: E402
from orchestrator.worker.setup import build_deferred  # noqa: E402
from orchestrator.workloads.models import token_losses  # noqa: E402
from zero_runtime.activations.recompute import Recomputation  # noqa: E402
from zero_runtime.activations.rule import RecomputeRule  # noqa: E402
from zero_runtime.census import take_census  # noqa: E402
from zero_runtime.offload.copy_streams import HoldingCopies  # noqa: E402
from zero_runtime.offload_plan import Tier  # noqa: E402
from zero_runtime.plan import OuterSharding  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.predict.memory.activation_count import LinearTrace, Trace  # noqa: E402
from zero_runtime.predict.memory.counted_unit import CountRules  # noqa: E402
from zero_runtime.predict.memory.step_memory import StepMemory, StepPeaks, replay_states  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402
from zero_runtime.tensor_source import TensorSource  # noqa: E402
from zero_runtime.world import cpu_backend  # noqa: E402

WIDE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8}
MODELS = {
    "llama": {**WIDE, "num_hidden_layers": 6, "num_key_value_heads": 4},
    "gpt2": {"vocab_size": 512, "n_embd": 128, "n_layer": 6, "n_head": 4, "n_positions": 256},
    "gpt_neox": {**WIDE, "num_hidden_layers": 6},
}
PRECISIONS = {
    "fp32": Precision(MixedPrecision(), compute="fp32"),
    "bf16": Precision(MixedPrecision("bf16"), compute="bf16"),
    "bf16 in fp32": Precision(MixedPrecision("bf16"), compute="fp32"),
    "bf16_pure": Precision(MixedPrecision("bf16", "bf16", "bf16", "bf16"), compute="bf16"),
}
# Tiers of the parameters and of the optimizer. Host: separate memory, by plain copies within the CPU's.
OFFLOADS = {
    "none": (Tier.DEVICE, Tier.DEVICE),
    "optimizer nvme": (Tier.DEVICE, Tier.NVME),
    "all nvme": (Tier.NVME, Tier.NVME),
    "optimizer host": (Tier.DEVICE, Tier.HOST),
    "all host": (Tier.HOST, Tier.HOST),
}
SEQ, TILE, CLIP = 64, 48, 1.0
COMM = os.environ.get("ZERO_LAB_TEST_COMM", "auto")  # as in tests/harness/ranks.py
WARM_UP = 2
ALLOWED_MEDIAN, ALLOWED_WORST = 0.01, 0.03


class Case(NamedTuple):
    """One combination. micro: sequences of a micro-batch. group: ranks that shard; 0: all. outer: the outer sharding
    of the groups, of OUTER alone."""

    model: str
    world: int
    stage: int
    precision: str
    accumulation: int
    recompute: str
    micro: int
    loss: str
    offload: str
    prefetch: int
    group: int
    outer: OuterSharding | None = None


VALUES = Case(
    *(tuple(MODELS), (1, 2, 4), (0, 1, 2, 3), tuple(PRECISIONS), (1, 2, 4)),  # type: ignore[arg-type]
    *(("none", "full", "by_operation", "every_nth"), (1, 2, 5), ("full", "tiled"), tuple(OFFLOADS), (0, 1, 2), (0, 2)),  # type: ignore[arg-type]
)


def allowed(case: Case) -> bool:
    """Whether the configuration accepts the combination: parameters are offloaded only if they are sharded, and groups
    shard something."""
    moves_params = OFFLOADS[case.offload][0] is not Tier.DEVICE
    return not (moves_params and case.stage < 3) and not (case.group and (case.world < 4 or not case.stage))


def covering(count: int, seed: int) -> list[Case]:
    """`count` combinations. Each is the one, of some drawn at random, whose pairs of values occurred least so far."""
    draw = random.Random(seed)
    seen: Counter[tuple[Any, ...]] = Counter()
    chosen: list[Case] = []
    while len(chosen) < count:
        drawn = [one for one in (_drawn(draw) for _ in range(300)) if allowed(one) and one not in chosen]
        chosen.append(max(drawn, key=lambda one: sum(1 / (1 + 9 * seen[pair]) for pair in pairs(one))))
        seen.update(pairs(chosen[-1]))
    return chosen


def _drawn(draw: random.Random) -> Case:
    return Case(*(draw.choice(values) for values in VALUES if values is not None))  # type: ignore[call-overload]


def pairs(case: Case) -> set[tuple[Any, ...]]:
    return set(itertools.combinations([one for one in case._asdict().items() if one[1] is not None], 2))


# With outer sharding: both kinds, in groups of one and of two ranks, in every precision.
OUTER = [
    Case("llama", 2, 3, "bf16", 2, "none", 1, "full", "none", 1, 1, "optim"),
    Case("gpt2", 2, 3, "fp32", 1, "full", 2, "tiled", "none", 0, 1, "optim"),
    Case("llama", 4, 3, "bf16", 1, "full", 2, "full", "none", 1, 2, "optim"),
    Case("gpt_neox", 4, 3, "fp32", 2, "none", 2, "full", "none", 2, 2, "optim"),
    Case("gpt2", 4, 3, "bf16 in fp32", 4, "by_operation", 1, "tiled", "none", 1, 2, "optim"),
    Case("llama", 4, 3, "bf16_pure", 2, "every_nth", 5, "full", "none", 0, 2, "optim"),
    Case("gpt_neox", 4, 3, "bf16", 2, "none", 2, "full", "optimizer nvme", 1, 2, "optim"),
    Case("gpt2", 4, 3, "bf16", 1, "none", 2, "tiled", "optimizer host", 1, 2, "optim"),
]


def config_of(case: Case, folder: str = ".") -> RunConfig:
    params, optimizer = OFFLOADS[case.offload]
    return RunConfig(
        model=Model(case.model, case.model, MODELS[case.model]),
        zero=Zero(case.stage, case.prefetch, case.group or None, case.outer),
        precision=PRECISIONS[case.precision],
        batch=ResolvedBatch(
            micro=case.micro,
            accumulation=case.accumulation,
            global_size=case.micro * case.accumulation * case.world,
            seq=SEQ,
        ),
        resources=ResolvedResources(Device.cpu, ranks=case.world, threads=1),
        recompute=RecomputeRule(case.recompute),  # type: ignore[arg-type]
        loss=Loss(LossKind(case.loss), TILE),
        offload=Offload(params, optimizer, folder=folder),
        optimizer=Optimizer(),
        comm=Comm(CommKind(COMM)),
    )


# ---- prediction ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Bytes of a rank. between: before and after a step. peak: the most in a step. when: the worst moment in words."""

    between: int
    peak: int
    when: str


class Predictions:
    """Predicts combinations; traces that several share are made once."""

    def __init__(self) -> None:
        self._traces: dict[str, Trace] = {}

    def trace(self, config: RunConfig) -> Trace:
        key = memory_cache.activations_key(config)
        if key not in self._traces:
            traced = Tracing(config).one(config.batch.micro)
            assert not isinstance(traced, dict), traced
            self._traces[key] = traced[0].trace
        return self._traces[key]

    def of(self, case: Case) -> Predicted:
        memory = self.memory(case)
        peak, host = memory.peak(case.micro), memory.away().host
        assert peak is not None
        return Predicted(memory.parts[0].peaks.between_steps + host, peak.total + host, peak.when)

    def memory(self, case: Case) -> ConfigMemory:
        config = config_of(case)
        linear = LinearTrace.of_one(case.micro, self.trace(config))
        shapes = shapes_of(config)
        # Host memory is separate from a GPU's memory; the plain copies of a CPU rank behave in the same way.
        on_host = config.offload.plan().uses_host
        units = units_of(_on_cuda(config) if on_host else config, shapes)
        plan, world = config.zero.plan, case.world
        shards = plan.shard_count(world)
        rules = CountRules(
            *(plan, shards, world // shards, case.accumulation, shapes["state_bytes"], world > 1),
            reads_peers=transport(config) == SHM,
        )
        states = replay_states(linear.trace, units, rules, prefetch=case.prefetch)
        names = [unit["name"] for unit in shapes["units"]]
        part = StepMemory(linear, StepPeaks.of(linear, states, names))
        largest = tuple(max(math.prod(shape) for _, shape in unit["shapes"]) for unit in shapes["units"])
        return ConfigMemory(config, units, rules, (part,), largest_numels=largest)


def _on_cuda(config: RunConfig) -> RunConfig:
    return replace(config, resources=replace(config.resources, device=Device.cuda))


# ---- measurement -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Bytes of a rank. between: of its tensors before a step. peak: the most in a step. left: what the step left."""

    between: int
    peak: int
    left: int


Measure = Callable[[Sequence[Case]], list[Any]]  # of a rank, in the order of the cases


def measured(cases: Sequence[Case]) -> list[Measured]:
    """On this rank of a process group, in a process that ends afterwards: it collects no garbage."""
    gc.disable()  # a collection frees cycles at times that depend on what else has run
    return [_measured(case) for case in cases]


def _measured(case: Case) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        runtime = made(config_of(case, folder))
        for _ in range(WARM_UP):
            step(runtime, case)
        census = take_census(runtime)
        highest, left = allocated(lambda: step(runtime, case))
        runtime.close()
    between = census.states + census.host
    return Measured(between, between + highest, left)


def step(runtime: ZeroRuntime, case: Case) -> None:
    ids = torch.zeros((case.micro, SEQ), dtype=torch.int64)
    tokens = runtime.sum_over_ranks(ids.numel())
    for _ in range(case.accumulation):
        loss = token_losses(runtime.model, ids, ids, config_of(case).loss.tile_tokens) / tokens
        runtime.backward(loss)
        del loss
    runtime.step(1e-3)


def made(config: RunConfig, source: Callable[[nn.Module], TensorSource] | None = None) -> ZeroRuntime:
    """The runtime of a rank. source: of the weights, for the model; None draws them."""
    model, initialise = build_deferred(config)
    Recomputation(model, config.recompute)
    offload = config.offload.plan()
    settings = RuntimeSettings(
        micro_batches=config.batch.accumulation or 1,
        clip_norm=CLIP,
        prefetch=config.zero.prefetch,
        initialise=initialise,
        weights=None if source is None else source(model),
        offload=replace(offload, copies=HoldingCopies) if offload.uses_host else offload,
    )
    device = torch.device("cpu")
    return ZeroRuntime(model, config.zero.plan, config.precision.mixed, config.optimizer.rule, settings, device)


def allocated(function: Any) -> tuple[int, int]:
    """The most bytes that torch's CPU allocator gave out during a call, and those at its end, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    assert record.profiler is not None
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    running = list(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    return max(running, default=0), running[-1] if running else 0


def rank_main(rank: int, world: int, folder: str, cases: Sequence[Case], measure: Measure) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a census then visits only what this rank has created
    store = dist.FileStore(str(Path(folder, f"store{world}")), world)
    dist.init_process_group(cpu_backend(COMM, world), store=store, rank=rank, world_size=world)
    Path(folder, f"{world}-{rank}").write_bytes(pickle.dumps(measure(cases)))
    dist.barrier()
    dist.destroy_process_group()


def measured_in_worlds(cases: Sequence[Case], measure: Measure) -> dict[Case, list[Any]]:
    """By combination what all ranks measure. Ranks are forked from a process that has imported the libraries."""
    torch.multiprocessing.set_forkserver_preload(["benchmarks.predicted_peaks", *(_module(name) for name in MODELS)])
    found: dict[Case, list[Any]] = {}
    for world in VALUES.world:  # type: ignore[attr-defined]
        own = [case for case in cases if case.world == world]
        if not own:
            continue
        with tempfile.TemporaryDirectory() as folder:
            args = (world, folder, own, measure)
            torch.multiprocessing.start_processes(rank_main, args, nprocs=world, start_method="forkserver")
            ranks = [pickle.loads(Path(folder, f"{world}-{rank}").read_bytes()) for rank in range(world)]
        found |= {case: [rank[place] for rank in ranks] for place, case in enumerate(own)}
    return found


def _module(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


# ---- report ----------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    case: Case
    predicted: Predicted
    ranks: list[Measured]

    @property
    def error(self) -> float:
        """Of the peak, on the rank where it is largest: predicted / measured - 1."""
        return max((self.predicted.peak / one.peak - 1 for one in self.ranks), key=abs)

    @property
    def differences_between(self) -> set[int]:
        """Bytes between steps on each rank: predicted - measured."""
        return {self.predicted.between - one.between for one in self.ranks}


def table(rows: Sequence[Compared]) -> list[str]:
    lines = [
        f"| {' | '.join(Case._fields)} | between steps (predicted - measured) | peak | error of the peak | peak is |",
        "|" + "---|" * (len(Case._fields) + 4),
    ]
    for row in sorted(rows, key=lambda one: -abs(one.error)):
        off = ", ".join(f"{one:+,}" for one in sorted(row.differences_between))
        cells = [*map(str, row.case), f"{row.ranks[0].between:,} ({off})", f"{row.ranks[0].peak:,}"]
        lines.append(f"| {' | '.join(cells)} | {100 * row.error:+.2f} % | {row.predicted.when} |")
    return lines


def summary(rows: Sequence[Compared], seed: int) -> dict[str, Any]:
    errors = [abs(row.error) for row in rows]
    draw = random.Random(seed)
    everything = set().union(*(pairs(one) for one in (_drawn(draw) for _ in range(20_000)) if allowed(one)))
    met = set().union(*(pairs(row.case) for row in rows))
    return {
        "combinations": len(rows),
        "pairs": len(met),
        "pairs allowed": len(everything | met),
        "median": statistics.median(errors),
        "worst": max(errors),
        "too low": sum(row.error < 0 for row in rows),
        "exact between steps": sum(row.differences_between == {0} for row in rows),
    }


def report(rows: Sequence[Compared], facts: Mapping[str, Any], seconds: float) -> list[str]:
    reached = facts["median"] <= ALLOWED_MEDIAN and facts["worst"] <= ALLOWED_WORST
    return [
        f"# Predicted and allocated peak memory of a training step, {date.today()}",
        "",
        f"{cpu_name()}, {os.cpu_count()} cores; torch {torch.__version__}, transformers {_version('transformers')}, "
        f"Python {platform.python_version()}; AdamW, clipping, {SEQ} tokens a sequence, tiles of {TILE}; the step "
        f"after {WARM_UP}; {seconds:.0f} seconds. Sizes are in bytes.",
        "",
        f"Command: `{' '.join(['python benchmarks/predicted_peaks.py', *sys.argv[1:]])}`",
        "",
        f"{facts['combinations']} combinations, which contain {facts['pairs']} of the {facts['pairs allowed']} "
        f"allowed pairs of values. Error of the peak: median {100 * facts['median']:.2f} %, worst "
        f"{100 * facts['worst']:.2f} %; the prediction is too low in {facts['too low']}. Bytes between steps are exact "
        f"in {facts['exact between steps']}. Goal (median at most {100 * ALLOWED_MEDIAN:.0f} %, worst at most "
        f"{100 * ALLOWED_WORST:.0f} %): {'reached' if reached else 'NOT reached'}.",
        "",
        *table(rows),
    ]


def _version(library: str) -> str:
    from importlib.metadata import version

    return version(library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=72, help="combinations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.monotonic()
    cases = [*covering(args.count, args.seed), *OUTER]
    ranks = measured_in_worlds(cases, measured)
    predictions = Predictions()
    rows = [Compared(case, predictions.of(case), ranks[case]) for case in cases]
    facts = summary(rows, args.seed)
    lines = report(rows, facts, time.monotonic() - start)
    print("\n".join(lines))
    stem = ROOT / "benchmarks" / "results" / f"predicted_peaks_cpu_{date.today()}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    plain = [{**row.case._asdict(), **asdict(row.predicted), "measured": list(map(asdict, row.ranks))} for row in rows]
    stem.with_suffix(".json").write_text(json.dumps({"summary": facts, "rows": plain}, indent=1) + "\n")
    print(f"\nwritten: {stem.relative_to(ROOT)}.md")


if __name__ == "__main__":
    main()
