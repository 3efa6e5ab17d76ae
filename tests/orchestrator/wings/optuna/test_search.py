"""`zlab search`: what its line means, and that all of its trials are one sweep, which continues when typed again."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from points import STUB, TINY

from orchestrator import cli
from orchestrator.commands import sweep as sweep_command
from orchestrator.config.strict import Refusal
from orchestrator.records import sweep_record
from orchestrator.records.run_state import RunState
from orchestrator.report import comparison
from orchestrator.report.screen import Screen
from orchestrator.wings.optuna import search, space
from orchestrator.wings.optuna.space import Searched
from orchestrator.wings.optuna.trials import Trial

HERE = Path(__file__).parents[2]
TYPES = {"optimizer.lr": float, "batch.micro": int | None, "optimizer.weight_decay": float}
needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs the extra `optuna`, which `dev` has"
)


@pytest.mark.parametrize(
    ("word", "expected", "is_log"),
    [
        ("optimizer.lr=1e-5..1e-3", Searched("optimizer.lr", (), 1e-5, 1e-3), True),
        ("optimizer.lr=.1..0.5", Searched("optimizer.lr", (), 0.1, 0.5), False),
        ("optimizer.weight_decay=0..1", Searched("optimizer.weight_decay", (), 0, 1), False),
        ("batch.micro=1..8", Searched("batch.micro", (), 1, 8, is_whole=True), False),
        ("batch.micro=1..64", Searched("batch.micro", (), 1, 64, is_whole=True), True),
        ("seed=-4..-1", Searched("seed", (), -4, -1, is_whole=True), False),
        ("zero=stage1,stage2", Searched("zero", ("stage1", "stage2")), False),
        ("batch.micro=1,2,2,4", Searched("batch.micro", ("1", "2", "4")), False),
    ],
)
def test_a_range_or_a_list_is_searched(word: str, expected: Searched, is_log: bool) -> None:
    line = space.read([word, "n=1", "precision=fp32"], TYPES)
    assert line.searched == (expected,)
    assert expected.is_log == is_log
    assert line.fixed == ("precision=fp32",)


@pytest.mark.parametrize("word", ["zero=stage2", "output=..", "data.path=../a", "model.path=..", "x=[1,2]", "x='a,b'"])
def test_one_value_is_fixed(word: str) -> None:
    line = space.read([word, "optimizer.lr=1e-5..1e-3", "n=7", "at_once=2", "by=step_ms"], TYPES)
    assert line.fixed == (word,)
    assert (line.trials, line.at_once, line.by) == (7, 2, "step_ms")
    assert line.words(["0.0001"]) == [word, "optimizer.lr=0.0001"]


@pytest.mark.parametrize(
    ("value", "one", "typed"),
    [
        (1.23456e-4, Searched("lr", (), 1e-5, 1e-3), "0.0001235"),
        (1.000049e-5, Searched("lr", (), 1.00004e-5, 1e-3), "1.00004e-05"),  # 1e-05 is outside
        (3, Searched("micro", (), 1, 8, is_whole=True), "3"),
        (4.0, Searched("micro", (), 0.5, 4), "4"),
    ],
)
def test_a_value_is_typed_with_few_digits_and_inside_its_range(value: float, one: Searched, typed: str) -> None:
    assert one.typed(value) == typed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("optimizer.lr=1e-5..", "expected a range with a number at both ends      fix: optimizer.lr=1e-5..1e-3"),
        ("optimizer.lr=..1e-3", "expected a range with a number at both ends"),
        ("optimizer.lr=a..b", "expected a range with a number at both ends"),
        ("optimizer.lr=1e-3..1e-5", "expected the smaller number first      fix: optimizer.lr=1e-5..1e-3"),
        ("optimizer.lr=1e-5..1e-3 n=0", "n=0: expected a whole number of trials, 1 or more      fix: n=20"),
        ("optimizer.lr=1e-5..1e-3 at_once=x", "at_once=x: expected a whole number of trials"),
        ("zero=stage2", "nothing to search: give a range or a list of values"),
        ("optimizer.lrr=1e-5..1e-3", "'optimizer.lrr' is not a setting. Did you mean 'optimizer.lr'"),
        ("optimizer.lr=1e-5..1e-3 zer=stage2", "Did you mean 'zero=stage2'"),
        ("optimizer.lr=1e-5..1e-3 zero=stage1,stage7", "zero has no option 'stage7'"),
        ("batch.micro=0.5..4", "batch.micro=0.5: expected a whole number"),
        ("optimizer.lr=1e-5..1e-3 by=loss", "by=loss: there is no metric 'loss'. Did you mean 'loss_last'"),
        ("optimizer.lr=1e-5..1e-3 --detach", "search has no --detach"),
    ],
)
def test_a_line_that_makes_no_search_is_refused(words: str, told: str) -> None:
    with pytest.raises(Refusal) as refused:
        search.main(words.split())
    assert told in str(refused.value)


@needs_optuna
def test_proposals_depend_only_on_the_trials_so_far() -> None:
    from orchestrator.wings.optuna.proposals import proposed

    line = space.read(["optimizer.lr=1e-5..1e-3", "batch.micro=1..64", "zero=stage1,stage2", "n=40"], TYPES)
    known: dict[tuple[str, ...], Trial] = {}
    outcomes = [(RunState.ok, 4.0), (RunState.oom, None), (RunState.error, None), (RunState.ok, math.nan)]
    for number in range(20):
        (values,) = proposed(line, known, 1, higher_first=False)
        assert proposed(line, dict(known), 1, higher_first=False) == [values]
        assert values not in known
        rate, micro, stage = values
        assert 1e-5 <= float(rate) <= 1e-3
        assert 1 <= int(micro) <= 64
        assert stage in ("stage1", "stage2")
        known[values] = Trial(str(number), *outcomes[number % len(outcomes)])
    assert len(set(proposed(line, known, 5, higher_first=True))) == 5


DIVERGED = "rank 0: NonFiniteError: step 3: the loss is nan"


@needs_optuna
@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Trial("", RunState.error, None, DIVERGED), "PRUNED"),  # the worst, like a point that does not fit
        (Trial("", RunState.oom, None, "out of memory"), "PRUNED"),
        (Trial("", RunState.error, None, "rank 0: KeyError: 'a'"), "FAIL"),
    ],
)
def test_a_diverged_trial_counts_as_the_worst_and_ends_no_search(
    outcome: Trial, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna

    from orchestrator.wings.optuna.proposals import proposed

    told: list[object] = []
    tell = optuna.Study.tell
    monkeypatch.setattr(optuna.Study, "tell", lambda *args, **more: (told.append(more["state"]), tell(*args, **more)))
    line = space.read(["optimizer.lr=1e-5..1e-3"], TYPES)
    known = {(f"{rate}e-5",): outcome for rate in (1, 2, 3)}
    assert proposed(line, known, 1, higher_first=False)
    assert told == [optuna.trial.TrialState[state]] * 3
    config: Any = None  # of what is measured: here nothing is
    under_way = search.Search(line, search.Asked("loss_last"), config, Screen())
    under_way._known = known
    assert under_way._fails() == ("NonFiniteError" not in outcome.message)


def test_a_fixed_value_of_a_setting_that_is_searched_is_named() -> None:
    line = space.read(["batch.micro=1", "batch.micro=1,2", "zero=stage2"], TYPES)
    assert (line.fixed, line.replaced) == (("zero=stage2",), ("batch.micro=1",))
    assert line.words(["2"]) == ["zero=stage2", "batch.micro=2"]


@needs_optuna
def test_what_can_no_longer_be_proposed_ends_the_search() -> None:
    from orchestrator.wings.optuna.proposals import proposed

    line = space.read(["zero=stage1,stage2", "batch.micro=1,2", "n=3"], TYPES)
    known = {(stage, micro): Trial("", RunState.ok, 1.0) for stage in ("stage1", "stage2") for micro in "12"}
    assert proposed(line, known, 1, higher_first=True) == []


def found_in(output: Path) -> tuple[sweep_record.SweepPaths, list[tuple[str, float | None]]]:
    """The only sweep, and its rows: the label and the last loss, or the speed, of each."""
    (sweep,) = sweep_record.all_sweeps(output)
    rows = comparison.ranked(sweep)
    return sweep, [(row.entry.label, row.entry.result["loss"]["last"] if row.entry.result else None) for row in rows]


def attempts(output: Path) -> int:
    return len(list(output.glob("points/*/attempts/*")))


@needs_optuna
@pytest.mark.full
def test_a_search_is_one_sweep_which_continues_when_it_is_typed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one CPU rank: two trials, then three of the same search, then the verb `resume` with nothing left to run."""
    monkeypatch.chdir(tmp_path)
    words = [*TINY.split(), "measure.steps=4", "optimizer.lr=1e-4..1e-1"]
    assert cli.main(["search", *words, "n=2"]) == 0
    shown = capsys.readouterr().out
    assert "2 trials by loss_last, lower first" in shown
    assert re.search(r"^warning: each trial makes \d steps, too few to choose optimizer.lr by", shown, re.MULTILINE)
    output = tmp_path / "out"
    sweep, rows = found_in(output)
    assert (len(rows), attempts(output)) == (2, 2)
    begun = [path.stat().st_mtime for path in output.glob("points/*/attempts/*/config.json")]
    assert json.loads(sweep.sweep.read_text())["time"] < min(begun), "the clock is that of all batches"
    assert cli.main(["search", *words, "n=3"]) == 0
    shown = capsys.readouterr().out
    assert "continues after 2 trials" in shown
    assert re.findall(r"^trial (\d):", shown, re.MULTILINE) == ["3"]
    again, rows = found_in(output)
    assert again == sweep
    assert (len(rows), attempts(output)) == (3, 3)
    losses = [value for _, value in rows if value is not None]
    assert losses == sorted(losses)
    assert f"best by last training loss: {rows[0][0]}" in shown
    assert "measured earlier" not in shown
    states = {one.state for one in sweep_record.standings(sweep)}
    assert states == {RunState.ok}, "the trials of all batches are this sweep's own, and none is reused"
    report = sweep.report.read_text()
    assert all(label in report and label in sweep.page.read_text() for label, _ in rows)
    best = comparison.ranked(sweep)[0].entry
    (proposed,) = re.findall(r"^next +(.*)$", shown, re.MULTILINE)
    assert shlex.split(proposed)[-3:] == ["measure=train", "train.max_steps=1000", "checkpoint=sharded"]
    assert set(shlex.split(proposed)) >= {one for one in best.overrides if one.startswith("optimizer.lr=")}
    assert cli.main(["resume", "last", "--output", "out"]) == 0
    assert not re.search("^trial ", capsys.readouterr().out, re.MULTILINE)
    assert attempts(output) == 3


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes points run the stub worker, whose speed depends on the stage."""
    run_quietly = sweep_command.run_quietly
    monkeypatch.setattr(
        sweep_command,
        "run_quietly",
        lambda request, *others: run_quietly(replace(request, entry=STUB, predicts=False), *others),
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("STUB_STEP_S", "0.0")


@needs_optuna
@pytest.mark.full
def test_trials_that_fail_or_do_not_fit_are_rows_and_the_best_is_still_proposed(
    tmp_path: Path, stub: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STUB_FAILING_STAGE", "1")
    monkeypatch.setenv("STUB_LACKING_MICRO", "2")
    words = [
        "zero=stage1,stage2,stage3",
        "batch.micro=1,2,3",
        "resources.device=cpu",
        "resources.ranks=1",
        "tracking=none",
        "measure=standard",
        "measure.min_s=0",
    ]
    assert cli.main(["search", *words, "n=8", "at_once=4", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (sweep,) = sweep_record.all_sweeps(tmp_path / "outputs")
    states = {one.label: one.state for one in sweep_record.standings(sweep)}
    assert document["sweep"] == sweep.name
    assert len(states) == 8
    assert {RunState.error, RunState.oom} <= set(states.values())
    assert cli.main(["search", *words, "n=8", "at_once=4"]) == 1
    shown = capsys.readouterr().out
    assert re.search(
        r"^fastest of the \d of 8 points that have an answer: a tie of .*stage3-micro1", shown, re.MULTILINE
    )
    assert re.search(r"^failed +\S.* retry ", shown, re.MULTILINE)
    assert re.search(r"^next +.*zero=stage3 batch.micro=1 measure=train", shown, re.MULTILINE)
    assert all(label in sweep.report.read_text() for label in states)


@needs_optuna
@pytest.mark.full
def test_a_search_whose_trials_all_fail_in_the_same_way_ends_early(
    tmp_path: Path, stub: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STUB_FAILING_STAGE", "2")
    words = ["zero=stage2", "optimizer.lr=1e-4..1e-1", "resources.device=cpu", "resources.ranks=1", "tracking=none"]
    assert cli.main(["search", *words]) == 1
    assert "3 trials in a row have no value for the same reason" in capsys.readouterr().out
    assert attempts(tmp_path / "outputs") == 3
