"""What a rank sends in a step in theory, in elements and in words. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from orchestrator.config.schema import MeasureKind
from orchestrator.wings.predict.step import ConfigMemory, Units
from orchestrator.wings.predict.tensor_messages import words
from zero_runtime.optim.matrix_owners import sent_elements
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.predict.messages import (
    CollectiveCounts,
    collective_elements,
    collective_formula,
    gathered,
    reduced,
    signs_bytes,
)
from zero_runtime.wire import EXACT


def theory_of(memory: ConfigMemory, *, updates: int, unread: Collection[int]) -> dict[str, Any]:
    """Of one steady step on rank 0. updates: steps of the optimizer so far. unread: the places of the frozen units that
    no backward reads, such as an embedding before the first trained parameter."""
    config, ranks = memory.config, memory.config.data_ranks
    plan, wire, trains = config.zero.plan, config.zero.wire, config.measure.kind is not MeasureKind.eval
    shards, group_ranks = plan.shard_count(ranks), plan.group_ranks(ranks)
    counts = memory.collective_counts() if trains else CollectiveCounts(int(not plan.keeps_full_params), 0)
    units = [(size, kind) for size, kind in memory.units if size.trainable == trains]

    def elements(numel: int) -> int:
        return collective_elements(counts, numel, world=ranks, shard_count=group_ranks)

    theory = elements(sum(_counted(size.numel, kind) for size, kind in units))
    text = collective_formula(counts, world=ranks, shard_count=group_ranks)
    padding = elements(sum(_counted(size.padded_numel, kind) for size, kind in units)) - theory
    if config.optimizer.rule.compresses_in(updates):
        theory, padding = _sign_elements(memory, units, counts), 0
        text = f"{counts.gathers}Ψ·(N-1)/N gathered + bytes of the signs of the momentum"
    elif shards > 1 and wire != EXACT:
        theory, padding = _quantised_elements(memory, units, counts), 0
        text += ", a quantised element as its bytes"
    if trains and not plan.keeps_full_params:
        of_frozen, padding_of_frozen, frozen_text = _frozen_elements(memory, unread)
        theory, padding, text = theory + of_frozen, padding + padding_of_frozen, text + frozen_text
    if of_matrices := sent_elements(memory.matrices, 0):
        theory += of_matrices
        text += " + parts of matrices to their owners and back"
    if (tensor := memory.tensor_sent()).calls and trains:
        micro_batches = config.batch.accumulation
        theory += micro_batches * tensor.elements
        different = " (N: ranks with different batches)" if config.parallel.tp > 1 else ""
        text += f" + {micro_batches} x {words(config, tensor)}{different}"
    return {"theory": text, "theory_elements": theory, "padding_elements": padding}


def _frozen_elements(memory: ConfigMemory, unread: Collection[int]) -> tuple[int, int, str]:
    """The elements that a step gathers of frozen parameters, their padding, and the formula in words.

    A micro-batch gathers each unit in its forward, and in its backward if a gradient passes through the unit.
    """
    config, ranks = memory.config, memory.config.data_ranks
    plan, micro_batches = config.zero.plan, config.batch.accumulation
    group_ranks, total, sent, passed = plan.group_ranks(ranks), 0, 0, 0
    for place, (size, kind) in enumerate(memory.units):
        if size.trainable:
            continue
        gathers, held = micro_batches * (2 - (place in unread)), size.padded_numel // group_ranks
        one = gathered(config.zero.wire, plan, held, group_ranks, kind.stored_bytes, trainable=False)
        sent += gathers * one.elements
        total += gathers * _counted(size.numel, kind) * (group_ranks - 1)
        passed += size.numel * (place in unread)
    if not sent:
        return 0, 0, ""
    letter = "N" if group_ranks == ranks else "G"
    text = f" + {2 * micro_batches}Φ·({letter}-1)/{letter} (Φ frozen"
    text += f"; of {passed:,} half, which backward does not read" if passed else ""
    text += "; a code as its bytes" if any(kind.weights for _, kind in memory.units) else ""
    theory = sent if config.zero.wire.gather else total // group_ranks
    return theory, sent - theory, f"{text})"


def _counted(numel: int, kind: MixedPrecision) -> int:
    """Elements as the ledger counts them: of weights in codes it counts the bytes."""
    return numel if kind.weights is None else int(numel * kind.stored_bytes)


def _quantised_elements(memory: ConfigMemory, units: Units, counts: CollectiveCounts) -> int:
    """The elements of a step's collectives with padding, where a quantised element counts as its bytes."""
    zero, total = memory.config.zero, 0
    shards = zero.plan.shard_count(memory.config.data_ranks)
    for size, kind in units:
        shard = size.padded_numel // shards
        gather = gathered(zero.wire, zero.plan, shard, shards, kind.stored_bytes, trainable=True)
        itemsize = ITEMSIZE_BYTES[kind.reduce]
        reduction = reduced(zero.wire, shard, shards, memory.config.data_ranks // shards, itemsize)
        total += counts.gathers * gather.elements + counts.reductions * reduction.elements
    return total


def _sign_elements(memory: ConfigMemory, units: Units, counts: CollectiveCounts) -> int:
    """The elements that are gathered in a step, and the bytes of the signs that are averaged."""
    ranks = memory.config.data_ranks
    shards = memory.config.zero.plan.shard_count(ranks)
    gathers = sum(counts.gathers * (shards - 1) * (size.padded_numel // shards) for size, _ in units)
    return gathers + sum(signs_bytes(size.padded_numel, ranks) for size, _ in units)
