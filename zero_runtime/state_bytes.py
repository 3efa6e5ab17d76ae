"""Bytes of model states per rank, from the plan and the layouts, by the same arithmetic as the runtime's allocations.

Bytes are counted between the last backward and the step, when every state exists, as in arXiv 1910.02054, section 3.1
(2Ψ + 2Ψ + 12Ψ for mixed-precision Adam). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypedDict

from zero_runtime.flat_layout import FlatLayout
from zero_runtime.optim.config_base import OptimizerConfig
from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.wire import Wire

# Storages of one number count for no activations: losses, counts, and Python numbers, which torch may or may not wrap.
ONE_NUMBER_BYTES = 8
ADAM_BYTES = 8.0  # bytes per element of exp_avg and exp_avg_sq in fp32; other states: see OptimizerConfig.state_bytes


@dataclass(frozen=True)
class UnitSize:
    """Size of one unit in elements, and which of its states are offloaded."""

    numel: int
    padded_numel: int
    trainable: bool
    is_root: bool = False  # parameters that no block, embedding or head owns; unsharded for a complete pass
    params_offloaded: bool = False  # offloaded between their uses, as far as the plan shards them
    optimizer_offloaded: bool = False  # the same for a separate master and the optimizer's states
    separate_memory: bool = False  # offloaded to memory that the device cannot compute in: gradients go there too
    state_bytes: float | None = None  # of the optimizer's states per element, if not those of the other units

    @classmethod
    def of(cls, layout: FlatLayout, **others: Any) -> UnitSize:
        """The size of a layout; `others`: the other fields."""
        return cls(layout.numel, layout.padded_numel, **others)

    def is_away(self, component: str) -> bool:
        """Whether this component of the model states is off the device between backward and step."""
        if component == "params":
            return self.params_offloaded
        return self.optimizer_offloaded and (component == "optimizer" or self.separate_memory)


class ElementBytes(TypedDict):
    """Bytes of a trained element: of the optimizer's states, and what every rank has for all elements: the error
    feedback of quantised reductions, and what the optimizer keeps besides its states."""

    state_bytes: float
    error_bytes: int
    kept_bytes: float


def element_bytes(plan: ZeroPlan, optimizer: OptimizerConfig, wire: Wire, *, world: int) -> ElementBytes:
    """The bytes of an element in a run; with one shard nothing is reduced, so that there are no errors."""
    shards = plan.shard_count(world)
    return ElementBytes(
        state_bytes=optimizer.state_bytes,
        error_bytes=wire.error_bytes(plan) if shards > 1 else 0,
        kept_bytes=optimizer.kept_bytes(shard_count=shards, world=world),
    )


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank by component; `padding` is the part of their sum that exceeds the closed form (`formula`).

    `padding` is the mean over the ranks, to the nearest byte: the padding itself is at the end of the last shards.
    """

    params: int
    grads: int
    optimizer: int
    padding: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


_DIVISOR = {Partition.REPLICATED: "", Partition.GROUP: "/G", Partition.SHARDED: "/N"}
Term = tuple[float, Partition]  # bytes per element, and the ranks that they are split over


@dataclass(frozen=True)
class BytesPerElement:
    """Bytes of one trainable element on a rank; each component is a sum of terms."""

    params: tuple[Term, ...]
    grads: tuple[Term, ...]
    optimizer: tuple[Term, ...]

    @classmethod
    def of(
        cls,
        plan: ZeroPlan,
        precision: MixedPrecision,
        micro_batches: int,
        state_bytes: float,
        error_bytes: int = 0,
        kept_bytes: float = 0.0,
    ) -> BytesPerElement:
        """The sums of terms; the bytes are those of `ElementBytes`."""
        # If master and param dtype agree, the master is the parameter (see UnitParameters) and costs nothing.
        master = 0 if precision.master == precision.param else ITEMSIZE_BYTES[precision.master]
        return cls(
            params=_param_terms(plan, precision),
            grads=(
                (ITEMSIZE_BYTES[precision.grad(micro_batches)], plan.grads),
                *(((error_bytes, Partition.REPLICATED),) if error_bytes else ()),
            ),
            optimizer=(
                (master + state_bytes, plan.optimizer),
                *(((kept_bytes, Partition.REPLICATED),) if kept_bytes else ()),
            ),
        )


def _param_terms(plan: ZeroPlan, precision: MixedPrecision) -> tuple[Term, ...]:
    size = precision.stored_bytes
    if precision.computes_as_param or precision.weights or plan.params is Partition.SHARDED:
        return ((size, plan.held_params),)
    # The full copy is a cast of the gathered parameters, so the shard that is gathered cannot be a slice of it.
    return ((ITEMSIZE_BYTES[precision.compute or precision.param], plan.params), (size, plan.optimizer))


def model_state_bytes(
    plan: ZeroPlan,
    units: Iterable[tuple[UnitSize, MixedPrecision]],
    *,
    world: int,
    micro_batches: int = 1,
    state_bytes: float = ADAM_BYTES,
    error_bytes: int = 0,
    kept_bytes: float = 0.0,
) -> StateBytes:
    """Predicted bytes of model states on each rank. Frozen units have parameters only."""
    ranks = {partition: plan.ranks_of(partition, world) for partition in Partition}
    known: dict[tuple[MixedPrecision, float], dict[str, tuple[Term, ...]]] = {}
    totals = dict.fromkeys((one.name for one in fields(BytesPerElement)), 0)
    exact = 0.0
    for unit, precision in units:
        kind = precision, state_bytes if unit.state_bytes is None else unit.state_bytes
        if kind not in known:
            known[kind] = asdict(BytesPerElement.of(plan, precision, micro_batches, kind[1], error_bytes, kept_bytes))
        for component, terms in known[kind].items():
            if (component != "params" and not unit.trainable) or unit.is_away(component):
                continue
            for size_bytes, partition in terms:
                totals[component] += round(unit.padded_numel // ranks[partition] * size_bytes)
                exact += unit.numel * size_bytes / ranks[partition]
    return StateBytes(**totals, padding=round(sum(totals.values()) - exact))


def formula(
    plan: ZeroPlan,
    precision: MixedPrecision,
    *,
    micro_batches: int = 1,
    state_bytes: float = ADAM_BYTES,
    error_bytes: int = 0,
    kept_bytes: float = 0.0,
    with_frozen: bool = False,
    matrix_state_bytes: float | None = None,
) -> str:
    """The closed form of `model_state_bytes` in Ψ (parameters) and N (ranks that share one copy), such as `4Ψ + 12Ψ/N`.

    With outer sharding, N are all ranks and G those of a shard group.

    `with_frozen`: Ψ are the trained parameters, Φ the frozen ones, without Q that are stored as codes.
    matrix_state_bytes: of the trained matrices, M, if the optimizer keeps other states for them.
    """
    coded, precision = precision, replace(precision, weights=None)
    of = BytesPerElement.of(plan, precision, micro_batches, state_bytes, error_bytes, kept_bytes)
    trained = _closed_form([term for component in asdict(of).values() for term in component], "Ψ")
    if matrix_state_bytes is not None:
        whole = BytesPerElement.of(plan, precision, micro_batches, matrix_state_bytes, error_bytes, kept_bytes)
        terms = [term for component in asdict(whole).values() for term in component]
        trained = f"{_closed_form(terms, 'M')} (M in matrices) + {trained}"
    codes = f" + {_closed_form(_param_terms(plan, coded), 'Q')} (Q in {coded.weights})" if coded.weights else ""
    return f"{trained} + {_closed_form(of.params, 'Φ')} (Φ frozen){codes}" if with_frozen else trained


def _closed_form(terms: Iterable[Term], letter: str) -> str:
    terms = list(terms)
    sums = {one: sum(size for size, partition in terms if partition is one) for one in Partition}
    return " + ".join(f"{size:.10g}{letter}{_DIVISOR[one]}" for one, size in sums.items() if size)
