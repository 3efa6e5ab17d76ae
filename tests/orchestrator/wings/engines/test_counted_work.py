"""The counted work: checksums, messages against the ledger, references of a comparison, verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from work_runs import GLOBAL_SIZE, RANKS, Run, Work, config_of, entries_of

from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.schema import Measure, to_dict
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.point import Point
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import Scene
from orchestrator.records.run_record import point_id
from orchestrator.report.entry import Entry
from orchestrator.wings.engines.checksums import AT_ONCE, checksum, hexadecimal
from orchestrator.wings.engines.equality import LEAST, MULTIPLE, WorkVerdict, bounds, verdicts, work_key
from orchestrator.wings.engines.equality import STEPS as FIRST_STEPS
from orchestrator.wings.engines.plain import cost_text, variants
from zero_runtime.same_host import probe

STEPS = 4
LINE = (
    "-m model=llama_tiny data=synthetic tracking=none resources.device=cpu resources.ranks=2 batch.seq=16 "
    "batch.global_size=16 batch.micro=2 output=out "
)


# ---- checksums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_checksums_of_parts_add_up_and_tell_values_and_places_apart(dtype: torch.dtype) -> None:
    values = torch.arange(2 * AT_ONCE + 7).remainder(977).to(dtype)
    whole = hexadecimal([int(checksum(values))])
    assert hexadecimal(int(checksum(values[a:b], a)) for a, b in ((0, 5), (5, 3000), (3000, len(values)))) == whole
    changed, moved = values.clone(), values.clone()
    changed[-1] = 978
    moved[[3, 4]] = moved[[4, 3]]
    assert len({whole, *(hexadecimal([int(checksum(one))]) for one in (changed, moved, values[:-1]))}) == 4


# ---- the run -----------------------------------------------------------------------------------------------------


STAGES = {"zero": (0, 1, 2, 3), "ddp": (0,), "fsdp2": (1, 2, 3)}


@pytest.fixture(scope="module", params=("gloo", "shm"))
def entries(request: pytest.FixtureRequest, rows_over: Callable[[str], dict[str, Entry]]) -> dict[str, Entry]:
    """Rows of each engine's stages, and of plain PyTorch, with the same work."""
    return rows_over(request.param)


@pytest.fixture(scope="module")
def rows_over(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Entry]]:
    @cache
    def rows(comm: str) -> dict[str, Entry]:
        if comm == "shm" and (reason := probe.trouble()):
            pytest.skip(reason)
        work = Work()
        runs = [
            Run(f"{kind}{stage}", config_of(work, kind, stage, steps=STEPS))
            for kind, stages in STAGES.items()
            for stage in stages
        ]
        folder = tmp_path_factory.mktemp("runs")
        plain = entries_of(folder, [Run("plain", config_of(work, "plain", ranks=1, steps=STEPS))])
        return plain | entries_of(folder, runs, comm=comm)

    return rows


@pytest.mark.parametrize(("label", "halves"), [("zero0", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("ddp0", 2)])
def test_messages_are_those_of_theory_and_ours_those_of_the_ledger(
    entries: dict[str, Entry], label: str, halves: int
) -> None:
    """On two ranks and with P parameters: a rank sends P/2 in an all-gather or a reduce-scatter, and P in an
    all-reduce."""
    result = entries[label].result
    assert result is not None
    counted = [volume for by_dtype in result["work"]["messages"].values() for volume in by_dtype.values()]
    sums = {what: sum(one[what] for one in counted) for what in ("elements", "bytes")}
    reported = result["communication"]["data"].values()  # of our own rows: the ledger's
    assert sums == {what: sum(one[what] for one in reported) for what in sums}
    padding = result["communication"].get("padding_elements", 0)
    assert sums["elements"] == halves * result["model"]["parameters"] // 2 + padding


def sent_by(kind: str, result: dict[str, Any]) -> dict[str, Any]:
    """Of our own rows the elements and bytes by dtype: over gloo all of their messages are sends."""
    messages: dict[str, Any] = result["work"]["messages"]
    if kind != "zero":
        return messages
    dtypes = {dtype for by_dtype in messages.values() for dtype in by_dtype}
    found = {dtype: [one[dtype] for one in messages.values() if dtype in one] for dtype in dtypes}
    return {
        dtype: {what: sum(one[what] for one in volumes) for what in ("elements", "bytes")}
        for dtype, volumes in found.items()
    }


@pytest.mark.parametrize(("kind", "stage"), [(kind, stage) for kind, stages in STAGES.items() for stage in stages])
def test_an_engine_sends_the_same_over_memory_as_over_gloo(
    rows_over: Callable[[str], dict[str, Entry]], kind: str, stage: int
) -> None:
    results = {comm: rows_over(comm)[f"{kind}{stage}"].result or {} for comm in ("gloo", "shm")}
    sent = {comm: sent_by(kind, result) for comm, result in results.items()}
    assert sent["shm"] == sent["gloo"] != {}
    assert results["shm"]["work"]["control_bytes"] == results["gloo"]["work"]["control_bytes"] > 0
    losses = {comm: [step["loss"] for step in result["work"]["steps"]] for comm, result in results.items()}
    assert losses["shm"] == losses["gloo"]  # sums of two ranks have one order, so the same bits


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_sends_the_same_over_memory_as_over_gloo(tmp_path: Path, stage: int, precision: str) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'zero-lab[deepspeed]'")
    works = [
        (entries_of(tmp_path / comm, [run], comm=comm)["row"].result or {})["work"]
        for comm in ("gloo", "shm")
        for run in [Run("row", config_of(Work(precision), "deepspeed", stage, steps=STEPS))]
    ]
    assert works[0]["messages"] == works[1]["messages"] != {}
    assert works[0]["control_bytes"] == works[1]["control_bytes"]
    assert [step["loss"] for step in works[0]["steps"]] == [step["loss"] for step in works[1]["steps"]]


def test_equal_work_is_counted_alike_by_all(entries: dict[str, Entry]) -> None:
    works = {label: entry.result["work"] for label, entry in entries.items() if entry.result is not None}
    plain = works.pop("plain")
    assert len(plain["spread"]["loss"]) == len(plain["steps"]) == STEPS
    for work in works.values():
        assert (work["weights"], work["trained"]) == (plain["weights"], plain["trained"])
        for one, other in zip(work["steps"], plain["steps"], strict=True):
            assert (one["tokens"], one["sequences"]) == (other["tokens"], GLOBAL_SIZE)
            assert (one["updates"], one["micro_batches"]) == (1, RANKS)
    for work in [plain, *works.values()]:  # the same engine makes its first steps once more, with the same bits
        assert {key: work["late"][key] for key in ("steps", "trained", "messages")}.items() <= work.items()
    assert len({step["tokens"] for step in plain["steps"]}) == STEPS
    assert {label: one for label, one in verdicts(list(entries.values())).items() if not one.is_equal} == {}


def test_the_work_of_an_attempt_that_is_one_round_is_judged(tmp_path: Path) -> None:
    """Else the rows of a sweep that is stopped between its rounds would have no verdict."""
    measure = Measure(warmup_steps=FIRST_STEPS, steps=4, rounds=2, validation_batches=0)
    runs = [
        Run(kind, replace(config_of(Work(), kind, ranks=ranks), measure=replace(measure, rounds=ranks)))
        for kind, ranks in (("plain", 1), ("ddp", RANKS))
    ]
    found = entries_of(tmp_path, runs[:1]) | entries_of(tmp_path, runs[1:], short=True)
    assert [(entry.result or {})["steps"] for entry in found.values()] == [FIRST_STEPS + 4] * 2
    assert [len((entry.result or {})["rounds"][0]["step_ms"]) for entry in found.values()] == [4, 2]
    assert verdicts(list(found.values())) == {"plain": WorkVerdict(()), "ddp": WorkVerdict((), basis="plain")}


# ---- verdicts ----------------------------------------------------------------------------------------------------


STEP = {"tokens": "ab", "sequences": 4, "micro_batches": 2, "updates": 1, "loss": 4.0, "norm": 2.0}


def _row(label: str, kind: str, **changes: Any) -> Entry:
    """A row whose work is equal but for `changes`: of the first step, of the work, or of the dtypes."""
    steps = [{**STEP, **{key: one for key, one in changes.items() if key in STEP}}, *([STEP] * 5)]
    work: dict[str, Any] = {"weights": "aa", "trained": [3, "bb"], "steps": steps, "messages": {}, "control_bytes": 0}
    dtypes = {"params": {"bf16": 8}, "master": {"fp32": 8}, "grads": {"fp32": 8}, "exp_avg": {"fp32": 8}}
    work |= {key: one for key, one in changes.items() if key in work}
    dtypes |= {key: one for key, one in changes.items() if key in dtypes}
    work["late"] = {**work, "steps": steps[:5], "dtypes": dtypes} | changes.get("late", {})
    if kind == "plain":
        work["spread"] = {"loss": [1e-3, 1e-4, 5e-3, 1e-3, 1e-3, 2e-2], "norm": [1e-2] * 6}
    config = to_dict(config_of(Work("bf16", 2), kind))
    return Entry(label, "ok", {"work": work, "dtypes": dtypes}, config=config)


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "equal": ({}, ()),
    "weights": ({"weights": "ab"}, ("other first weights",)),
    "fewer trained": ({"trained": [2, "bb"]}, ("trains 2 parameters, not 3",)),
    "others trained": ({"trained": [3, "bc"]}, ("trains other parameters",)),
    "tokens": ({"tokens": "ac"}, ("other tokens at step 1",)),
    "sequences": ({"sequences": 3}, ("3 sequences, not 4 at step 1",)),
    "micro-batches": ({"micro_batches": 4}, ()),
    "updates late": (
        {"late": {"steps": [{**STEP, "updates": 0}, *[STEP] * 4]}},
        ("update 1 skipped after the last timed step",),
    ),
    "moments late": (
        {"late": {"dtypes": {"exp_avg": {"bf16": 4}, "master": {"fp32": 8}}}},
        ("moments in bf16 after the last timed step",),
    ),
    "messages late": (
        {"late": {"messages": {"send": {"fp32": {}}}}},
        ("sends other messages after the last timed step",),
    ),
    "updates": ({"updates": 2}, ("2 updates, not 1 at step 1",)),
    "skipped": ({"updates": 0}, ("update 1 skipped",)),
    "near": ({"loss": 4.0 * (1 + 0.99 * MULTIPLE * 5e-3)}, ()),
    "far": ({"loss": 4.0 * (1 + 1.01 * MULTIPLE * 5e-3)}, ("loss off by 2e-2 at step 1",)),
    "not a number": ({"loss": float("nan")}, ("loss off by everything at step 1",)),
    "norm": ({"norm": 1.0}, ("norm off by 5e-1 at step 1",)),
    "no norm": ({"norm": None}, ()),
    "no masters": ({"master": {}}, ("masters in bf16",)),
    "moments": ({"exp_avg": {"bf16": 4}}, ("moments in bf16",)),
    "gradients": ({"grads": {"bf16": 4}}, ("gradients in bf16",)),
    "gradients beside their sum": ({"grads": {"fp32": 8, "bf16": 4}}, ()),
    "sent": ({"messages": {"all_reduce": {"bf16": {}}, "all_gather": {"bf16": {}}}}, ("gradients sent in bf16",)),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict_names_what_differs(case: str) -> None:
    changes, differences = CASES[case]
    rows = [_row("reference", "plain"), _row("row", "ddp", **changes)]
    assert verdicts(rows) == {"reference": WorkVerdict(()), "row": WorkVerdict(differences, basis="reference")}


def test_without_a_plain_run_rows_are_compared_with_ours_and_the_verdict_says_so() -> None:
    rows = [_row("theirs", "ddp"), _row("ours", "zero"), _row("others", "fsdp2", updates=0)]
    found = verdicts(rows)
    assert {label: one.basis for label, one in found.items()} == {"theirs": "ours", "ours": "", "others": "ours"}
    assert [label for label, one in found.items() if not one.is_equal] == ["others"]


def test_a_row_is_judged_by_the_plain_run_of_its_own_interpreter() -> None:
    rows = [_row(f"{kind} {python}", kind, loss=loss) for python, loss in (("old", 4.0), ("new", 8.0))
            for kind in ("plain", "ddp")]  # fmt: skip
    rows = [replace(row, config={**row.config, "engine": {**row.config["engine"], "python": row.label.split()[1]}})
            for row in rows]  # fmt: skip
    found = verdicts(rows)
    assert {label: one.basis for label, one in found.items() if one.basis} == {
        "ddp old": "plain old",
        "ddp new": "plain new",
    }
    assert all(one.is_equal for one in found.values())


def test_work_that_was_not_counted_to_the_end_is_not_equal() -> None:
    row = Entry("old", "ok", {"dtypes": {}}, config=to_dict(config_of(Work(), "zero")))
    assert not verdicts([row])["old"].is_equal
    earlier = _row("old", "ddp")  # of an earlier version
    assert earlier.result is not None
    del earlier.result["work"]["late"]
    found = verdicts([_row("reference", "plain"), earlier])
    assert (found["reference"].is_equal, found["old"].is_equal) == (True, False)


@pytest.mark.parametrize("rows", [("ddp",), ("ddp", "differs"), ("zero", "differs")])
def test_work_that_nothing_confirms_is_not_known_to_be_equal(rows: tuple[str, ...]) -> None:
    """A single row, and one from which all others differ, so that either may be wrong."""
    entries = [_row(one, "fsdp2", updates=0) if one == "differs" else _row(one, one) for one in rows]
    verdict = verdicts(entries)[rows[0]]
    assert verdict == WorkVerdict((), "there is no reference to compare its work with")


def test_bounds_follow_the_spread_and_are_never_below_those_of_fp32() -> None:
    config = to_dict(config_of(Work("bf16"), "ddp"))
    basis = {"steps": [{}] * 7, "spread": {"loss": [0.1, 0.2, 0.1, 0.1, 0.1, 0.3, 0.1], "norm": [0.0] * 7}}
    assert bounds(config, basis, "loss") == pytest.approx(
        [MULTIPLE * one for one in (0.2, 0.2, 0.2, 0.2, 0.2, 0.3, 0.3)]
    )
    assert bounds(config, basis, "norm") == [LEAST["norm"]] * 7
    basis["spread"]["norm"] = [0.0] * 5 + [0.26, 0.0]  # from where norms have parted, losses alone are judged
    assert bounds(config, basis, "norm") == [LEAST["norm"]] * 5 + [math.inf] * 2
    assert bounds(config, basis, "loss")[-1] == pytest.approx(MULTIPLE * 0.3)
    # Without a spread the first steps are judged, by roundings of bf16.
    assert bounds(config, {"steps": [{}] * 7}, "loss") == [2.0**-8] * 5 + [2.0**-4] * 2


@pytest.mark.parametrize(("precision", "expected"), [("fp32", {1}), ("bf16", {1, GLOBAL_SIZE // RANKS})])
def test_the_spread_has_the_largest_micro_batch_of_a_row_in_16_bits(precision: str, expected: set[int]) -> None:
    """A row at its limit sums more sequences in 16 bits than the reference does, and all such rows were refused."""
    config = config_of(Work(precision), "plain", ranks=1)
    own = next(size for size in range(2, GLOBAL_SIZE) if GLOBAL_SIZE % size == 0 and size not in expected)
    batch = replace(config.batch, micro=own, accumulation=GLOBAL_SIZE // own)
    found = variants(replace(config, batch=batch)).values()
    assert {one.batch.micro for one in found} - {own} == expected
    assert all(one.batch.micro * one.batch.accumulation == GLOBAL_SIZE for one in found)


# ---- references --------------------------------------------------------------------------------------------------


def _points(words: str) -> list[Point]:
    found, lines = judged(composed(arguments.split([*LINE.split(), *words.split()])), Scene(Hardware(4, "a CPU")))
    assert not lines
    return [one for one in found if isinstance(one, Point)]


def test_each_work_gets_one_plain_run_whose_words_repeat_it() -> None:
    points = _points("engine=zero,ddp zero=stage0,stage2 precision=fp32,bf16 measure=standard")
    references = [point for point in points if point.config.engine.kind == "plain"]
    assert points[:2] == references
    assert [point.label for point in references] == ["plain-fp32", "plain-bf16"]
    for point in references:
        batch, measure = point.config.batch, point.config.measure
        assert (point.config.ranks, batch.micro, batch.accumulation, batch.global_size) == (1, 2, 8, 16)
        assert (measure.rounds, measure.warmup_steps, measure.steps) == (1, 20, 60)  # so the same learning rates
        assert point.config.resources.threads == 4
        (again,) = judged(composed(arguments.split(list(point.overrides))), Scene(Hardware(4, "a CPU")))[0]
        assert isinstance(again, Point)
        assert again.config == point.config
        same = [one for one in points if work_key(to_dict(one.config)) == work_key(to_dict(point.config))]
        assert len(same) == 4  # the plain run, two stages of ours, and DDP once
    assert all(point.config.engine.counted for point in points)


def test_a_plan_says_what_the_reference_adds_and_a_word_leaves_it_out() -> None:
    line = "engine=zero,ddp zero=stage0 precision=bf16 measure=standard"
    reference, *others = _points(line)
    # 20 + 60 steps, and 20 each in micro-batches of 1 and of half of the 16 sequences, in fp32 and in autocast.
    assert cost_text(reference.config).startswith(
        "80 steps of plain PyTorch, and 80 more (in micro-batches of 1, in micro-batches of 8, in fp32, in autocast) "
    )
    assert "together those of 2.0 rows" in cost_text(reference.config)
    alone = _points(f"{line} measure.reference=false")
    ids = [[point_id(to_dict(one.config), one.config.ranks, "a CPU") for one in rows] for rows in (alone, others)]
    assert ids[0] == ids[1], "rows that were measured beside a reference count"


def test_one_point_alone_or_beside_a_plain_run_gets_none() -> None:
    assert [point.config.engine.kind for point in _points("engine=ddp zero=stage0 precision=fp32")] == ["ddp"]
    assert all(point.config.engine.is_own for point in _points("zero=stage0,stage1 precision=fp32"))
