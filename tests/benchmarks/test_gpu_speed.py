"""How predicted steps are compared with measured ones on GPUs, and the same measurement on CPU ranks."""

from __future__ import annotations

import math

import pytest
import torch
from harness.ranks import run_ranks

from benchmarks import gpu_speed
from benchmarks.gpt import GptSize
from benchmarks.gpu_speed import ANCHOR, STAGES, Pair, report
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.timing import machine_timer

SIZE = GptSize(2, 32, 2, 64, 16, 2)


def test_the_claim_is_that_every_stage_but_the_anchor_is_near() -> None:
    near, far = Pair(1.2, 1.0), Pair(0.7, 1.0)
    lines, held = report({0: near, 1: near, 2: far, 3: near}, 0.25)
    assert held  # the surplus of all stages is from that one
    assert lines[1].split() == ["0", "1200.00", "1000.00", "+20.0%"]
    assert lines[3].endswith("(its surplus is measured)")
    assert not report({0: near, 1: near, 2: near, 3: far}, 0.25)[1]
    assert not report({0: Pair(1.3, 1.0)}, 0.25)[1]
    assert report({0: far}, 0.31)[1]


def tried() -> dict[int, Pair]:
    gpu_speed.SIZES[:], gpu_speed.UPDATED[:] = [1 << 10, 1 << 14], [256, 4096]
    gpu_speed.STEPS, gpu_speed.WARM_UP = 2, 2
    machine_timer.BUDGET_S = machine_timer.BESIDE_S = 0.01
    machine_timer.BUFFERS_BYTES = 1 << 16
    return gpu_speed.measured(SIZE, MixedPrecision("bf16"), torch.device("cpu"), None)


@pytest.mark.full
def test_ranks_measure_and_predict_the_same() -> None:
    first, second = run_ranks(tried, 2)
    assert first == second
    assert tuple(first) == STAGES
    numbers = [number for pair in first.values() for number in (pair.predicted_s, pair.measured_s)]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert first[ANCHOR].error > -1e-6  # its own surplus makes up for what its parts leave out


def test_one_rank_is_enough() -> None:
    [found] = run_ranks(tried, 1)
    assert tuple(found) == STAGES
