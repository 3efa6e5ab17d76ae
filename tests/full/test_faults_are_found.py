"""The suite can fail: each named fault in the runtime makes a test of the parity suite fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import test_bytes
import test_rows
from harness import ranks
from harness.faults import FAULTS
from harness.models import TinySpec
from harness.oracle import Case

from zero_runtime.precision import MixedPrecision

pytestmark = pytest.mark.full

BF16 = MixedPrecision("bf16")


def fp32(stage: int = 2, *, world: int = 2, micro_batches: int = 1) -> None:
    test_rows.test_fp32_has_the_bits_of_plain_torch(stage, world, False, micro_batches)


def clipped(*, tied: bool = False) -> None:
    test_rows.test_clipping_follows_the_global_norm_with_each_element_once(3, 2, tied)


def world_3() -> None:
    case = Case(3, 1, precision=MixedPrecision(), model=TinySpec())
    test_rows.test_at_world_3_gradient_norm_and_update_are_within_the_bound(2, case)


# The test that detects each fault, called as pytest would call it.
FINDERS: dict[str, Callable[[], None]] = {
    "gradients_are_averaged_over_the_ranks": world_3,
    "padding_is_not_zeroed": clipped,
    "a_weight_is_counted_twice_in_the_norm": lambda: clipped(tied=True),
    "the_norm_is_one_ranks_own": clipped,
    "the_last_units_reduction_is_skipped": fp32,
    "a_stale_gather_is_used_again": fp32,
    "an_overflow_is_stepped_over": lambda: test_rows.test_fp16_has_the_bits_and_the_scale_trace_of_plain_torch(2, 2, 1),
    "a_micro_batch_is_lost": lambda: fp32(1, micro_batches=3),
    "clipping_does_nothing": clipped,
    "the_mean_is_over_each_ranks_own_tokens": fp32,
    "the_master_is_taken_after_rounding": lambda: test_rows.test_bf16_has_the_bits_of_plain_torch(2, 2, 1, BF16),
    "the_step_count_runs_once_a_unit": fp32,
    "the_loss_scale_is_left_in_the_update": fp32,
    "shards_are_cut_one_element_late": lambda: fp32(3),
    "micro_batches_are_summed_in_sixteen_bits": lambda: test_rows.test_bf16_has_the_bits_of_plain_torch(1, 2, 3, BF16),
    "the_full_gradient_is_never_freed": lambda: test_bytes.test_counted_bytes_less_padding_are_the_closed_form(
        MixedPrecision(), ["16Ψ", "8Ψ + 8Ψ/N", "4Ψ + 12Ψ/N", "16Ψ/N"]
    ),
    "parameters_are_gathered_once_too_often": lambda: (
        test_bytes.test_counted_collectives_equal_the_theory_and_padding_exactly(1, 2)
    ),
}


@pytest.fixture
def apply_fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets a fault until the test ends. The parity tests cache runs, of which several faults share those without a
    fault; a run with a fault must be made again and must not outlive its test, so it is not cached."""

    def apply(name: str) -> None:
        monkeypatch.setattr(test_rows, "ranks_traces", test_rows.ranks_traces.__wrapped__)
        ranks.set_fault(name)

    yield apply
    ranks.set_fault(None)


def test_every_fault_has_a_test_that_should_detect_it() -> None:
    assert FINDERS.keys() == FAULTS.keys()
    assert len(FAULTS) >= 12


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_makes_its_test_fail(name: str, apply_fault: Callable[[str], None]) -> None:
    FINDERS[name]()  # passes without the fault
    apply_fault(name)
    with pytest.raises(AssertionError):
        FINDERS[name]()
