"""The arithmetic of one row of `zlab fit`: each part of the peak with its closed form and its counted bytes. Pure.

The closed forms are those of zero_runtime/state_bytes.py (arXiv 1910.02054, section 3.1 and 5); the counted bytes come
from the replay of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from orchestrator.text.units import count, many, size
from orchestrator.wings.kinds.kind import is_causal, sample_of
from orchestrator.wings.predict.fit_rows import BACKWARD, BLOCKS, BUFFERS, INPUTS, OUTSIDE, STATES, Fit
from orchestrator.wings.predict.step import bytes_of_element, states_of, with_micro
from orchestrator.wings.predict.tensor_messages import words
from zero_runtime.plan import Partition
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.predict.memory.counted_unit import GATHERED, GRADS, OPTIMIZER, PARAMS, TRANSFERS, WHOLE_GRADS
from zero_runtime.predict.messages import collective_formula
from zero_runtime.state_bytes import BytesPerElement, Term
from zero_runtime.wire import EXACT


class Part(NamedTuple):
    """A part of the peak. arithmetic: how it comes about. expected: bytes by the closed form, padding included; None
    where there is none. counted: bytes at the worst moment."""

    name: str
    arithmetic: str
    expected: int | None
    counted: int


def walk(fit: Fit) -> list[Part]:
    """The parts of the peak in the order of a report. Their counted bytes add up to `fit.peak.total`."""
    return [*_states(fit), *_moving(fit), *_activations(fit)]


def psi(fit: Fit) -> int:
    """Ψ: the number of trained parameters."""
    return sum(unit.numel for unit, _ in fit.memory.units if unit.trainable)


def frozen(fit: Fit) -> int:
    """Φ: the number of frozen parameters."""
    return sum(unit.numel for unit, _ in fit.memory.units if not unit.trainable)


def letters(fit: Fit) -> str:
    """The letters of the closed forms with their numbers."""
    ranks, also = fit.config.data_ranks, frozen(fit)
    tp, full = fit.config.parallel.tp, fit.memory.full_numel(trainable=True)
    slice_of = f" in the slice of a rank, of {full:,} that {tp} ranks hold" if tp > 1 else ""
    text = f"Ψ = {psi(fit):,} trained parameters{slice_of}, N = {many(ranks, 'rank')}"
    text += " with different batches" if tp > 1 else ""
    sp = fit.config.parallel.sp
    text += f", each {sp} of which read the same sequences" if sp > 1 else ""
    group, outer = fit.config.zero.plan.group_ranks(ranks), fit.config.zero.outer_sharding
    shared = "the states" if outer is None else "the parameters"
    text += f", G = {group} of them that share one copy of {shared}" if 1 < group < ranks or outer else ""
    coded = [(unit.numel, kind) for unit, kind in fit.memory.units if kind.weights is not None]
    codes = f", {sum(numel for numel, _ in coded):,} of them in {coded[0][1].weights}," if coded else ""
    codes += f" {coded[0][1].stored_bytes} bytes each," if coded else ""
    return text + (f"; {also:,} frozen parameters{codes} are added to the closed form in bytes" if also else "")


def bytes_of_parameter(fit: Fit) -> dict[str, float]:
    """Bytes of a trained parameter by component in the largest unit, before they are sharded; without zeros."""
    config = fit.config
    of = BytesPerElement.of(config.zero.plan, kind_of(fit), config.batch.accumulation, **bytes_of_element(config))
    pairs = (("parameters", of.params), ("optimizer", of.optimizer), ("gradients", of.grads))
    sums = {name: float(sum(nbytes for nbytes, _ in terms)) for name, terms in pairs}
    return {name: nbytes for name, nbytes in sums.items() if nbytes}


def shard_count(fit: Fit) -> int:
    """The number of ranks that share one copy of the states: all N of them, or fewer (G)."""
    return fit.config.zero.plan.shard_count(fit.config.data_ranks)


def kind_of(fit: Fit) -> MixedPrecision:
    """The dtypes of the largest unit. Others may differ: precision.keep_dtype."""
    _, kind = max(fit.memory.units, key=lambda pair: (pair[0].trainable, pair[0].numel))
    return kind


def _states(fit: Fit) -> Iterator[Part]:
    config, states = fit.config, fit.peak.states
    expected, of_element = states_of(config, fit.memory.units), bytes_of_element(config)
    of = BytesPerElement.of(config.zero.plan, kind_of(fit), config.batch.accumulation, **of_element)
    for name, component, terms, closed in (
        (PARAMS, "params", of.params, expected.params),
        (OPTIMIZER, "optimizer", of.optimizer, expected.optimizer),
        (GRADS, "grads", of.grads, expected.grads),
    ):
        away = any(unit.is_away(component) for unit, _ in fit.memory.units)
        text = f"{_closed(fit, terms)}{', offloaded' if away else ''}"
        text += _of_matrices(fit, of_element["state_bytes"]) if name == OPTIMIZER else ""
        yield Part(STATES[name], text, closed, states.get(name, 0))


def _of_matrices(fit: Fit, state_bytes: float) -> str:
    """What the optimizer keeps less for the matrices that it updates whole."""
    own = fit.config.optimizer.rule.matrix_state_bytes
    if own is None:
        return ""
    part = f" / {shard_count(fit)}" if shard_count(fit) > 1 else ""
    elements = count(sum(matrix.numel for matrix in fit.memory.matrices))
    return f", less {state_bytes - own:g} x {elements}{part} of matrices"


def _closed(fit: Fit, terms: tuple[Term, ...]) -> str:
    """Such as "4Ψ/N = 4 x 6.74 B / 8"."""
    numel, plan, ranks = count(psi(fit)), fit.config.zero.plan, fit.config.data_ranks
    symbols, numbers = [], []
    for nbytes, partition in terms:
        shards, split = plan.ranks_of(partition, ranks), partition is not Partition.REPLICATED
        if nbytes:
            symbols.append(f"{nbytes:.10g}Ψ{'/' + ('N' if shards == ranks else 'G') if split else ''}")
            numbers.append(f"{nbytes:.10g} x {numel}{f' / {shards}' if split else ''}")
    return f"{' + '.join(symbols)} = {' + '.join(numbers)}" if symbols else "0"


def _moving(fit: Fit) -> Iterator[Part]:
    """Tensors of the runtime that exist for a part of a step."""
    kind, states = kind_of(fit), fit.peak.states
    full = ITEMSIZE_BYTES[kind.compute or kind.param]
    for name, itemsize, what in (
        (GATHERED, full, "elements in use"),
        (WHOLE_GRADS, ITEMSIZE_BYTES[kind.reduce], "elements in backward"),
        (TRANSFERS, ITEMSIZE_BYTES[kind.param], "elements to or from the host"),
    ):
        if nbytes := states.get(name, 0):
            yield Part(STATES[name], f"{itemsize} x {count(nbytes / itemsize)} {what}", None, nbytes)


def _activations(fit: Fit) -> Iterator[Part]:
    peak, micro = fit.peak, fit.counted
    samples = micro * fit.config.batch.accumulation
    for name, nbytes, what in (
        (BLOCKS, peak.blocks, f"kept for the backward: {micro} x {size(peak.blocks / micro)}"),
        (OUTSIDE, peak.outside, f"embedding, head, loss: {micro} x {size(peak.outside / micro)}"),
        (BACKWARD, peak.backward, f"made by the backward: {micro} x {size(peak.backward / micro)}"),
        (INPUTS, peak.inputs, _inputs(fit, samples)),
        (BUFFERS, peak.buffers, "of the model"),
    ):
        if nbytes:
            yield Part(name, what, None, nbytes)


def _inputs(fit: Fit, samples: int) -> str:
    """What a rank's samples of a step hold."""
    held = sum(sample_of(fit.config).nbytes)
    if is_causal(fit.config.model):
        ids = "id, position" if fit.config.data.packing else "id"
        return f"{held // fit.config.batch.seq} x {samples * fit.config.batch.seq:,} tokens ({ids} and label)"
    return f"{held:,} bytes x {samples:,} samples (inputs and labels)"


def sent(fit: Fit) -> str:
    """How the bytes that a rank sends in a step come about (arXiv 1910.02054, section 7)."""
    config, kind, memory = fit.config, kind_of(fit), fit.memory
    counts, group_ranks = memory.collective_counts(), config.zero.plan.group_ranks(config.data_ranks)
    closed = collective_formula(counts, world=config.data_ranks, shard_count=group_ranks)
    wire, sharded = config.zero.wire, group_ranks > 1
    gathered, reduced = wire.gather or kind.param, wire.reduce or kind.reduce
    gathers = f"{counts.gathers} x gathered in {gathered}, " if counts.gathers and sharded else ""
    gathers += f"{counts.exchanges} x exchanged between groups in {gathered}, " if counts.exchanges else ""
    text = f"{closed} elements: {gathers}{counts.reductions} x reduced in {reduced}"
    text += "; 4 bytes of scale for each 256 quantised" if wire != EXACT else ""
    if tensor := _tensor(fit):
        text += f"; {tensor}"
    moves = shard_count(fit) > 1 or config.parallel.tp > 1
    text += "; parts of matrices to their owners and back" if memory.matrices and moves else ""
    again, of_frozen = (memory.gathered_again(trainable=trained) * sharded for trained in (True, False))
    text += f"; {count(again)} elements of units that the schedule gathers again" if again > 0 else ""
    also = f"; {count(of_frozen)} frozen elements gathered, each as often as the schedule does"
    return text + also if of_frozen else text


def _tensor(fit: Fit) -> str:
    """What a rank sends to its tensor- or sequence-parallel group; empty without one."""
    memory = replace(fit.memory, config=with_micro(fit.config, fit.counted))
    if not (sent := memory.tensor_sent()).calls:
        return ""
    return f"{fit.config.batch.accumulation} x {size(sent.nbytes)} in {words(fit.config, sent)}"
