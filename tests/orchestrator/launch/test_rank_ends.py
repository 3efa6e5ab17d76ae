"""In a real run, a failing rank is detected by the runtime's watch and reported by the command with step and place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.patience import HANG_S
from points import make_config, make_point

from orchestrator import cli
from orchestrator.commands.run import tell
from orchestrator.config.schema import to_dict
from orchestrator.launch.rank import RankRecord, load_entry
from orchestrator.launch.verdict import Verdict
from orchestrator.records.run_record import new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.report.screen import Screen
from orchestrator.wings.pairs.pairs_file import read_pairs
from zero_runtime.checkpoint.files import opened

ROOT = Path(__file__).resolve().parents[3]
LINE = (
    "model=llama_tiny data=synthetic zero=stage3 precision=fp32 tracking=none resources.device=cpu resources.ranks=2 "
    "resources.threads=1 batch.seq=16 batch.micro=1 measure.validation_batches=0 resources.stuck_s=8"
)


@pytest.mark.full
def test_what_a_rank_finds_wrong_with_a_file_is_told_in_the_errors_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("too short")
    words = [word for word in LINE.split() if word not in ("data=synthetic", "measure.validation_batches=0")]
    assert cli.main([*words, "data=text", f"data.path={file}", f"output={tmp_path / 'out'}"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"error: rank [01]: ValueError: data: expected at least 34 bytes", told)
    assert "its traceback is in " in told
    assert 'File "' not in told


def raised_by(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  any error may end a rank
        function()
    return caught.value


@pytest.mark.parametrize(
    ("function", "explained"),
    [
        (lambda: read_pairs(Path(os.devnull)), True),
        (lambda: opened(Path("missing")), True),
        (lambda: int("x"), False),
        (lambda: read_pairs(Path("missing")), False),
        (lambda: json.loads("{"), False),
        (lambda: load_entry("json:nothing"), False),
    ],
)
def test_an_error_explains_itself_if_ours_raised_it_for_what_the_user_gave(
    function: Callable[[], object], explained: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "p", "cpu")
    RankRecord(attempt.paths, 0).write_error(raised_by(function))
    attempt.paths.rank_log(0).write_text("Traceback: here\n")
    tell(Screen(), make_point(make_config(tmp_path)), attempt, Verdict(RunState.error, 0, "told"))
    out = capsys.readouterr().out
    assert ("Traceback: here" in out, "its traceback is in" in out) == (not explained, explained)


@pytest.mark.parametrize(
    ("fault", "state", "told"),
    [
        pytest.param("hang@step1:rank1", "hang", "rank 1 has not come to it for", marks=pytest.mark.full),
        pytest.param("hang@step3:rank1", "hang", "rank 1 has not come to it for", marks=pytest.mark.full),
        pytest.param("sigkill@step3:rank1", "error", "rank 1 was killed by SIGKILL", marks=pytest.mark.full),
        pytest.param("oom@step3:rank1", "oom", "rank 1: out of memory in forward of step 3", marks=pytest.mark.full),
    ],
)
def test_the_command_names_the_failed_rank_its_step_and_its_phase(
    fault: str, state: str, told: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *LINE.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "ZLAB_FAULT": fault},
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == (4 if state == "oom" else 1)
    (attempt,) = tmp_path.glob("outputs/points/*/attempts/*")
    record = json.loads((attempt / "state.json").read_text())
    assert (record["state"], record["rank"]) == (state, 1)
    assert told in record["message"]
    step = fault.partition("@step")[2][0]
    assert f"step {step}, forward" in record["message"] or f"forward of step {step}" in record["message"]
    other = json.loads((attempt / "rank0.json").read_text())
    assert (other["state"], other["blamed"]) == ("error", [1])
    if state == "oom":
        memory = json.loads((attempt / "rank1.json").read_text())["memory"]
        assert (memory["phase"], memory["step"], memory["wanted"]) == ("forward", 3, "1152921504606846976 bytes")
        assert memory["held"]["optimizer"] > 0
        assert "held params" in record["message"]
        assert "no single setting frees 1152921504606846976 bytes" in record["message"]
    if state == "hang":
        assert any("at_step" in line for line in record["log"])  # the stack of the rank that hangs
