"""With collectives as asynchronous as NCCL's may be, rows keep the bits of plain torch; and mistakes are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import late_collectives
from harness.models import TinySpec
from harness.oracle import Case, Trace, oracle
from harness.ranks import run_ranks
from harness.trainee import train
from test_rows import BF16, BF16_PAPER, FP16, JUMPY_SCALE, STAGES, STEPS_OF_EQUAL_BITS, assert_same_bits

from zero_runtime.collectives import Collectives, Pending
from zero_runtime.plan import ZeroPlan
from zero_runtime.unit import Unit

LONG = pytest.mark.full
FORMS = tuple(late_collectives.FORMS)
STEPS = STEPS_OF_EQUAL_BITS


def _rows(form: str | None, case: Case, prefetch: int, fault: Callable[[], None] | None = None) -> dict[int, Trace]:
    if form is not None:
        late_collectives.use(form)
    if fault is not None:
        fault()
    return train(case, prefetch=prefetch)


CASES = {
    "bf16 twice": Case(2, 2, STEPS, precision=BF16_PAPER, model=TinySpec(recomputed=True)),
    "fp32": Case(2, 1, STEPS),
    "frozen and tied": Case(2, 3, STEPS, model=TinySpec(frozen=True, tied=True)),
    "bf16 summed in fp32": Case(2, 1, STEPS, precision=BF16),
    "fp16": Case(2, 1, 12, precision=FP16, loss_scale=JUMPY_SCALE),
    "no_sync": Case(2, 3, STEPS, precision=BF16_PAPER, no_sync=True),
}


@pytest.mark.parametrize("form", [pytest.param(form, marks=() if form == "late" else LONG) for form in FORMS])
@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=LONG), 1, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "bf16 twice" else LONG) for name in CASES])
def test_every_stage_keeps_the_bits_of_plain_torch(name: str, prefetch: int, form: str) -> None:
    case = CASES[name]
    traces = run_ranks(_rows, case.world, form, case, prefetch)[0]
    for stage in STAGES:
        every = ZeroPlan.from_stage(stage).reduces_every_backward
        assert_same_bits(traces[stage], oracle(case, reduces_every_backward=every))


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case",
    [
        Case(4, 2, STEPS, shard_ranks=2),
        Case(4, 2, STEPS, shard_ranks=2, outer_sharding="optim"),
        Case(3, 1, STEPS),
    ],
    ids=["hybrid", "outer_optim", "world_3"],
)
def test_hybrid_sharding_and_uneven_worlds_keep_the_bits_of_the_usual_messages(case: Case, form: str) -> None:
    """There the order of a sum differs from the oracle's, so the reference is the same run without the delays."""
    found, wanted = (run_ranks(_rows, case.world, one, case, 1)[0] for one in (form, None))
    for stage in STAGES:
        assert_same_bits(found[stage], wanted[stage])


# ---- mistakes that gloo's own messages may hide ----------------------------------------------------------------------


def _a_gather_is_not_awaited() -> None:
    gather = Collectives.all_gather

    def impatient(self: Collectives, full: torch.Tensor, shard: torch.Tensor, unit: str = "") -> Pending:
        self.__dict__.setdefault("forgotten", []).append(gather(self, full, shard, unit))
        return Pending()

    Collectives.all_gather = impatient  # type: ignore[method-assign]


def _a_gradient_is_cleared_while_it_is_reduced() -> None:
    reduce = Unit.reduce_grad

    def clearing(self: Unit) -> None:
        reduce(self)
        assert self.unsharded_grad is not None
        self.unsharded_grad.zero_()

    Unit.reduce_grad = clearing  # type: ignore[method-assign]


def _a_sum_is_read_before_it_has_arrived() -> None:
    reduce = Unit.reduce_grad

    def reading(self: Unit) -> None:
        reduce(self)
        pending, out = self._gradients._reducing  # type: ignore[misc]
        early = out.clone()
        self._gradients._reducing = type(self._gradients._reducing)(pending, early)  # type: ignore[misc, call-arg, arg-type]

    Unit.reduce_grad = reading  # type: ignore[method-assign]


MISTAKES: dict[str, tuple[Callable[[], None], str]] = {
    "a gather is not awaited": (_a_gather_is_not_awaited, "late"),
    "a gradient is cleared while it is reduced": (_a_gradient_is_cleared_while_it_is_reduced, "late"),
    "a sum is read before it has arrived": (_a_sum_is_read_before_it_has_arrived, "early"),
}


def _losses(form: str, fault: Callable[[], None]) -> Any:
    return {stage: trace.losses for stage, trace in _rows(form, Case(2, 1, STEPS), 1, fault).items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "cleared" in name else LONG) for name in MISTAKES])
def test_a_mistake_changes_the_losses_or_ends_the_run(name: str) -> None:
    fault, form = MISTAKES[name]
    case = Case(2, 1, STEPS)
    try:
        found = run_ranks(_losses, 2, form, fault)[0]
    except AssertionError:
        return  # NonFiniteError, for example
    for stage in (2, 3):
        assert found[stage] != oracle(case, reduces_every_backward=True).losses, f"stage {stage} hides it"


def test_noise_leaves_the_kept_part_and_nothing_else() -> None:
    full = torch.arange(8.0)
    late_collectives.noise_around_(full, full[2:4])
    assert full[2:4].tolist() == [2.0, 3.0]
    assert bool(full[:2].isnan().all() and full[4:].isnan().all())
    late_collectives.noise_around_(full, torch.zeros(2))
    assert bool(full.isnan().all())
