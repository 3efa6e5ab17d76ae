"""`calibrate` and `choose` with measurements that are made up: what they measure, rank, run and write."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.warm_shapes import WarmShapes
from measured import Measured

from orchestrator import cli
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.machine import hardware
from orchestrator.report.entry import Entry
from orchestrator.report.ranking import Ranked, rank
from orchestrator.wings.predict import calibrate, choose, counting_child, speed
from orchestrator.wings.predict.speed import TimingJob

TEXT = (
    "model=llama_tiny model.config.num_hidden_layers=2 model.config.hidden_size=32 model.config.intermediate_size=48 "
    "model.config.num_attention_heads=2 model.config.num_key_value_heads=2 batch.seq=16 precision=fp32 "
    "resources.device=cpu resources.ranks=2 resources.threads=1 tracking=none"
)
LINE = TEXT.split(" ")
PLAIN = (*LINE, "recompute=none", "loss=full")  # fewer traces
ROUNDS = (0.9, 0.94, 0.98, 1.02, 1.06, 1.1)  # the speed of each, by that of the run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    found = Measured()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)
    monkeypatch.setattr(calibrate, "measure", found)
    monkeypatch.setattr(
        calibrate, "BUDGET_S", math.inf
    )  # made-up answers wait for counts, and these for other processes
    return found


def run_as(
    monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float], code: int = 0, shares: Sequence[float] = ROUNDS
) -> list[str]:
    """Give `choose` runs with these speeds by label; the others fail. code: of their sweep. shares: the speed of each
    round, by that of the run. Returns the labels, once they have run."""
    ran: list[str] = []

    def swept(request: Any, *_: Any) -> tuple[int, str]:
        ran.extend(point.label for point in request.points)
        return code, "a sweep"

    def ranked(_sweep: str) -> list[Ranked]:
        return rank([Entry(label, "ok" if label in speeds else "error", result(label)) for label in dict.fromkeys(ran)])

    def result(label: str) -> dict[str, Any] | None:
        if label not in speeds:
            return None
        rounds = [{"number": at, "step_ms": [1e3 / speeds[label] / share]} for at, share in enumerate(shares)]
        speed = {"tokens_per_second": {"median": speeds[label]}}
        return {"throughput": speed, "rounds": rounds, "batch": {"tokens_per_step": 1}}

    monkeypatch.setattr(choose, "swept", swept)
    monkeypatch.setattr(choose.comparison, "ranked", ranked)
    return ran


def test_calibrate_measures_once_and_shows_the_speed_of_each_point(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", *LINE, "batch.micro=2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in rows] == ["stage0", "stage1", "stage2", "stage3"]
    by_label = {row["label"]: row["speed"]["tokens_per_second"] for row in rows}
    assert by_label["stage0"] < by_label["stage1"] == by_label["stage2"]  # a rank of stage 0 updates everything
    # Links without shards and with; copies, the update and the segments serve all stages.
    assert measured.kinds == speed.ROUNDS * ["copies", "links", "links", "update", "segments"]
    assert all(row["rounds"] == [row["speed"]["tokens_per_second"]] * 2 for row in rows)  # made-up rounds are equal
    measured.kinds.clear()
    assert cli.main(["calibrate", *LINE, "batch.micro=2"]) == 0
    assert measured.kinds == []
    assert "tokens/s" in capsys.readouterr().out
    assert cli.main(["calibrate", *LINE, "batch.micro=2", "--fresh", "--json"]) == 0
    assert len(measured.kinds) == speed.ROUNDS * 5


def test_rounds_become_the_median_of_each_number_and_load_is_warned_of(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = ({"points": [[0.0, one], [8.0, 2 * one]], "units": [3]} for one in (5.0, 1.0, 2.0))
    assert speed.typical([first, second, third]) == {"points": [[0.0, 2.0], [8.0, 4.0]], "units": [3]}
    assert speed.typical([first, {"points": []}]) == {"points": []}  # other places: the last
    shares = iter((0.01, 0.4, 0.02))

    def loaded(*words: Any, on_load: Callable[[float], None], **_: Any) -> int:
        on_load(next(shares))
        return measured(*words)

    monkeypatch.setattr(calibrate, "measure", loaded)
    assert cli.main(["calibrate", *LINE, "zero=stage1", "batch.micro=2", "--fresh"]) == 0
    out = capsys.readouterr().out
    assert "measured 4 parts of a step in 3 rounds, " in out
    assert "warning: other processes took up to 40% of the cores while this was measured" in out


@pytest.mark.parametrize("verb", ["calibrate", "choose"])
def test_an_interrupted_calibration_goes_on_where_it_was_and_has_its_range(
    measured: Measured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
) -> None:
    line = [verb, *PLAIN, "zero=stage1", "batch.micro=2", f"output={tmp_path}", *["--runs=0"] * (verb == "choose")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept, factors = measured.kinds, iter((2.0, 4.0))

    def torn(jobs: Sequence[TimingJob], *words: Any, **_: Any) -> int:
        """Ctrl-C in the second round, when two of its four parts are there."""
        measured.factor = 1.0 if len(kept) < len(jobs) else 2.0
        measured(jobs if len(kept) < len(jobs) else jobs[:2], *words)
        if len(kept) > len(jobs):
            raise KeyboardInterrupt
        return len(jobs)

    def whole(jobs: Sequence[TimingJob], *words: Any, **_: Any) -> int:
        measured.factor = next(factors)
        return measured(jobs, *words)

    monkeypatch.setattr(calibrate, "measure", torn)
    assert cli.main(line) == 130
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith(f" {' '.join(line)}     # what was measured is kept")
    assert kept == ["copies", "links", "update", "segments", "copies", "links"]
    kept.clear()
    monkeypatch.setattr(calibrate, "measure", whole)
    assert cli.main([*line, "--json"]) == 0
    assert kept == ["update", "segments", "copies", "links", "update", "segments"]
    found = json.loads(capsys.readouterr().out)
    speed_of = found[0]["speed"] if verb == "calibrate" else found["rows"][0]["predicted"]
    # All parts of the made-up step that take time are those of the rounds 1, 2 and 4 times as slow.
    low, high = speed_of["tokens_per_second_within"]
    assert (high / speed_of["tokens_per_second"], speed_of["tokens_per_second"] / low) == pytest.approx((2.0, 2.0))
    assert cli.main(line) == 0
    assert len(kept) == 6, "nothing is measured again"
    assert speed_of["text"] in capsys.readouterr().out


def test_a_plan_shows_the_speed_of_what_was_measured(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", *LINE, "zero=stage1", "batch.micro=2"]) == 0
    assert cli.main(["-m", *LINE, "zero=stage1,stage3", "batch.micro=2,5", "--plan", "--json"]) == 0
    points = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ["speed" in point["predicted"] for point in points] == [True, False, True, False]


def test_choose_runs_the_fastest_by_prediction_and_takes_the_fastest_run(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choose, "FIRST", (1, 4))
    monkeypatch.setattr(choose, "LONGEST_S", 0.0)
    ran = run_as(monkeypatch, {"stage2-micro4": 9.0, "stage3-micro4": 5.0})
    code = cli.main(["choose", *PLAIN, f"output={tmp_path}", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, (ran, err)
    found = json.loads(out)
    assert sorted(ran) == ["stage1-micro4", "stage2-micro4", "stage3-micro4"]  # stage 0 updates everything
    assert found["chosen"] == "stage2-micro4"
    words = ["--config-dir", found["config_dir"], f"experiment={found['experiment']}"]
    values = composed(arguments.split(words)).points[0].values
    assert (values["zero"]["stage"], values["batch"]["micro"]) == (2, 4)
    assert values["model"]["config"]["hidden_size"] == 32
    monkeypatch.setattr(choose, "FIRST", (1, 16))
    run_as(monkeypatch, {"stage1-micro16": 9.0})
    assert cli.main(["choose", *PLAIN, f"output={tmp_path}", "train.tokens=3240"]) == 0
    out = capsys.readouterr().out
    # The line's own micro-batch is 4; 9 tokens/s make 3,240 tokens in 0.1 h.
    assert "\nlearning  512 tokens a step, 128 tokens before: fewer updates" in out
    assert re.search(r"^job +3,240 tokens are 7 steps and 0.1 h$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "ended", "code", "told"),
    [
        ((), 130, 130, "# runs that have ended are not repeated"),
        (("cluster=slurm", "resources.memory_mib=2000"), 0, 3, "# chooses when the jobs have ended"),
    ],
)
def test_choose_without_its_runs_proposes_its_own_line(
    measured: Measured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    ended: int,
    code: int,
    told: str,
) -> None:
    run_as(monkeypatch, {"stage1-micro2": 9.0}, ended)
    monkeypatch.setattr(choose, "cluster_of", lambda _sweep: SimpleNamespace(runs=lambda _one: True))
    monkeypatch.setattr(hardware, "shutil", SimpleNamespace(which=lambda _tool: "/usr/bin/sbatch"))
    line = ["choose", *PLAIN, "batch.micro=2", f"output={tmp_path}", *words]
    assert cli.main(line) == code
    out = capsys.readouterr().out
    (after,) = [one for one in out.splitlines() if one.startswith("next ")]
    assert after.endswith(f" {' '.join(line)}     {told}")
    assert "\ntake " not in out
    if words:  # what was measured here is not the speed of the cluster's nodes
        assert measured.kinds == []


def test_choose_breaks_ties_of_its_runs_by_the_prediction(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_as(monkeypatch, {"stage1-micro2": 8.2, "stage2-micro2": 9.0, "stage0-micro2": 9.1, "stage3-micro2": 5.0})
    monkeypatch.setattr(choose.choice, "NEAR", 0.0)  # stage 0 is predicted to be slower and is run too
    line = ["choose", *PLAIN, "batch.micro=2", f"output={tmp_path}"]
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == "stage2-micro2"  # predicted as fast as stage 1, and measured faster
    assert sorted(found["tied"]) == ["stage0-micro2", "stage1-micro2", "stage2-micro2"]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^take +stage2, micro-batch 2, .*the fastest by prediction of 3 that tie in 4 short runs", out, re.MULTILINE
    )
    assert re.search(r"^second +stage1, micro-batch 2, .* a tie, 8.20 tokens/s measured$", out, re.MULTILINE)
    assert re.search(
        r"^decided +the prediction, .* apart; the ranges of the predictions overlap, too$", out, re.MULTILINE
    )
    assert "learning " not in out  # the batch is the one that was given


def test_choose_says_that_runs_of_too_few_rounds_are_not_ranked(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_as(monkeypatch, {"stage1-micro2": 8.0, "stage2-micro2": 9.0}, shares=(1.0,))
    line = ["choose", *PLAIN, "batch.micro=2", f"output={tmp_path}"]
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["chosen"], found["second"], found["tied"]) == ("stage2-micro2", "stage1-micro2", [])
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert "chosen: the most tokens/s, not ranked" in out
    assert re.search(
        r"^take .*: the most tokens/s of 2 short runs with too few rounds to rank, 9.00", out, re.MULTILINE
    )
    assert re.search(r"^decided +tokens/s of too few rounds to rank: measure=standard", out, re.MULTILINE)
    assert "slower, " not in out
    assert "fastest of" not in out


def test_choose_keeps_a_given_micro_batch_and_only_predicts_without_runs(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_as(monkeypatch, {})
    assert cli.main(["choose", *PLAIN, "batch.micro=2", f"output={tmp_path}", "--runs", "0"]) == 0
    out = capsys.readouterr().out
    assert ran == []
    assert "no run has confirmed it" in out
    assert "micro-batch at least 8192 fits" in out  # the largest of all rows, whatever is given
    assert f"--config-dir {tmp_path}" in out


def test_choose_fails_if_no_run_ends_with_a_result(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_as(monkeypatch, {})
    assert cli.main(["choose", *PLAIN, "batch.micro=2", f"output={tmp_path}"]) == 1
    assert "none of the short runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("calibrate", "--plan"), "calibrate has no --plan"),
        (("choose", "--runs", "-1"), "expected 0 or more"),
        (("choose", "--detach"), "choose has no --detach"),
        (("choose", "batch.micro=1,2"), "expected one number"),
        (("choose", "batch.micro=0"), "expected one number"),
        (("choose", "measure=train", "train.max_steps=9"), "measure=train trains to its end"),
    ],
)
def test_lines_that_cannot_be_measured_here_are_refused(
    measured: Measured, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    assert cli.main([words[0], *LINE, *words[1:]]) == 2
    assert why in capsys.readouterr().err
    assert measured.kinds == []
