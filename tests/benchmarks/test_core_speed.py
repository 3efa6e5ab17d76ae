"""What benchmarks/core_speed.py tells of times: what a process has of its own, and what follows the step."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks import core_speed


def test_what_a_process_has_of_its_own_is_told_apart_from_what_its_rounds_explain() -> None:
    generator = random.Random(1)
    own = [-0.03, 0.0, 0.03]
    found: list[core_speed.Logs] = [[] for _ in own]
    for _ in range(400):
        for process, more in zip(found, own, strict=True):
            speed = generator.gauss(0, 0.02)
            process.append([math.log(10) + speed, math.log(2) + speed + more, generator.gauss(0, 0.02)])
    step, follows, unlike = (core_speed.row_of(found, row) for row in range(3))
    # Means of 400 rounds that differ by 2 % have a standard deviation of 0.1 %; four of them are not seen by chance.
    assert (step["ms"], follows["ms"]) == (pytest.approx(10, rel=0.004), pytest.approx(2, rel=0.004))
    assert step["between"] < 0.004
    assert follows["between"] == pytest.approx(0.03, abs=0.004)
    assert follows["explained"] == pytest.approx(0.001, rel=0.3)
    assert (step["with_step"], follows["with_step"]) == (pytest.approx(1.0), pytest.approx(1.0))
    assert abs(unlike["with_step"]) < 4 / math.sqrt(400)
