"""The benchmark of repetitions: what it calls one answer, and what its two reports say."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import rank_repeats

WORDS = (
    "model=llama_tiny data=synthetic zero=stage1 precision=fp32 resources.device=cpu resources.ranks=1 "
    "resources.threads=1 batch.seq=16 batch.micro=1 measure.validation_batches=0 measure.warmup_steps=2 "
    "measure.steps=24 measure.rounds=6"
)


def point(label: str, place: int, medians: list[float]) -> dict[str, Any]:
    rounds = [{"number": number, "step_ms": [ms], "others_share": 0.2} for number, ms in enumerate(medians)]
    return {"label": label, "place": place, "result": {"rounds": rounds, "batch": {"tokens_per_step": 1}}}


def test_the_answer_of_a_sweep_is_its_winner_or_its_tie() -> None:
    points = [point("b", 1, [1.0]), point("a", 1, [1.0]), point("c", 3, [1.0])]
    assert rank_repeats.winners(points) == ["a", "b"]


def test_the_noise_is_told_apart_by_where_it_is() -> None:
    generator = random.Random(3)
    sweeps = []
    for _ in range(60):
        weather = [100 * (1 + generator.gauss(0, 0.05)) for _ in range(6)]
        mine = [[turn * (1 + generator.gauss(0, 0.01)) for turn in weather] for _ in range(4)]
        mine[0].append(1000.0)  # a faster point has rounds that the others do not have
        sweeps.append([point(label, 1, medians) for label, medians in zip("abcd", mine, strict=True)])
    found = rank_repeats.noise([rank_repeats.numbers(points[1:]) for points in sweeps])
    # The median of estimates from 6 values each is below the true value by up to 7 %.
    assert found["within"] == pytest.approx(0.051, rel=0.2)
    assert found["paired"] == pytest.approx(0.01 * (2 / 3) ** 0.5, rel=0.2)
    assert found["between"] < found["within"]
    assert found["others"] == 0.2
    together = rank_repeats.noise([rank_repeats.numbers(points) for points in sweeps])
    assert together["paired"] == pytest.approx(0.01 * (3 / 4) ** 0.5, rel=0.2)


def test_rounds_belong_together_by_their_numbers() -> None:
    one = rank_repeats.numbers([point("a", 1, [1.0, 2.0, 4.0, 8.0]), point("b", 2, [2.0, 4.0, 8.0, 16.0])])
    one["b"] |= {key: one["b"][key][1:] for key in ("rounds", "rounds_ms", "others")}  # its first round is left out
    assert rank_repeats.noise([one])["paired"] == pytest.approx(0.0)


def test_the_reference_work_is_told_by_point() -> None:
    sweeps = [{"a": {"reference_ms": [1.0, 1.5]}, "b": {"reference_ms": [2.0]}}, {"a": {"reference_ms": [1.6]}}]
    told = "- reference work next to a step (median over the rounds): a 1.50 ms, b 2.00 ms"
    assert rank_repeats.reference_line(sweeps) == told


def test_repetitions_that_a_file_has_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def swept(words: Sequence[str], output: Path) -> list[dict[str, Any]]:
        made.append(len(made))
        return [point("a", 1, [1.0, 1.1, 1.2]), point("b", 2, [2.0, 2.1, 2.3])]

    monkeypatch.setattr(rank_repeats, "swept", swept)
    file = tmp_path / "kept.jsonl"
    rank_repeats.repeated(2, [], rank_repeats.Kept(file))
    lines, held = rank_repeats.repeated(3, [], rank_repeats.Kept(file))
    assert (len(made), lines[0][:43], held) == (3, "- the same answer in 3 of 3 repetitions of ", True)


def test_a_step_of_the_slower_checkout_takes_that_share_longer() -> None:
    class Clock:
        now, entered, lasted = 0.0, list[float](), list[float]()

    class ZeroRuntime:
        def step(self) -> None:
            Clock.lasted.append(Clock.now - Clock.entered[-1])

    def perf_counter() -> float:
        Clock.now += 1e-6
        return Clock.now

    named = {"ZeroRuntime": ZeroRuntime}
    exec(rank_repeats.SLOWER.replace("{share}", "0.05"), named)
    runtime = ZeroRuntime()
    with mock.patch("time.perf_counter", perf_counter):
        for number in range(12):
            Clock.now += 5.0 if number == 6 else 0.1  # forward and backward; once it waits for its turn before
            Clock.entered.append(Clock.now)
            runtime.step()
    assert Clock.lasted == pytest.approx([0.0, *[0.005] * 11], abs=5e-5)


@pytest.mark.full
def test_a_comparison_of_four_checkouts_comes_to_its_report() -> None:
    """How many tries find the slowdown depends on the machine's load; the benchmark measures that."""
    lines, _ = rank_repeats.slowdowns(1, 1.0, WORDS.split(), rank_repeats.Kept(None))
    assert re.match(r"- a slowdown of 100% is found in [012] of 2 tries \(threshold 5%\)", lines[1]), lines
    assert re.match(r"- equal checkouts: one is called slower in [012] of 2 tries", lines[2]), lines
