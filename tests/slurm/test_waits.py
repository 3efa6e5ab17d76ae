"""Jobs that take long to end get the right outcome: at a time limit, after several restarts, on another node."""

from __future__ import annotations

from pathlib import Path

from sending import LONG, Sent, send, stub_config, until

from orchestrator.records.record_file import read_json
from orchestrator.records.run_state import RunState
from orchestrator.wings.slurm.tools import ask


def test_a_job_that_reaches_its_time_limit_gets_the_state_timeout(sent: dict[str, Sent]) -> None:
    (verdict,) = sent["timeout"].ends(150)
    assert verdict.state is RunState.timeout
    assert "time limit" in verdict.message


def test_a_run_longer_than_its_time_limit_finishes_after_restarts(sent: dict[str, Sent]) -> None:
    job = sent["long"]
    (verdict,) = job.ends(200)
    assert verdict.state is RunState.ok
    assert "restart 1" in job.attempts[0].rank_log(0).read_text()
    assert list(job.curve()) == list(range(1, LONG + 1))
    result = read_json(job.attempts[0].result)
    assert result is not None
    assert 20 <= result["checkpoints"]["resumed_from_step"] < LONG


def test_a_job_whose_node_failed_runs_on_another(cluster: Path, tmp_path: Path) -> None:
    """Must be the last test: it takes a node away from all jobs that run on it."""
    job = send(tmp_path / "moved", [stub_config(tmp_path)], STUB_STEP_S="1")
    until(job.attempts[0].metrics.exists, "the job runs")
    node = job.look()[0][0].nodes
    for state in ("drain", "down"):  # a drained node does not come back by itself
        ask(["scontrol", "update", f"nodename={node}", f"state={state}", "reason=test"])
    until(lambda: job.restarts() == 1, "the job is back in the queue")
    (verdict,) = job.ends()
    assert verdict.state is RunState.ok
    first, second = (line for line in job.attempts[0].rank_log(0).read_text().splitlines() if " pid " in line)
    assert f"on {node}," in first
    assert f"on {node}," not in second
    assert "restart 1" in second
