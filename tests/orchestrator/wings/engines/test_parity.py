"""Every engine at every stage, our own runtime too, against a plain loop of PyTorch in one process.

The loop is that of harness.engine_trainee, which no engine shares. It runs in three orders of summation, and once in
fp64, which is exact next to them: how far the three are from it is plain PyTorch's own error. An engine is one more
order, so its errors come from the same distribution. Each distance is a norm of many errors (of a parameter's elements,
or the largest of a step), which varies little from order to order; three times the largest of three is beyond it, and
far below what the seeded faults change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from math import isnan

import pytest
from harness.engine_trainee import FAULTS, RANKS, Order, Row, Trace, Work, plain_all, train_all
from harness.ranks import run_ranks

MOST = 3.0  # times plain PyTorch's own error
FP32_RELATIVE = 1e-6  # the promise of the issue, for losses and norms; each is a sum of roundings of 6e-8
STAGES = {"ddp": (0,), "plain": (0,), "fsdp2": (1, 2, 3), "zero": (0, 1, 2, 3), "deepspeed": (0, 1, 2, 3)}
EVERY = tuple(STAGES)
ACCUMULATED = {"accumulation": 4, "clip_norm": 0.5}


def rows(work: Work, engines: Iterable[str] = EVERY, stages: Iterable[int] = (0, 1, 2, 3)) -> list[Row]:
    return [Row(engine, stage, work) for engine in engines for stage in STAGES[engine] if stage in (*stages, 0)]


FEW = 6  # steps: FAULTY says that they show a fault
SHORT = (
    *rows(Work("tied", **ACCUMULATED, steps=FEW)),
    *rows(Work("lora", "bf16"), stages=(2, 3)),  # whose loss falls later
    *rows(Work("t5", steps=FEW), ("fsdp2", "zero"), (2,)),
)
MODELS = ("llama", "tied", "lora", "neox", "t5")
LONG = (
    *(
        one
        for model in MODELS
        for precision in ("fp32", "bf16")
        for settings in ({}, ACCUMULATED)
        for one in rows(Work(model, precision, **settings))
        if one not in SHORT
    ),
    *rows(Work("llama", "fp16", **ACCUMULATED), [one for one in EVERY if one != "deepspeed"]),  # fp16 on GPUs alone
    *(Row("fsdp2", stage, Work("tied", **ACCUMULATED), shard_ranks=1) for stage in (2, 3)),
    *(Row("fsdp2", 3, Work("tied", **ACCUMULATED), offload=True, shard_ranks=shards) for shards in (None, 1)),
)
FAULTY = tuple(
    Row(engine, stage, Work("tied", **ACCUMULATED, steps=steps), fault=fault)
    for fault in FAULTS
    for engine, stage in (("ddp", 0), ("fsdp2", 3))
    for steps in (FEW, 20)
)


EXACT = Order(exact=True)


def in_autocast(row: Row) -> bool:
    """DDP's users train 16 bits with autocast over fp32 weights, and DeepSpeed's stage 0 is DDP."""
    return row.engine in ("ddp", "deepspeed") and row.stage == 0 and row.work.precision != "fp32"


def orders_of(autocast: bool) -> list[Order]:
    """The plain loops of a work; the last one is the exact one."""
    sums = ((False, False), (True, False), (False, True))
    return [*(Order(backwards, together, autocast) for backwards, together in sums), EXACT]


def name_of(row: Row) -> str:
    work = row.work
    words = (
        row.engine,
        f"stage{row.stage}",
        work.model,
        work.precision,
        f"x{work.accumulation}",
        f"clip={work.clip_norm}",
        f"{work.steps}steps",
    )
    more = (f"shard_ranks={row.shard_ranks}" * (row.shard_ranks is not None), "offload" * row.offload, row.fault)
    return "-".join([*words, *(one for one in more if one)])


def needs(row: Row) -> None:
    if row.engine == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install zero-lab[deepspeed]")


ALONE = ("plain", "deepspeed")  # plain is one process, and DeepSpeed replaces parts of torch for its process


def trace_of(row: Row, table: tuple[Row, ...]) -> Trace:
    return _traces(table, None if table is SHORT else row.work, row.engine if row.engine in ALONE else "")[row]


@cache
def _traces(table: tuple[Row, ...], work: Work | None, alone: str) -> dict[Row, Trace]:
    """All rows of the table that do this work, or any, and can share processes: each start imports an engine anew."""
    mine = [one for one in table if work in (None, one.work) and (one.engine if one.engine in ALONE else "") == alone]
    return run_ranks(train_all, 1 if alone == "plain" else RANKS, mine)[0]


@cache
def _loops(work: Work) -> dict[Order, Trace]:
    """The plain loops of a work, with and without autocast."""
    ways = (False,) if work.precision == "fp32" else (False, True)
    orders = dict.fromkeys(order for autocast in ways for order in orders_of(autocast))
    found: dict[tuple[Work, Order], Trace] = {}
    for own in run_ranks(plain_all, RANKS, [(work, order) for order in orders]):
        found |= own
    return {order: found[work, order] for order in orders}


def far(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative distance of a step."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def distances(found: Trace, exact: Trace) -> dict[str, float]:
    """From the exact run: of losses, norms and each parameter's last value."""
    each = {
        name: float((found.weights[name].double() - value).norm() / value.norm())
        for name, value in exact.weights.items()
    }
    return {"losses": far(found.losses, exact.losses), **each}


def differences(row: Row, found: Trace) -> list[str]:
    """What is not equal, in words with numbers."""
    loops = _loops(row.work)
    *plain, exact = (loops[order] for order in orders_of(in_autocast(row)))
    first, unequal = plain[0], list[str]()
    own = distances(found, exact)
    told = [distances(one, exact) for one in plain]
    # Three loops say little of one parameter: how far rounding moves it is known from all of them together.
    largest = max(value for one in told for name, value in one.items() if name != "losses")
    bounds = {name: MOST * (max(one[name] for one in told) if name == "losses" else largest) for name in own}
    unequal += [f"{name}: {own[name]:.1e} above {bounds[name]:.1e}" for name in own if own[name] > bounds[name]]
    if found.skipped != first.skipped:
        unequal.append(f"skipped updates {found.skipped}, expected {first.skipped}")
    norms = [(one, other) for one, other in zip(found.norms, first.norms, strict=True) if not isnan(one)]
    if row.work.precision == "fp32":
        pairs = {"losses": (found.losses, first.losses), "norms": tuple(zip(*norms, strict=True)) or ((), ())}
        worst = {name: far(*pair) for name, pair in pairs.items() if pair[0]}
        unequal += [f"{name}: off by {one:.1e}" for name, one in worst.items() if one > FP32_RELATIVE]
    return unequal


@pytest.mark.parametrize(
    ("row", "table"),
    [
        *(pytest.param(row, SHORT, id=name_of(row)) for row in SHORT),
        *(pytest.param(row, LONG, id=name_of(row), marks=pytest.mark.full) for row in LONG),
    ],
)
def test_an_engine_trains_as_plain_torch_does(row: Row, table: tuple[Row, ...]) -> None:
    needs(row)
    found = trace_of(row, table)
    assert not differences(row, found)
    assert found.losses[-1] < found.losses[0]


@pytest.mark.full
@pytest.mark.parametrize("row", FAULTY, ids=name_of)
def test_the_comparison_sees_a_fault(row: Row) -> None:
    found = trace_of(row, FAULTY)
    assert differences(row, found)
