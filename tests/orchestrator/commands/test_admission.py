"""A single run is predicted before its ranks start; one that cannot fit is refused with what would fit."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from harness.patience import HANG_S
from points import STUB, make_config, make_point
from rich.console import Console

from orchestrator.commands.admission import Admission
from orchestrator.commands.run import run_point
from orchestrator.planning import decision
from orchestrator.planning.point import Point, Wishes
from orchestrator.records.record_file import read_json
from orchestrator.records.run_record import AttemptPaths
from orchestrator.report.screen import Screen
from orchestrator.text import paths
from orchestrator.wings.predict import counting_child, point_prediction, prediction
from orchestrator.wings.predict.point_prediction import PointPrediction
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.step_memory import Peak
from zero_runtime.state_bytes import StateBytes

HERE = Path(__file__).parents[1]
GIB = 1 << 30
PEAK = Peak(
    5 * GIB, {"params": GIB, "optimizer": GIB}, GIB, GIB, GIB, inputs=0, buffers=0, when="in the backward of h.0"
)
FITS = PointPrediction(StateBytes(GIB, GIB, GIB, 0), 10 * GIB, ranks_share=2, peak=PEAK)
TOO_LARGE = replace(FITS, limit_bytes=9 * GIB, remedies=("zero=stage3", "batch.micro=2"), advised=True)


@pytest.fixture(autouse=True)
def stub_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def run(
    monkeypatch: pytest.MonkeyPatch, output: Path, found: PointPrediction | None, *, prune: bool = True
) -> tuple[int, str, AttemptPaths]:
    """Runs a point of the stub worker with this prediction: the exit code, the output and the attempt."""

    def predicted(points: Sequence[Point], *_: object, **_within: float) -> dict[str, PointPrediction]:
        return {} if found is None else {points[0].label: found}

    monkeypatch.setattr(prediction, "predictions", predicted)
    out = io.StringIO()
    screen = Screen(Console(file=out, width=1000))
    point = make_point(make_config(output))
    code = run_point(point, entry=STUB, screen=screen, admission=Admission(prune=prune))
    (attempt,) = output.glob("points/*/attempts/*")
    return code, out.getvalue(), AttemptPaths(attempt)


def test_the_predicted_peak_and_the_limit_are_shown_before_the_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown, _ = run(monkeypatch, tmp_path, FITS)
    assert code == 0
    told = (
        "predicted  a peak of 5.00 GiB of tensors a rank, in the backward of h.0; the limit is 10.0 GiB for 2 ranks\n"
    )
    assert told in shown
    assert shown.index("== stage2-bf16") < shown.index(told) < shown.index("starting ranks")


def test_a_run_that_cannot_fit_starts_no_rank_and_is_recorded_in_the_words_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown, attempt = run(monkeypatch, tmp_path, TOO_LARGE)
    point = make_point(make_config(tmp_path))
    (of_a_sweep,) = decision.decide([point], tmp_path, lambda _: "cpu", Wishes(), {point.label: TOO_LARGE.brief()})
    state = read_json(attempt.state) or {}
    assert (code, state["state"], state["message"]) == (4, of_a_sweep.decision.value, of_a_sweep.reason)
    assert state["predicted"] == of_a_sweep.predicted
    assert f"{point.label}: pruned: needs 2 x 5.00 GiB" in shown
    assert "would fit: zero=stage3   or   batch.micro=2" in shown
    assert not list(attempt.root.glob("rank*"))
    # The next commands: with what would fit instead of what was typed, and as it was typed.
    program = paths.program()
    assert f"{program} precision=bf16 zero=stage3\n" in shown
    assert f"{program} zero=stage2 precision=bf16 --prune off" in shown


def test_a_refused_run_is_one_json_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prediction, "predictions", lambda points, *_, **__: {points[0].label: TOO_LARGE})
    point = make_point(make_config(tmp_path))
    assert run_point(point, entry=STUB, as_json=True, admission=Admission()) == 4
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["result"]) == ("pruned", None)
    assert document["message"].startswith("needs 2 x 5.00 GiB")


@pytest.mark.parametrize("found", [TOO_LARGE, None], ids=["prune off", "not predicted"])
def test_a_run_starts_if_it_is_not_to_be_pruned_or_cannot_be_predicted(
    found: PointPrediction | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown, _ = run(monkeypatch, tmp_path, found, prune=found is None)
    assert code == 0
    assert ("warning: needs 2 x 5.00 GiB" if found else "predicted  nothing: ") in shown


def test_a_line_says_what_the_prediction_lacks() -> None:
    on_gpus = replace(FITS, ranks_share=1, overhead=DeviceOverhead.on_cuda(8, 8))
    assert "CUDA, cuBLAS and NCCL 1.92 GiB to 2.70 GiB; the limit is 10.0 GiB" in point_prediction.expected(on_gpus)
    states_alone = point_prediction.expected(replace(FITS, peak=None, unknown="ValueError: no trace"))
    assert states_alone.startswith(
        "3.00 GiB of model states a rank; the limit is 10.0 GiB for 2 ranks; activations are"
    )
    assert "the limit is not known" in point_prediction.expected(replace(FITS, limit_bytes=None))
    plain = point_prediction.expected(replace(on_gpus, without_offload=10 * GIB))
    assert plain.endswith("; the offload is not needed: 10.0 GiB of 10.0 GiB without it")
    assert "offload" not in point_prediction.expected(replace(on_gpus, without_offload=10 * GIB + 1))


def test_a_child_that_is_slow_is_killed_in_time_and_the_run_is_not_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    slow = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(counting_child, "start_process", lambda *_, **__: slow)
    monkeypatch.setattr(counting_child, "_talk", lambda *_: time.sleep(HANG_S))
    begun = time.monotonic()
    assert prediction.predictions([make_point(make_config(tmp_path))], within_s=0.2) == {}
    assert time.monotonic() - begun < counting_child.TELL_S  # the wait for the next answer is cut short too
    assert slow.returncode is not None


JOINING = """
from dataclasses import replace
from test_admission import *
from orchestrator.wings.torchrun.join import join
prediction.predictions = lambda points, *_, **__: {points[0].label: TOO_LARGE}
raise SystemExit(join(make_point(make_config(Path(%r))), STUB, Admission()))
"""


@pytest.mark.full
def test_all_ranks_of_another_launcher_end_when_rank_0_refuses_the_run(tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1]), str(Path(__file__).parent)])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOINING % str(tmp_path)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    lead, other = (process.communicate(timeout=HANG_S)[0] for process in ranks)
    assert [process.returncode for process in ranks] == [4, 4]
    assert "would fit: zero=stage3" in lead
    assert other == ""
    (state,) = tmp_path.glob("points/*/attempts/01/state.json")
    assert (read_json(state) or {})["state"] == "pruned"


def test_on_several_machines_only_the_ranks_of_one_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = []

    def predicted(points: Sequence[Point], *_: object, **_within: float) -> dict[str, PointPrediction]:
        shared.append(prediction.target_here(points[0].config).ranks_share)
        return {}

    monkeypatch.setattr(prediction, "predictions", predicted)
    config = make_config(tmp_path)
    point = make_point(replace(config, resources=replace(config.resources, ranks=8)))
    screen = Screen(Console(file=io.StringIO()))
    for ranks_per_node in (None, 4):
        assert Admission(ranks_per_node=ranks_per_node).admits(point, None, screen)  # type: ignore[arg-type]
    assert shared == [8, 4]
