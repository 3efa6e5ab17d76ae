"""Candidates of `choose`: which rows are looked at, which are run, and why one is slower; and times between two
measured micro-batches."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from points import config_of_line

from orchestrator.config.schema import RunConfig
from orchestrator.config.state_groups import Offload
from orchestrator.wings.predict import choice, speed, take
from orchestrator.wings.predict.choice import Candidate, ShortRun, best_run
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.speed import Speed
from orchestrator.wings.predict.step import ConfigMemory, rules_of, with_micro
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace
from zero_runtime.predict.memory.device_overhead import NO_OVERHEAD
from zero_runtime.predict.memory.step_memory import Peak, StepMemory, StepPeaks, replay_states
from zero_runtime.predict.timing.step_time import StepSeconds
from zero_runtime.state_bytes import UnitSize

LINE = "precision=fp32 resources.device=cpu resources.ranks=2 batch.seq=10 batch.micro=1"
NO_PEAK = Peak(0, {}, 0, 0, 0, 0, 0, "")
UNITS = [(UnitSize(64, 64, trainable=True), MixedPrecision())]
MARKS = [(0, kind, 0) for kind in (Mark.BEFORE_FORWARD, Mark.AFTER_FORWARD, Mark.GRADIENT, Mark.AFTER_BACKWARD)]


def memory_of(config: RunConfig) -> ConfigMemory:
    rules = rules_of(config, {"state_bytes": 8.0})
    linear = LinearTrace(Trace(marks=list(MARKS)), [], 1, 100)
    states = replay_states(linear.trace, UNITS, rules, prefetch=1)
    return ConfigMemory(config, UNITS, rules, (StepMemory(linear, StepPeaks.of(linear, states), inputs=(80, 80)),))


def row(label: str, words: str, micro: int = 8) -> Fit:
    """A row that fits micro-batches up to `micro`."""
    memory = memory_of(config_of_line(f"{LINE} {words}"))
    return Fit(label, tuple(words.split()), (), memory, 0, NO_OVERHEAD, micro, micro, False, NO_PEAK, 0, 0, 0)


def timed(one: Candidate, **seconds: float) -> Candidate:
    parts = dict.fromkeys(StepSeconds.__dataclass_fields__, 0.0) | seconds
    time = StepSeconds(**parts)
    tokens = (one.config.batch.global_size or 0) * one.config.batch.seq
    return replace(one, speed=Speed(time, tokens / time.total_s))


def test_recomputation_is_looked_at_where_nothing_else_fits() -> None:
    plain, full = row("plain", "zero=stage1", micro=4), row("full", "zero=stage1 recompute=full", micro=16)
    other = row("other", "zero=stage2 recompute=full", micro=4)
    found = [(one.fit.label, one.micro) for one in choice.candidates([plain, full, other], [4, 16])]
    assert found == [("plain", 4), ("other", 4), ("full", 16)]


def test_the_words_of_a_candidate_have_its_micro_batch_once() -> None:
    one = Candidate(row("a", "zero=stage1 batch.micro=2 batch.accumulation=3"), 4)
    assert one.overrides == ("zero=stage1", "batch.micro=4", "batch.accumulation=3")
    assert one.config.batch.global_size == 4 * 3 * 2
    assert one.label == "a-micro4"


def test_what_is_near_the_fastest_is_run_and_at_most_so_many() -> None:
    fit = row("a", "zero=stage1")
    ranked = [timed(Candidate(fit, 1), model_s=seconds) for seconds in (1.0, 1.2, 1.3, 1.4, 9.0)]
    assert choice.shortlist(ranked, 4) == ranked[:3]  # 1 / 1.4 is below 0.75
    assert choice.shortlist(ranked, 2) == ranked[:2]


def test_of_each_row_the_fastest_micro_batch_is_shown() -> None:
    one, other = row("a", "zero=stage1"), row("b", "zero=stage2")
    ranked = [Candidate(one, 4), Candidate(other, 2), Candidate(one, 1)]
    assert choice.fastest_of_rows(ranked) == ranked[:2]


def test_the_reason_is_the_part_that_takes_the_most_additional_time_for_a_token() -> None:
    best = timed(Candidate(row("a", "zero=stage1"), 8), model_s=8.0, exposed_s=1.0)
    # A token takes as long in the model as before; waiting is no longer spread over as many.
    small = timed(Candidate(row("b", "zero=stage2"), 1), model_s=1.0, exposed_s=1.0, update_s=0.5)
    assert choice.reason(small, best) == "55.0% slower: waiting for collectives"
    assert small.speed is not None
    reaching = replace(small, speed=replace(small.speed, within=(1.0, best.tokens_per_second)))
    assert choice.reason(reaching, best) == "55.0% slower, a tie: waiting for collectives"
    assert choice.reason(best, best) == "the fastest by prediction"
    assert choice.reason(timed(Candidate(best.fit, 8), model_s=9.0), best) == "as fast by prediction"
    assert choice.reason(Candidate(best.fit, 1), best) == "not predicted"


def test_of_runs_that_tie_with_the_fastest_the_prediction_decides() -> None:
    fast, tied = ShortRun(1.0, 10.0), ShortRun(2.0, 8.0)
    slow = ShortRun(3.0, 8.5)  # predicted to be the fastest, and measured to be slower
    runs = {"fast": fast, "tied": tied, "slow": slow}
    assert best_run(runs, ["fast", "tied"]) == "tied"
    assert best_run(runs, ["fast"]) == "fast"
    equal = {"tied": tied, "fast": fast._replace(predicted=2.0)}
    assert best_run(equal, ["tied", "fast"]) == "fast"  # predictions are equal


ROWS = {"plain": "zero=stage1", "again": "zero=stage1 recompute=full", "more": "zero=stage3"}


@pytest.mark.parametrize(
    ("speeds", "first", "second", "by_speed"),
    [
        # No speed: the least work. Stage 3 sends more, and recomputation counts before what is sent.
        ({"again": None, "more": None, "plain": None}, "plain", "more", False),
        # One range alone reaches the fastest: it is taken, whatever it has to do.
        ({"plain": (10, 12), "more": (5, 9), "again": (20, 30)}, "again", "plain", True),
        # Ranges overlap: they are not told apart, and the one with less to do is taken.
        ({"plain": (10, 21), "more": (5, 9), "again": (20, 30)}, "plain", "again", False),
        # A row whose speed is not known cannot be told from the fastest.
        ({"plain": None, "again": (20, 30)}, "plain", "again", False),
        ({"again": (20, 30)}, "again", None, True),
    ],
)
def test_one_row_is_taken_by_speed_where_ranges_tell_and_else_by_the_least_work(
    speeds: dict[str, tuple[int, int] | None], first: str, second: str | None, by_speed: bool
) -> None:
    rows = []
    for name, ends in speeds.items():
        found = row(name, ROWS[name])
        one = Candidate(replace(found, sent_bytes=3 if name == "more" else 2), 8)
        timed_one = timed(one, model_s=1.0)
        assert timed_one.speed is not None
        middle = ends and replace(timed_one.speed, tokens_per_second=sum(ends) / 2, within=ends, rough=True)
        rows.append(replace(one, speed=middle))
    choice = take.taken(rows)
    assert choice.first.fit.label == first
    assert (choice.second and choice.second.fit.label) == second
    assert choice.by_speed == by_speed
    lines = {line.name: line.text for line in take.rows(choice)}
    assert lines["take"].startswith(f"{first}, micro-batch 8, 160 tokens a step")
    assert ("slower by prediction" in lines.get("second", "")) == (by_speed and second is not None)


def test_with_an_offload_the_larger_micro_batch_is_taken_before_less_recomputation() -> None:
    """The copies of a step are the same bytes for one sample as for fifteen."""
    few, many = (
        row("few", "zero=stage3 offload=optimizer_cpu", 1),
        row("many", "zero=stage2 offload=optimizer_cpu recompute=full", 15),
    )
    offloaded = [Candidate(replace(one, host_bytes=1), one.micro) for one in (few, many)]
    choice = take.taken(offloaded)
    assert [one.fit.label for one in (choice.first, choice.second) if one] == ["many", "few"]
    assert take.why_second(choice) == "its micro-batch is smaller, the first has 15"
    # Without an offload more recomputation is more work, whatever the micro-batch.
    assert take.taken([Candidate(one, one.micro) for one in (few, many)]).first.fit.label == "few"


# ---- times between measured micro-batches ----------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def know(config: RunConfig, *, without: str = "", **segments: tuple[float, float]) -> None:
    """Store costs of zero, and segments of a micro-batch (`micro4`) with the time of a real step of it."""
    free = {"points": [[0.0, 0.0]]}
    for job in speed.jobs(config):
        if job.kind not in ("segments", without):
            speed.store("here", [(job, {} if job.kind == "links" else free)])
    for name, (seconds, step_s) in segments.items():
        at = with_micro(config, int(name.removeprefix("micro")))
        job = next(one for one in speed.jobs(at) if one.kind == "segments")
        table = [*([int(kind), unit, [seconds]] for _, kind, unit in MARKS), [int(Mark.AFTER_BACKWARD), -1, [seconds]]]
        anchor = {
            "seconds": step_s,
            "marks": [[int(kind), unit] for _, kind, unit in MARKS],
            "segments": [seconds] * (len(MARKS) + 1),
            "units": [[asdict(size), asdict(kind)] for size, kind in UNITS],
        }
        speed.store("here", [(job, {"table": table, "anchor": anchor})])


def total(config: RunConfig, micro: int) -> float | None:
    at = with_micro(config, micro)
    found = speed.speed_of(memory_of(at), "here")
    return None if found is None else found.time.total_s


def test_times_between_two_measured_micro_batches_are_on_a_straight_line(cache: None) -> None:
    config = config_of_line(f"{LINE} zero=stage0")
    # The real steps took 0.5 s and 1.5 s more than their segments. One unit exchanges messages twice in each stage.
    know(config, micro4=(1.0, 5 * 1.0 + 0.5), micro8=(3.0, 5 * 3.0 + 1.5))
    assert total(config, 4) == pytest.approx(5 * 1.0 + 0.5)
    assert total(config, 5) == pytest.approx(5 * 1.5 + 0.75)
    assert total(config, 8) == pytest.approx(5 * 3.0 + 1.5)
    assert total(config, 9) is None  # beyond what was measured
    assert total(config, 3) is None


def test_the_real_step_is_predicted_with_its_own_collectives(cache: None) -> None:
    """A row of stage 0 sends no gathers; the real step that is measured next to its segments does."""
    config = config_of_line(f"{LINE} zero=stage0")
    know(config, micro4=(1.0, 5 * 1.0 + 0.3 + 2 * 0.2))
    start = {"points": [[0.0, 0.3]]}
    links = [job for job in speed.jobs(config) if job.kind == "links" and job.config.zero.stage == speed.ANCHOR_STAGE]
    speed.store("here", [(job, {"gather": {"start": start, "rest": {"points": [[0.0, 0.0]]}}}) for job in links])
    assert total(config, 4) == pytest.approx(5 * 1.0 + 2 * 0.2)  # two exchanges, 0.2 s each


def test_the_real_step_updates_with_adamw_on_the_device_whatever_the_configuration_does(cache: None) -> None:
    config = config_of_line(
        f"{LINE} zero=stage3 zero.shard_ranks=1 optimizer=adamw8bit offload=optimizer_cpu batch.accumulation=4"
    )
    one = speed.anchored(config)
    assert (one.zero.stage, one.zero.shard_ranks, one.batch.accumulation) == (speed.ANCHOR_STAGE, None, 1)
    assert (one.optimizer.rule.kind, one.offload) == ("adamw", Offload())
    assert [job.kind for job in speed.jobs(config)] == ["copies", "links", "links", "update", "update", "segments"]
    plain = config_of_line(f"{LINE} zero=stage2 optimizer=adamw")
    assert [job.kind for job in speed.jobs(plain)] == ["copies", "links", "update", "segments"]


def test_the_surplus_is_that_of_the_real_step_and_not_of_the_configured_optimizer(cache: None) -> None:
    """The slow update of a configuration is not taken for one of the real step, which would hide its surplus."""
    config = config_of_line(f"{LINE} zero=stage0 optimizer=adamw8bit")
    know(config, micro4=(1.0, 5 * 1.0 + 0.4))
    own, anchors = [job for job in speed.jobs(config) if job.kind == "update"]
    assert own.config.optimizer.rule.kind == "adamw8bit"
    speed.forget([own.config], "here")
    know(config, without="update", micro4=(1.0, 5 * 1.0 + 0.4))
    speed.store("here", [(own, {"points": [[0.0, 7.0]]}), (anchors, {"points": [[0.0, 0.0]]})])
    assert total(config, 4) == pytest.approx(5 * 1.0 + 7.0 + 0.4)


def test_with_one_rank_each_micro_batch_has_the_surplus(cache: None) -> None:
    config = config_of_line(f"{LINE} resources.ranks=1 zero=stage0 batch.accumulation=3")
    know(config, micro4=(1.0, 5 * 1.0 + 0.4))
    assert total(config, 4) == pytest.approx(3 * (5 * 1.0 + 0.4))


@pytest.mark.parametrize("kind", ["copies", "links", "update"])
def test_without_one_of_its_costs_nothing_is_predicted(cache: None, kind: str) -> None:
    config = config_of_line(f"{LINE} zero=stage0")
    know(config, without=kind, micro4=(1.0, 5.0))
    assert total(config, 4) is None
    assert {job.kind for job in speed.missing([with_micro(config, 4)], "here")} == {kind}


def test_parameters_in_a_scratch_file_are_not_predicted(cache: None) -> None:
    config = config_of_line(f"{LINE} zero=stage3 offload=optimizer_param_nvme")
    know(config, micro4=(1.0, 5.0))
    assert total(config, 4) is None
