"""Bytes of model states per rank, from the plan and the layouts; the same arithmetic that the runtime allocates by.

The moment meant is between the last backward and the step, when every state exists (arXiv 1910.02054, section 3.1
counts there: 2Ψ + 2Ψ + 12Ψ for mixed-precision Adam). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from zero_runtime.flat_layout import FlatLayout
from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision

ADAM_STATES = 2  # exp_avg and exp_avg_sq, both fp32


@dataclass(frozen=True)
class UnitSize:
    """What the model needs to know of one unit, in elements."""

    numel: int
    padded_numel: int
    trainable: bool

    @classmethod
    def of(cls, layout: FlatLayout, *, trainable: bool) -> UnitSize:
        return cls(layout.numel, layout.padded_numel, trainable)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank by component; `padding` is what the three hold above the closed form (`formula`).

    It is the mean over the ranks, to the nearest byte: the padding itself lies at the end of the last shards.
    """

    params: int
    grads: int
    optimizer: int
    padding: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


@dataclass(frozen=True)
class BytesPerElement:
    """Bytes that one trainable element costs a rank: `full` for replicated states, `split` to be divided by N."""

    params: tuple[int, Partition]
    grads: tuple[int, Partition]
    optimizer: tuple[int, Partition]

    @classmethod
    def of(cls, plan: ZeroPlan, precision: MixedPrecision, micro_batches: int) -> BytesPerElement:
        # Where master and param dtype agree the master is the parameter (see Unit.allocate) and costs nothing.
        master = 0 if precision.master == precision.param else ITEMSIZE_BYTES[precision.master]
        return cls(
            params=(ITEMSIZE_BYTES[precision.param], plan.params),
            grads=(ITEMSIZE_BYTES[precision.grad(micro_batches)], plan.grads),
            optimizer=(master + ADAM_STATES * ITEMSIZE_BYTES["fp32"], plan.optimizer),
        )


def model_state_bytes(
    plan: ZeroPlan,
    precision: MixedPrecision,
    units: Iterable[UnitSize],
    *,
    world: int,
    micro_batches: int = 1,
) -> StateBytes:
    """Predicted bytes of model states on each rank. Frozen units have parameters only."""
    per_element = BytesPerElement.of(plan, precision, micro_batches)
    components = asdict(per_element)
    totals = dict.fromkeys(components, 0)
    exact = dict.fromkeys(components, 0.0)
    for unit in units:
        for component, (size_bytes, partition) in components.items():
            if component != "params" and not unit.trainable:
                continue
            ranks = world if partition is Partition.SHARDED else 1
            totals[component] += unit.padded_numel // ranks * size_bytes
            exact[component] += unit.numel * size_bytes / ranks
    return StateBytes(**totals, padding=round(sum(totals.values()) - sum(exact.values())))


def formula(plan: ZeroPlan, precision: MixedPrecision, *, micro_batches: int = 1) -> str:
    """The closed form of `model_state_bytes` in Ψ (parameters) and N (ranks), such as `4Ψ + 12Ψ/N`."""
    per_element = BytesPerElement.of(plan, precision, micro_batches)
    states = (per_element.params, per_element.grads, per_element.optimizer)
    full = sum(size for size, partition in states if partition is Partition.REPLICATED)
    split = sum(size for size, partition in states if partition is Partition.SHARDED)
    terms = ([f"{full}Ψ"] if full else []) + ([f"{split}Ψ/N"] if split else [])
    return " + ".join(terms)


def collective_factor(plan: ZeroPlan, micro_batches: int = 1) -> int:
    """How many times Ψ(N-1)/N elements each rank sends in one steady training step (arXiv 1910.02054, section 7).

    Gathers: one a step where parameters are replicated and the optimizer is not, two a micro-batch where they are
    sharded. Reductions: one a step, or one a micro-batch where gradients are sharded. A ring all-reduce is a
    reduce-scatter and an all-gather. Each of these moves (N-1)/N of the elements.
    """
    reductions = micro_batches if plan.reduces_every_backward else 1
    gathers = 2 * micro_batches if plan.params is Partition.SHARDED else 1
    return reductions + gathers


def collective_elements(plan: ZeroPlan, numel: int, *, world: int, micro_batches: int = 1) -> int:
    """Elements that one rank sends in one steady training step for `numel` trainable elements (rounded down)."""
    return collective_factor(plan, micro_batches) * numel * (world - 1) // world
