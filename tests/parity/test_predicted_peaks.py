"""The predicted peak of a step agrees with the bytes that torch's CPU allocator counts, but for what it leaves out.

The combinations are those of benchmarks/predicted_peaks.py, which prints the errors.
"""

from __future__ import annotations

import pytest
from harness.ranks import run_ranks

from benchmarks.predicted_peaks import (
    MODELS,
    OUTER,
    PRECISIONS,
    SEQ,
    Case,
    Predictions,
    config_of,
    covering,
    measured,
)
from orchestrator.wings.predict.transport import SHM, transport
from zero_runtime.same_host.sizes import terms_bytes
from zero_runtime.state_bytes import ONE_NUMBER_BYTES

COUNT, SEED = 72, 0
FP32_BYTES = 4


def short_cases() -> list[Case]:
    """Those of the short form: two of the first combinations, and one with outer sharding."""
    return [*[case for case in covering(8, SEED) if case.world == 2][:2], OUTER[0]]


def largest_product_bytes(case: Case) -> int:
    """Bytes in fp32 of both operands and the result of the largest matrix product, the head's."""
    config = config_of(case)
    tokens = min(config.loss.tile_tokens or case.micro * SEQ, case.micro * SEQ)
    width, vocabulary = (MODELS[case.model].get(key) for key in ("hidden_size", "vocab_size"))
    width = width or MODELS[case.model]["n_embd"]
    return FP32_BYTES * (tokens * width + width * vocabulary + tokens * vocabulary)


def left_out_bytes(case: Case, predictions: Predictions) -> int:
    """The most that a prediction leaves out. Storages of one number, of which an operation keeps at most as many as
    other storages. The CPU's random state in each recomputing block. Memory inside of one operation: the products of
    16-bit matrices, where the processor multiplies in fp32, copy their operands and the result at most.
    """
    trace = predictions.trace(config_of(case))
    scratch = largest_product_bytes(case) if PRECISIONS[case.precision].compute == "bf16" else 0
    return ONE_NUMBER_BYTES * len(trace.sizes) + trace.random_state_bytes + scratch


def elsewhere_bytes(case: Case, predictions: Predictions) -> int:
    """How far a rank may stay below a prediction. Where ranks read each other's terms, a prediction has the two chunks
    of a sum at the worst moment at which it may be made (`Book.pass_sum`): the other ranks decide which moment it is.
    Terms are in fp32 at most, and a rank sums its part of a unit.
    """
    config = config_of(case)
    if case.world == 1 or transport(config) != SHM:
        return 0
    parts = config.zero.plan.group_ranks(case.world)
    sums = parts if parts > 1 else case.world
    return terms_bytes(max(unit.padded_numel for unit, _ in predictions.memory(case).units) // sums * FP32_BYTES)


def check(cases: list[Case]) -> None:
    predictions = Predictions()
    by_rank = run_ranks(measured, cases[0].world, cases)
    for place, case in enumerate(cases):
        predicted = predictions.of(case)
        for rank in by_rank:
            assert rank[place].between == predicted.between, case
            below, above = -elsewhere_bytes(case, predictions), left_out_bytes(case, predictions)
            assert below <= rank[place].peak - predicted.peak <= above, case


def test_the_peak_of_a_step_is_the_predicted_one() -> None:
    check(short_cases())


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_peak_of_a_step_is_the_predicted_one_for_every_pair_of_settings(world: int) -> None:
    every, short = [*covering(COUNT, SEED), *OUTER], short_cases()
    assert set(short) < set(every)
    check([case for case in every if case.world == world and case not in short])
