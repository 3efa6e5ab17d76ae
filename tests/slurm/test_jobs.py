"""Every way in which a job on a real SLURM of two nodes can end leads to the right outcome."""

from __future__ import annotations

import re
import stat
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from sending import GPUS, STEPS, Sent, config_of, in_slurm, send, stub_config, train, trained, until

from orchestrator.config.cluster import ClusterError
from orchestrator.config.schema import Device, RunConfig
from orchestrator.records.record_file import read_json
from orchestrator.records.run_state import RunState
from orchestrator.wings.slurm import jobs as slurm
from orchestrator.wings.slurm import site as slurm_site
from orchestrator.wings.slurm.tools import JobPhase


def test_submitting_returns_ids_in_order_and_keeps_files_private_to_their_owner(
    sent: dict[str, Sent], cluster: Path
) -> None:
    array = sent["array"]
    job = array.ids[0].partition("_")[0]
    assert array.ids == [f"{job}_{index}" for index in range(6)]
    assert sent["raised"].ids[0].isdigit()
    folder = array.attempts[0].root.parents[2] / "jobs"
    for path in (folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    facts = read_json(array.attempts[3].job)
    assert facts is not None
    assert facts["job"] == f"{job}_3"
    assert "--array=0-5%2" in Path(facts["script"]).read_text()


def test_no_more_points_of_an_array_run_at_once_than_the_throttle_allows(sent: dict[str, Sent]) -> None:
    array = sent["array"]
    assert 1 <= most_at_once(array) <= 2
    assert [verdict.state for verdict in array.ends()] == [RunState.ok] * 6
    environment = read_json(array.attempts[5].root / "environment0.json")
    assert environment is not None
    # The allocator reads it when the process starts; glibc up to 2.38 shortens it in every process that passes it on.
    assert "GLIBC_TUNABLES=glibc.malloc.mmap_max=0" in environment["whole"]
    assert "glibc.malloc.trim_threshold=8589934592" in environment["whole"]
    assert environment["at_exec"]["OMP_NUM_THREADS"] == "1"
    (config,) = {stat.S_IMODE(one.result.stat().st_mode) for one in array.attempts}
    assert config == 0o600


def most_at_once(sent: Sent) -> int:
    """The largest number of jobs that were seen running together; polls until all have a verdict."""
    most = 0
    deadline = time.monotonic() + 120
    seen = sent.look()
    while any(verdict is None for _, verdict in seen):
        most = max(most, sum(sight.slurm_state == "RUNNING" for sight, _ in seen))
        assert time.monotonic() < deadline
        time.sleep(0.5)
        seen = sent.look()
    return most


def test_the_throttle_limits_the_points_of_two_arrays_together(sent: dict[str, Sent]) -> None:
    shapes = sent["shapes"]
    assert len({job.partition("_")[0] for job in shapes.ids}) == 2
    assert most_at_once(shapes) == 1
    assert [verdict.state for verdict in shapes.ends()] == [RunState.ok] * 4
    spans = sorted((_written(one.root / "environment0.json"), _written(one.result)) for one in shapes.attempts)
    assert all(end < start for (_, end), (start, _) in pairwise(spans)), spans


def _written(path: Path) -> float:
    return path.stat().st_mtime


def test_a_rank_that_raises_ends_the_job_and_is_named_as_the_cause(sent: dict[str, Sent]) -> None:
    (verdict,) = sent["raised"].ends()
    assert (verdict.state, verdict.rank) == (RunState.error, 1)
    assert "ZLAB_FAULT raised on rank 1 at step 2" in verdict.message
    attempt = sent["raised"].attempts[0]
    assert attempt.rank_log(0).is_file()
    assert "ZLAB_FAULT" in attempt.rank_log(1).read_text()
    facts = read_json(attempt.job)
    assert facts is not None
    assert "Exited with exit code 1" in Path(facts["log"]).read_text()


def test_a_cancelled_job_gets_the_state_cancelled(sent: dict[str, Sent]) -> None:
    job = sent["cancelled"]
    until(lambda: job.look()[0][0].state is JobPhase.running, "the job runs")
    until(job.attempts[0].rank_record(1).exists, "its ranks have started")
    assert job.look()[0][1] is None
    slurm.cancel(job.ids)
    (verdict,) = job.ends()
    assert verdict.state is RunState.cancelled
    slurm.cancel(job.ids)  # cancelling twice is not an error


@pytest.mark.usefixtures("cluster")
def test_a_cancelled_training_job_saves_a_checkpoint_and_is_not_requeued(tmp_path: Path) -> None:
    """Its ranks get the same SIGTERM as at a preemption."""
    job = train(tmp_path, trained(), ZLAB_FAULT="slow@step1:rank0")
    until(lambda: max(job.curve(), default=0) >= 2, "some steps")
    slurm.cancel(job.ids)
    until(lambda: "not requeued" in job.attempts[0].rank_log(0).read_text(), "it stops by itself", 30)
    (verdict,) = job.ends()
    assert verdict.state is RunState.cancelled
    assert ", saved; not requeued: job " in verdict.message
    assert [one.name for one in job.attempts[0].checkpoints.iterdir()] == [f"step-{max(job.curve()):08d}"]
    assert job.restarts() == 0


def test_a_job_that_exceeds_its_memory_limit_gets_the_state_oom_host(sent: dict[str, Sent]) -> None:
    (verdict,) = sent["memory"].ends()
    assert verdict.state is RunState.oom_host
    assert re.search("xceeded (job )?memory limit", verdict.message)  # from whichever node exceeds it first
    assert "cluster.memory_gib" in verdict.message


def test_a_point_trains_on_two_ranks_of_two_nodes(sent: dict[str, Sent]) -> None:
    job = sent["unbroken"]
    (verdict,) = job.ends()
    assert verdict.state is RunState.ok
    result = read_json(job.attempts[0].result)
    assert result is not None
    assert (result["world"], result["steps"]) == (2, STEPS)
    nodes = {job.attempts[0].rank_log(rank).read_text().split(", pid")[0] for rank in range(2)}
    assert nodes == {f"rank {rank} of 2, job {job.ids[0]} on node{rank + 1}" for rank in range(2)}
    assert read_json(job.attempts[0].heartbeat) is not None


def test_a_rank_that_is_killed_ends_the_job_in_seconds_and_is_named(sent: dict[str, Sent]) -> None:
    job = sent["killed"]
    (verdict,) = job.ends()
    assert (verdict.state, verdict.rank) == (RunState.error, 1)
    assert "rank 1 is gone" in verdict.message
    assert "step 3" in verdict.message
    record = read_json(job.attempts[0].rank_record(0))
    assert record is not None
    assert record["blamed"] == [1]


def test_a_preempted_job_saves_and_resumes_with_the_losses_of_an_uninterrupted_job(
    sent: dict[str, Sent], tmp_path: Path
) -> None:
    preempted = trained(partition="spare", additional=GPUS)
    victim, unbroken = train(tmp_path / "victim", preempted, ZLAB_FAULT="slow@step1:rank1"), sent["unbroken"]
    until(lambda: max(victim.curve(), default=0) >= 2, "some steps")
    # A job in a partition of higher priority needs the GPUs that the victim holds.
    config = stub_config(tmp_path, ranks=2, nodes=1)
    config = replace(config, resources=replace(config.resources, device=Device.cuda))
    (taker,) = (send(tmp_path / "taker", [config]),)
    until(lambda: "was requeued" in victim.attempts[0].rank_log(0).read_text(), "the victim stops")
    assert victim.look()[0][1] is None
    records = [read_json(victim.attempts[0].rank_record(rank)) or {} for rank in range(2)]
    assert {record["state"] for record in records} <= {"preempted", "starting"}
    assert taker.ends()[0].state is RunState.ok
    environment = read_json(taker.attempts[0].root / "environment1.json")
    assert environment is not None
    assert environment["at_exec"]["CUDA_VISIBLE_DEVICES"] == "0,1"  # as SLURM set it; the rank picks by LOCAL_RANK
    assert environment["local_rank"] == "1"
    (verdict,) = victim.ends()
    assert verdict.state is RunState.ok
    assert "restart 1" in victim.attempts[0].rank_log(1).read_text()
    assert victim.curve() == unbroken.curve()
    result = read_json(victim.attempts[0].result)
    assert result is not None
    assert 2 <= result["checkpoints"]["resumed_from_step"] < STEPS
    assert result["loss"]["first"] == unbroken.curve()[1]


def test_requests_beyond_the_cluster_are_reported_with_a_fix_before_submission(cluster: Path) -> None:
    def told(config: RunConfig) -> list[str]:
        return slurm_site.problems([config])

    assert told(trained()) == []
    three = in_slurm(config_of(STEPS, every=None), ranks=3, nodes=3)
    (line,) = told(three)
    assert "resources.nodes=3" in line
    assert "partition main has 2" in line
    assert "fix: resources.nodes=1" in line
    (line,) = told(trained(partition="mian"))
    assert "fix: cluster.partition=main" in line
    (line,) = told(trained(limit_min=90.0))
    assert "fix: resources.time_limit_min=60" in line


def test_a_refused_submission_leaves_nothing_in_the_queue(cluster: Path, tmp_path: Path) -> None:
    good, bad = stub_config(tmp_path), stub_config(tmp_path, partition="nowhere")
    with pytest.raises(ClusterError, match="invalid partition"):
        send(tmp_path / "refused", [good, bad])
    attempt = tmp_path / "refused" / "point0" / "attempts" / "01" / "job.json"
    job = (read_json(attempt) or {})["job"]
    until(lambda: slurm.SlurmQueue().look([job])[job].slurm_state == "CANCELLED", "the first one is cancelled")
