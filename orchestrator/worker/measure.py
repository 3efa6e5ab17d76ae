"""Turns one rank's readings into the result that users compare. Pure, except for reading the process's memory."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch

from orchestrator.rounds.recorded import Round
from orchestrator.wings.predict.tensor_messages import TensorSent
from zero_runtime import state_bytes as memory_model
from zero_runtime.accounting import (
    error_bytes,
    kept_bytes,
    predicted_offload_bytes,
    predicted_state_bytes,
    scratch_bytes,
    unit_sizes,
)
from zero_runtime.census import Census
from zero_runtime.ledger import Ledger
from zero_runtime.optim.matrix_owners import owned_matrices, sent_elements
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.wire import EXACT, gathered, reduced, signs_bytes

NOTHING_SENT = TensorSent()
PHASES = ("data", "forward", "backward", "communication_exposed", "optimizer", "other")


@dataclass
class Readings:
    """The readings of one rank during one run."""

    step_s: list[float] = field(default_factory=list)
    phases_s: list[dict[str, float]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    census: Census | None = None
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes by component and dtype, audited
    activations_bytes: int = 0
    validation_loss: float | None = None
    peaks: dict[str, int | None] | None = None  # of training, read before anything else was done

    def add_step(self, phases_s: dict[str, float]) -> float:
        """Adds a step by the seconds of its phases. Returns its seconds."""
        self.phases_s.append(phases_s)
        self.step_s.append(sum(phases_s.values()))
        return self.step_s[-1]


def memory_now(device: torch.device) -> tuple[str, float]:
    """(kind, MiB) of this process: ("allocated", peak so far) on CUDA, ("rss", current value) on a CPU."""
    if device.type == "cuda":
        return "allocated", torch.cuda.max_memory_allocated() / 2**20
    return "rss", psutil.Process().memory_info().rss / 2**20


def peaks(device: torch.device) -> dict[str, int | None]:
    """Peak memory of this process so far, in bytes."""
    on_cuda = device.type == "cuda"
    return {
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_cuda else None,
        # How often the allocator had to free its cache and retry: the run fits in memory, but slowly.
        "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if on_cuda else None,
    }


def model_states(runtime: ZeroRuntime, measured: Mapping[str, int | None]) -> dict[str, Any]:
    """Model states by component: bytes on one rank, predicted and, if available, measured."""
    predicted, away = predicted_state_bytes(runtime), predicted_offload_bytes(runtime)
    micro_batches = runtime.settings.micro_batches
    return {
        "states": [
            {"component": name, "predicted_bytes": size, "measured_bytes": measured.get(name)}
            for name, size in asdict(predicted).items()
            if name != "padding"
        ],
        "formula": memory_model.formula(
            runtime.plan,
            runtime.precision,
            micro_batches=micro_batches,
            state_bytes=runtime.optimizer.config.state_bytes,
            error_bytes=error_bytes(runtime),
            kept_bytes=kept_bytes(runtime),
            matrix_state_bytes=runtime.optimizer.config.matrix_state_bytes,
            with_frozen=not all(unit.trainable for unit in runtime.units),
        )
        + (" less the offloaded shards" if away.host or away.scratch else ""),
        "scratch_bytes": scratch_bytes(runtime),
        "scratch_predicted_bytes": away.scratch,
        "host": {"predicted_bytes": away.host, "measured_bytes": measured.get("host")},
        "padding_bytes": predicted.padding,
    }


def memory(runtime: ZeroRuntime, worst: Mapping[str, int | None]) -> dict[str, Any]:
    """The memory part of the result, from the largest readings over the ranks (census, activations and `peaks`)."""
    states = model_states(runtime, worst)
    components = {"host", *(state["component"] for state in states["states"])}
    others = {key: value for key, value in worst.items() if key not in components}
    other = (others.pop("other") or 0) + (others.pop("buffers") or 0)
    return {**states, "other_tensors_bytes": other, **others}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (linear interpolation between order statistics)."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p10": _percentile(ordered, 0.10),
        "p90": _percentile(ordered, 0.90),
    }


def _percentile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def throughput(readings: Readings, tokens_per_step: int, world: int, warmup_steps: int) -> dict[str, Any]:
    """Time and tokens per second over the steps that count. Padding and masked tokens are counted too.

    A median is that of the rounds' medians; p10 and p90 are of all steps.
    """
    rounds = [one.step_ms for one in readings.rounds if one.used]
    rounds = rounds or [[seconds * 1e3 for seconds in readings.step_s[warmup_steps:]]]
    per_second = _of_rounds([[1e3 * tokens_per_step / ms for ms in steps] for steps in rounds])
    return {
        "tokens_per_second": per_second,
        "tokens_per_second_per_rank": per_second["median"] / world,
        "step_ms": _of_rounds(rounds),
        "steps_counted": sum(map(len, rounds)),
        "warmup_steps": warmup_steps,
    }


def _of_rounds(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    median = statistics.median(statistics.median(steps) for steps in rounds)
    return {**spread([value for steps in rounds for value in steps]), "median": median}


def phases_ms(readings: Readings, warmup_steps: int) -> dict[str, float]:
    """Median milliseconds of each phase of a step."""
    steps = readings.phases_s[warmup_steps:]
    return {name: statistics.median(step.get(name, 0.0) for step in steps) * 1e3 for name in PHASES}


def communication(
    runtime: ZeroRuntime,
    ledger: Ledger,
    *,
    reduces_at_boundary: bool,
    tensor: TensorSent = NOTHING_SENT,
    tensor_words: str = "",
) -> dict[str, Any]:
    """Communication volumes of one steady step on one rank, with the theoretical ones.

    tensor, tensor_words: what a rank sends to its tensor- or sequence-parallel group in one micro-batch, in theory.
    """
    world, shard_count = runtime.collectives.data_world, runtime.collectives.shard_count
    group_ranks = runtime.collectives.group_ranks
    if runtime.trains:
        counts = memory_model.CollectiveCounts.of(
            runtime.plan, runtime.settings.micro_batches, reduces_at_boundary=reduces_at_boundary
        )
    else:  # one gather in a forward
        counts = memory_model.CollectiveCounts(int(not runtime.plan.keeps_full_params), 0)
    sizes = [unit for unit in unit_sizes(runtime) if unit.trainable == runtime.trains]

    def elements(numel: int) -> int:
        return memory_model.collective_elements(counts, numel, world=world, shard_count=group_ranks)

    theory = elements(sum(unit.numel for unit in sizes))
    text = memory_model.collective_formula(counts, world=world, shard_count=group_ranks)
    padding = elements(sum(unit.padded_numel for unit in sizes)) - theory
    if runtime.optimizer.config.compresses_in(runtime.optimizer.updates):
        theory, padding = _sign_elements(runtime, counts), 0
        text = f"{counts.gathers}Ψ·(N-1)/N gathered + bytes of the signs of the momentum"
    elif shard_count > 1 and runtime.settings.wire != EXACT:
        theory, padding = _quantised_elements(runtime, counts), 0
        text += ", a quantised element as its bytes"
    if runtime.trains and not runtime.plan.keeps_full_params:
        of_frozen, padding_of_frozen, frozen_text = _frozen_elements(runtime)
        theory, padding, text = theory + of_frozen, padding + padding_of_frozen, text + frozen_text
    with_matrices = [unit for unit in runtime.units if unit.matrices]
    full_shapes = {name: split.shape for unit in with_matrices for name, split in unit.slices.splits.items()}
    matrices = owned_matrices([unit.layout for unit in with_matrices], shard_count, full_shapes)
    if of_matrices := sent_elements(matrices, runtime.collectives.shard_rank):
        theory += of_matrices
        text += " + parts of matrices to their owners and back"
    if tensor.calls:
        micro_batches = runtime.settings.micro_batches
        theory += micro_batches * tensor.elements
        different = " (N: ranks with different batches)" if runtime.collectives.tensor_degree > 1 else ""
        text += f" + {micro_batches} x {tensor_words}{different}"
    return {
        "data": {kind: asdict(volume) for kind, volume in sorted(ledger.data.items())},
        "theory": text,
        "theory_elements": theory,
        "padding_elements": padding,
        "control_bytes": ledger.control.bytes,
    }


def _frozen_elements(runtime: ZeroRuntime) -> tuple[int, int, str]:
    """The elements that a step gathers of frozen parameters, their padding, and the formula in words.

    A micro-batch gathers each unit in its forward, and in its backward if a gradient passes through the unit: not those
    before the first trained parameter, such as an embedding.
    """
    frozen = [unit for unit in runtime.units if not unit.trainable]
    wire, collectives, micro_batches = runtime.settings.wire, runtime.collectives, runtime.settings.micro_batches
    group_ranks, total, sent = collectives.group_ranks, 0, 0
    for unit in frozen:
        gathers = micro_batches * (1 + runtime.backward_reads(unit))
        held = unit.layout.padded_numel // group_ranks
        one = gathered(wire, runtime.plan, held, group_ranks, unit.param_dtype.itemsize, trainable=False)
        sent += gathers * one.elements
        total += gathers * unit.layout.numel * (group_ranks - 1)
    if not sent:
        return 0, 0, ""
    ranks = "N" if group_ranks == collectives.data_world else "G"
    text = f" + {2 * micro_batches}Φ·({ranks}-1)/{ranks} (Φ frozen"
    if passed := sum(unit.layout.numel for unit in frozen if not runtime.backward_reads(unit)):
        text += f"; of {passed:,} half, which backward does not read"
    theory = sent if wire.gather else total // group_ranks
    return theory, sent - theory, f"{text})"


def _quantised_elements(runtime: ZeroRuntime, counts: memory_model.CollectiveCounts) -> int:
    """The elements of a step's collectives with padding, where a quantised element counts as its bytes."""
    wire, collectives, total = runtime.settings.wire, runtime.collectives, 0
    groups = (collectives.shard_count, collectives.replica_count)
    for unit in (one for one in runtime.units if one.trainable):
        shard = unit.layout.shard_numel
        gather = gathered(wire, runtime.plan, shard, groups[0], unit.param_dtype.itemsize, trainable=True)
        reduction = reduced(wire, shard, *groups, unit.grad_dtype.itemsize)
        total += counts.gathers * gather.elements + counts.reductions * reduction.elements
    return total


def _sign_elements(runtime: ZeroRuntime, counts: memory_model.CollectiveCounts) -> int:
    """The elements that are gathered in a step, and the bytes of the signs that are averaged."""
    collectives, total = runtime.collectives, 0
    for unit in (one for one in runtime.units if one.trainable):
        total += counts.gathers * (collectives.shard_count - 1) * unit.layout.shard_numel
        total += signs_bytes(unit.layout.padded_numel, collectives.data_world)
    return total


def worst_of(per_rank: list[dict[str, int | None]]) -> dict[str, int | None]:
    """The largest value of each number over the ranks; None if no rank has one."""
    return {key: max((readings[key] for readings in per_rank), key=lambda value: value or 0) for key in per_rank[0]}
