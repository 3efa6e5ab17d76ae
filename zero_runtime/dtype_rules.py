"""Which dtypes a configuration asks for in each unit, and in which words counted tensors differ from them.

The rules are those of docs/runtime.md. They are written here apart from the code that allocates and sends, which would
repeat its own mistake. Standard library only.

A tensor counts under each name that it serves: a master that is the parameter shard itself is in `master` and in
`params`. So the bytes need no rule for aliases; the bytes of memory are counted in census.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from zero_runtime.errors import some
from zero_runtime.optim.configs import STATE_ITEMSIZE_BYTES, HeldState
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.wire import EXACT, Wire

# Components that exist between a step's last backward and its update, besides the optimizer's states.
PARAMS, GATHERED, MASTER, GRADS, REDUCED = "params", "gathered", "master", "grads", "reduced"
# Components of which there may be any number of elements: the rule is their dtype alone.
ACCUMULATED, AUTOCAST = "accumulated", "autocast"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
OUTER_GATHER, OUTER_SCATTER = "outer_all_gather", "outer_reduce_scatter"  # between shard groups
ALL_TO_ALL = "all_to_all"  # parts of matrices, of all units together
SIGNS = ("sign_all_to_all", "sign_all_gather")  # of 1-bit Adam
SLICE_SUM, LOSS_NUMBERS = "tensor_all_reduce", "tensor_all_gather"  # of tensor parallelism, of all units together
PARTS = ("tensor_part_gather", "tensor_reduce_scatter")  # of hidden states
MATRIX_SLICES = "matrix_all_gather"  # of tensor parallelism, of matrices that are updated whole
TRADED_PARTS = "sequence_all_to_all"  # of sequence parallelism, of all units together
MESSAGES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, OUTER_GATHER, OUTER_SCATTER, ALL_TO_ALL)
_SIZES = STATE_ITEMSIZE_BYTES | dict[str, int](ITEMSIZE_BYTES.items())
_SETTINGS = {
    **dict.fromkeys((PARAMS, ALL_GATHER, OUTER_GATHER), "precision.param"),
    **dict.fromkeys((GATHERED, AUTOCAST, SLICE_SUM, LOSS_NUMBERS, TRADED_PARTS, *PARTS), "precision.compute"),
    **dict.fromkeys((REDUCED, REDUCE_SCATTER, ALL_REDUCE, OUTER_SCATTER), "precision.reduce"),
    **dict.fromkeys((GRADS, ACCUMULATED), "precision.accumulate"),
    MASTER: "precision.master",
    ALL_TO_ALL: "optimizer.ns_dtype",
}


class DTypeCount(NamedTuple):
    """Elements of one dtype that one unit has, or has sent, as one component."""

    component: str
    unit: str
    dtype: str
    elements: int
    nbytes: int


class Amount(NamedTuple):
    elements: int
    nbytes: int


Key = tuple[str, str]  # component, unit
Tally = dict[Key, dict[str, Amount]]  # by dtype


@dataclass(frozen=True)
class SizedUnit:
    """A unit's parameters with their elements, and its elements P and S on this rank (see unit.py)."""

    name: str
    params: tuple[tuple[str, int], ...]
    padded_numel: int
    shard_numel: int
    trainable: bool
    states: tuple[HeldState, ...] | None = None  # of the optimizer, if it has others for this unit
    code_bytes: int = 0  # of a shard that is stored as codes


@dataclass(frozen=True)
class AskedDTypes:
    """The settings that decide dtypes. states: of the optimizer. given: dtype of each parameter in the given model,
    which those that match `keep_dtype` keep. whole: the dtype in which matrices are updated whole, if any are. wire,
    plan: which collectives send codes."""

    precision: MixedPrecision
    micro_batches: int
    states: tuple[HeldState, ...]
    keep_dtype: tuple[str, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    whole: str | None = None
    wire: Wire = EXACT
    plan: ZeroPlan | None = None

    def of_param(self, name: str) -> MixedPrecision:
        """The dtypes of one parameter."""
        own = next((one for one in ITEMSIZE_BYTES if one == self.given.get(name)), None)
        if own is None or not any(fnmatchcase(name, pattern) for pattern in self.keep_dtype):
            return self.precision
        master = max(self.precision.master, own, key=ITEMSIZE_BYTES.__getitem__)
        return replace(self.precision, param=own, compute=None, master=master)

    def of_unit(self, unit: SizedUnit) -> Iterator[DTypeCount]:
        """What the unit must hold between the last backward of a step and its update. Parameters of a unit are alike;
        if a unit has some that must not be alike, `gathered` has several dtypes."""
        for name, numel in unit.params:
            one = self.of_param(name)
            yield _count(GATHERED, unit, one.compute or one.param, numel)
        kind = self.of_param(unit.params[0][0])
        stored = ("uint8", unit.code_bytes) if unit.code_bytes else (kind.param, unit.shard_numel)
        yield _count(PARAMS, unit, *stored)
        if unit.trainable:
            yield _count(MASTER, unit, kind.master, unit.shard_numel)
            for state in self.states if unit.states is None else unit.states:
                yield _count(state.name, unit, state.dtype, unit.shard_numel // state.per)
            yield _count(GRADS, unit, kind.grad(self.micro_batches), unit.shard_numel)
            yield _count(REDUCED, unit, kind.reduce, unit.padded_numel)

    def in_passing(self, component: str, unit: SizedUnit) -> str | None:
        """The dtype of elements of any number; None if the unit has no such component."""
        kind = self.of_param(unit.params[0][0])
        if component == ALL_GATHER:
            codes = self.plan is not None and self.wire.gathers(self.plan, trainable=unit.trainable)
            return "uint8" if codes or unit.code_bytes else kind.param
        if component == OUTER_GATHER:
            return kind.param
        if component in SIGNS:
            return "uint8"
        if component == AUTOCAST:
            return kind.compute or kind.param
        if not unit.trainable:
            return None
        sums: dict[str, str] = {ACCUMULATED: kind.accumulate, ALL_REDUCE: kind.reduce, OUTER_SCATTER: kind.reduce}
        sums |= {ALL_TO_ALL: "uint8"} if self.wire.reduce else {REDUCE_SCATTER: kind.reduce}
        return sums.get(component)

    def of_all_units(self, component: str) -> str | None:
        """The dtype of messages that belong to no unit; None if there are no such messages.

        The loss of a divided head sends fp32 numbers of each token.
        """
        computed = self.precision.compute or self.precision.param
        asked: dict[str, str | None] = dict.fromkeys((SLICE_SUM, TRADED_PARTS, *PARTS), computed)
        asked |= {LOSS_NUMBERS: "fp32", ALL_TO_ALL: self.whole, MATRIX_SLICES: self.whole}
        return asked.get(component)

    def setting(self, component: str) -> str:
        """The key that decides a component's dtype."""
        if component == GRADS and self.micro_batches == 1:
            return _SETTINGS[REDUCED]
        return _SETTINGS.get(component, "optimizer")


def differences(asked: AskedDTypes, units: Iterable[SizedUnit], found: Iterable[DTypeCount]) -> list[str]:
    """For each component in which `found` is not what is asked for, what was expected and found in which units."""
    by_name = {unit.name: unit for unit in units}
    counted = tally(found)
    wanted = tally(one for unit in by_name.values() for one in asked.of_unit(unit))
    for key, amounts in counted.items():
        if key not in wanted:
            unit = by_name.get(key[1])
            dtype = None if unit is None else asked.in_passing(key[0], unit)
            dtype = dtype if key[1] else asked.of_all_units(key[0]) or dtype
            wanted[key] = _in_passing(dtype, amounts)
    return _texts(
        asked, {key: (wanted[key], counted.get(key, {})) for key in wanted if wanted[key] != counted.get(key)}
    )


def tally(counts: Iterable[DTypeCount]) -> Tally:
    """The amounts by component and unit, then by dtype; without those of no elements."""
    found: Tally = {}
    for one in counts:
        if one.elements:
            amounts = found.setdefault((one.component, one.unit), {})
            before = amounts.get(one.dtype, Amount(0, 0))
            amounts[one.dtype] = Amount(before.elements + one.elements, before.nbytes + one.nbytes)
    return found


def bytes_by_dtype(counts: Iterable[DTypeCount]) -> dict[str, dict[str, int]]:
    """Bytes of all units by component, then by dtype."""
    found: dict[str, dict[str, int]] = {}
    for one in counts:
        amounts = found.setdefault(one.component, {})
        amounts[one.dtype] = amounts.get(one.dtype, 0) + one.nbytes
    return found


def _count(component: str, unit: SizedUnit, dtype: str, elements: int) -> DTypeCount:
    return DTypeCount(component, unit.name, dtype, elements, elements * _SIZES[dtype])


def _in_passing(dtype: str | None, amounts: Mapping[str, Amount]) -> dict[str, Amount]:
    """The same number of elements, all in the dtype that is asked for; none if none is."""
    elements = sum(amount.elements for amount in amounts.values())
    return {} if dtype is None else {dtype: Amount(elements, elements * _SIZES[dtype])}


def _texts(asked: AskedDTypes, differing: Mapping[Key, tuple[dict[str, Amount], dict[str, Amount]]]) -> list[str]:
    """One text for all units in which a component has the same wrong dtypes."""
    alike: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[Key]] = {}
    for key, (want, found) in differing.items():
        alike.setdefault((key[0], tuple(want), tuple(found)), []).append(key)
    texts = []
    for (component, _, _), keys in alike.items():
        wanted, counted = (_dtypes(differing[key][which] for key in keys) for which in (0, 1))
        units = some(unit for _, unit in keys)
        texts.append(f"{component} of unit {units}: expected {wanted} ({asked.setting(component)}), found {counted}")
    return texts


def _dtypes(amounts: Iterable[Mapping[str, Amount]]) -> str:
    total: dict[str, int] = {}
    for one in amounts:
        for dtype, amount in one.items():
            total[dtype] = total.get(dtype, 0) + amount.nbytes
    return " and ".join(f"{dtype} ({nbytes:,} bytes)" for dtype, nbytes in total.items()) or "none"
