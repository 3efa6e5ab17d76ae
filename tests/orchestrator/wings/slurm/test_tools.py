"""The output of SLURM's tools, recorded from version 22.05, is parsed correctly; no cluster is contacted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from points import make_config

from orchestrator.config.cluster import Cluster, ClusterError, ClusterKind
from orchestrator.config.schema import Device, RunConfig
from orchestrator.config.state_groups import Zero
from orchestrator.wings.slurm import jobs as slurm
from orchestrator.wings.slurm import tools as slurm_tools
from orchestrator.wings.slurm.site import problem_of, read_sinfo
from orchestrator.wings.slurm.tools import (
    DENIED,
    UNSEEN,
    JobPhase,
    expand_ids,
    outside_of_jobs,
    read_limit_min,
    read_sacct,
    read_scontrol_job,
    read_squeue,
)

SQUEUE = """\
3|FAILED|NonZeroExitCode|1792|2026-11-21T11:49:34|node1|
2_2|PENDING|JobArrayTaskLimit|0|N/A||
4|PENDING|PartitionNodeLimit|0|2026-11-21T13:00:00||
1|RUNNING|None|0|2026-11-21T11:49:34|node[1-2]|
5|COMPLETING|None|9|2026-11-21T11:49:34|node1|
6|CANCELLED|None|15|2026-11-21T11:49:34|node1|
"""
SACCT = """\
7|COMPLETED|0:0|node1|2026-11-21T11:49:34|None
8|CANCELLED by 1000|0:0|None assigned|None|None
9_0|TIMEOUT|0:0|node[1-2]|2026-11-21T11:49:34|TimeLimit
9_[1-3,5%2]|PENDING|0:0|None assigned|Unknown|JobArrayTaskLimit
9_4|NODE_FAIL|1:0|node2|2026-11-21T11:49:34|None
10|OUT_OF_MEMORY|0:125|node1|2026-11-21T11:49:34|None
11|PREEMPTED|0:0|node1|2026-11-21T11:49:34|None
"""
SCONTROL = (
    "JobId=6 ArrayJobId=2 ArrayTaskId=1 JobName=a b UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=1 Restarts=3 ExitCode=0:0 RunTime=00:00:03 TimeLimit=01:00:00 StartTime=2026-11-21T11:49:34 "
    "NodeList=node1 Command=/tmp/a.sh Power= \n"
)
SINFO = """\
main*|up|1-00:00:00|2|64|256000|gpu:h100:8(S:0-1),nvme:1
main*|up|1-00:00:00|6|64|512000|(null)
short|up|30:00|2|8+|12000+|gpu:4
old|down|infinite|9|8|12000|(null)
"""
BEGAN = time.mktime((2026, 11, 21, 11, 49, 34, 0, 0, -1))


def test_squeue_gives_state_reason_exit_code_nodes_and_times() -> None:
    found = read_squeue(SQUEUE)
    assert found["3"] == (JobPhase.ended, "FAILED", "NonZeroExitCode", "7:0", "node1", BEGAN, None)
    assert found["2_2"] == (JobPhase.pending, "PENDING", "JobArrayTaskLimit", "", "", None, None)
    assert found["4"].est_start == BEGAN + 4226
    assert found["1"] == (JobPhase.running, "RUNNING", "", "", "node[1-2]", BEGAN, None)
    assert found["5"].state is JobPhase.running
    assert (found["6"].state, found["6"].exit_code) == (JobPhase.ended, "0:15")


def test_sacct_gives_the_same_for_jobs_that_the_controller_has_forgotten() -> None:
    found = read_sacct(SACCT)
    assert found["7"] == (JobPhase.ended, "COMPLETED", "", "0:0", "node1", BEGAN, None)
    assert (found["8"].state, found["8"].slurm_state, found["8"].nodes) == (JobPhase.ended, "CANCELLED", "")
    assert (found["9_0"].slurm_state, found["9_0"].reason) == ("TIMEOUT", "TimeLimit")
    assert {job for job, sight in found.items() if sight.state is JobPhase.pending} == {"9_1", "9_2", "9_3", "9_5"}
    assert found["10"].exit_code == "0:125"


def test_scontrol_describes_one_job() -> None:
    assert read_scontrol_job(SCONTROL) == (JobPhase.running, "RUNNING", "", "", "node1", BEGAN, None)
    assert slurm_tools.fields_of(SCONTROL)["JobName"] == "a b"
    assert read_scontrol_job("No jobs in the system\n") == UNSEEN


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_jobs error: Unable to contact slurm controller\n", "1|RUN\n"])
def test_text_that_is_not_an_answer_describes_no_jobs(text: str) -> None:
    assert read_squeue(text) == read_sacct(text) == {}


def test_a_state_of_a_newer_slurm_is_unknown_and_not_final() -> None:
    assert read_sacct("7|LAUNCHING_ROCKETS|0:0|n|None|None\n")["7"].state is JobPhase.unknown


@pytest.mark.parametrize(
    ("text", "ids"),
    [("7", ["7"]), ("7_3", ["7_3"]), ("7_[0-2,9%4]", ["7_0", "7_1", "7_2", "7_9"]), ("7.batch", []), ("7_3.0", [])],
)
def test_ids_of_arrays_are_expanded(text: str, ids: list[str]) -> None:
    assert expand_ids(text) == ids


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("1-00:00:00", 1440), ("1:30:00", 90), ("30:00", 30), ("15", 15), ("2-12", 3600), ("infinite", None)],
)
def test_time_limits_are_read(text: str, minutes: float | None) -> None:
    assert read_limit_min(text) == minutes


# ---- queries --------------------------------------------------------------------------------------------------------


class Tools:
    """Stands in for SLURM's tools: one answer for each tool, ClusterError for a tool without one; records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
        self.asked: list[str] = []
        self.answers = answers
        for module in (slurm, slurm_tools):
            monkeypatch.setattr(module, "ask", self)

    def __call__(self, words: Sequence[str], **_: object) -> str:
        key = words[0] if words[0] != "scontrol" else "_".join(["scontrol", *words[-2:]][:2])
        self.asked.append(key)
        if key not in self.answers:
            raise ClusterError(key)
        return self.answers[key]


def test_with_accounting_one_query_is_enough_for_jobs_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "AccountingStorageType   = accounting_storage/slurmdbd\n"
    tools = Tools(monkeypatch, scontrol_show=config, sacct=SACCT)
    scheduler = slurm.SlurmQueue()
    assert scheduler.look(["7", "8", "9_0"])["8"].slurm_state == "CANCELLED"
    assert scheduler.look(["7"])["7"].state is JobPhase.ended
    assert tools.asked == ["scontrol_show", "sacct", "sacct"]


def test_the_controller_is_asked_about_jobs_that_may_be_back_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "AccountingStorageType   = accounting_storage/slurmdbd\n"
    queue = "11|PENDING|BeginTime|0|N/A||\n9_4|PENDING|BeginTime|0|N/A||\n"
    Tools(monkeypatch, scontrol_show=config, sacct=SACCT, squeue=queue)
    found = slurm.SlurmQueue().look(["11", "9_4", "9_0"])
    assert [found[job].state for job in ("11", "9_4", "9_0")] == [JobPhase.pending, JobPhase.pending, JobPhase.ended]


def test_jobs_that_the_controller_has_forgotten_have_the_state_in_the_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "AccountingStorageType   = accounting_storage/slurmdbd\n"
    Tools(monkeypatch, scontrol_show=config, sacct=SACCT, squeue="")
    found = slurm.SlurmQueue().look(["11", "9_4", "99"])
    assert [found[job].slurm_state for job in ("11", "9_4")] == ["PREEMPTED", "NODE_FAIL"]
    assert found["99"] == DENIED


def test_without_accounting_the_queue_is_asked_and_then_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "AccountingStorageType   = accounting_storage/none\n"
    tools = Tools(monkeypatch, scontrol_show=config, squeue=SQUEUE, scontrol_job=SCONTROL)
    found = slurm.SlurmQueue().look(["1", "3", "6"])
    assert [found[job].slurm_state for job in ("1", "3", "6")] == ["RUNNING", "FAILED", "CANCELLED"]
    assert tools.asked == ["scontrol_show", "squeue"]


def test_a_job_missing_from_the_queue_is_not_considered_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, scontrol_show="AccountingStorageType = accounting_storage/none\n", squeue=SQUEUE)
    found = slurm.SlurmQueue().look(["1", "99"])
    assert found["1"].slurm_state == "RUNNING"
    assert found["99"] == DENIED
    assert DENIED.state is JobPhase.unknown


def test_no_error_is_raised_if_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch)
    assert slurm.SlurmQueue().look(["1"]) == {"1": UNSEEN}
    assert slurm.SlurmQueue().look([]) == {}


def test_a_tool_that_hangs_fails_or_is_missing_is_reported_as_an_error() -> None:
    with pytest.raises(ClusterError, match=r"sleep: expected an answer within 0.05 s"):
        slurm_tools.ask(["sleep", "5"], timeout_s=0.05)
    with pytest.raises(ClusterError, match="no-such-tool: expected it on the PATH"):
        slurm_tools.ask(["no-such-tool"])
    with pytest.raises(ClusterError, match="ls /no/such/folder: "):
        slurm_tools.ask(["ls", "/no/such/folder"])
    with pytest.raises(ClusterError, match="expected a program that starts, found: Permission denied"):
        slurm_tools.ask(["/"])


@pytest.mark.parametrize(("value", "size"), [("4", 4), ("0", 1), ("(null)", 1001)])
def test_the_maximum_size_of_arrays_has_slurms_default(value: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_tools, "ask", lambda words: f"ClusterName = c\nMaxArraySize            = {value}\n")
    assert slurm_tools.max_array_size() == size


def test_a_job_submitted_from_inside_another_does_not_inherit_its_variables() -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_CONF": "/etc/x", "SBATCH_ACCOUNT": "me", "HOME": "/h"}
    assert outside_of_jobs(inside) == {"SLURM_CONF": "/etc/x", "SBATCH_ACCOUNT": "me", "HOME": "/h"}
    assert outside_of_jobs({"SLURM_CONF": "/etc/x"}) == {"SLURM_CONF": "/etc/x"}


# ---- submission -----------------------------------------------------------------------------------------------------


def point(
    tmp_path: Path, *, ranks: int = 4, nodes: int = 1, device: Device = Device.cpu, **cluster: object
) -> RunConfig:
    config = make_config(tmp_path)
    resources = replace(config.resources, ranks=ranks, nodes=nodes, device=device, time_limit_min=30.5)
    return replace(config, resources=resources, cluster=Cluster(ClusterKind.slurm, **cluster))  # type: ignore[arg-type]


def test_points_of_one_shape_share_an_array(tmp_path: Path) -> None:
    one = point(tmp_path)
    assert slurm.shape_of(one) == slurm.shape_of(replace(one, zero=Zero(stage=3), seed=7))
    for other in (point(tmp_path, ranks=8), point(tmp_path, nodes=2), point(tmp_path, partition="long")):
        assert slurm.shape_of(one) != slurm.shape_of(other)


def test_the_configuration_is_translated_to_sbatchs_parameters(tmp_path: Path) -> None:
    config = point(
        tmp_path,
        ranks=8,
        nodes=2,
        device=Device.cuda,
        partition="long",
        throttle=3,
        memory_gib=1.5,
        cpus_per_rank=6,
        setup=["module load cuda"],
        additional={"reservation": "friday"},
    )
    found = slurm.parameters(config, "stages")
    assert (found["nodes"], found["ntasks_per_node"], found["gpus_per_node"], found["cpus_per_task"]) == (2, 4, 4, 6)
    assert (found["time"], found["mem"], found["array_parallelism"]) == (31, "1536M", 3)
    assert found["srun_args"] == ["--kill-on-bad-exit=1", "--cpus-per-task=6"]
    assert found["additional_parameters"] == {"requeue": True, "signal": "USR2@90", "reservation": "friday"}
    assert "gpus_per_node" not in slurm.parameters(point(tmp_path), "stages")


def test_arrays_are_split_at_the_sites_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def send(jobs: Sequence[object], *_: object) -> list[str]:
        sizes.append(len(jobs))
        return [f"{len(sizes)}_{index}" for index in range(len(jobs))]

    monkeypatch.setattr(slurm_tools, "max_array_size", lambda: 4)
    monkeypatch.setattr(slurm, "_send", send)
    jobs = [(None, point(tmp_path, nodes=2 if index % 3 == 0 else 1)) for index in range(9)]
    ids = slurm.submit(jobs, tmp_path / "jobs")  # type: ignore[arg-type]
    assert sizes == [3, 4, 2]
    assert ids == ["1_0", "2_0", "2_1", "1_1", "2_2", "2_3", "1_2", "3_0", "3_1"]


# ---- the site -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, None),
        ({"ranks": 8, "device": Device.cuda}, None),
        ({"ranks": 16, "nodes": 2, "device": Device.cuda}, None),
        ({"ranks": 12, "nodes": 12}, "resources.nodes=12: partition main has 8      fix: resources.nodes=6"),
        ({"ranks": 3, "nodes": 3, "device": Device.cuda}, "partition main has 2 nodes with 1 cores and 1 GPUs each"),
        ({"ranks": 9, "device": Device.cuda}, "9 GPUs on a node, where nodes have at most 8"),
        ({"cpus_per_rank": 17}, "68 cores on a node, where nodes have at most 64"),
        ({"memory_gib": 600.0}, "cluster.memory_gib=600, where nodes have at most 500"),
        ({"partition": "shrot"}, "fix: cluster.partition=short"),
        ({"partition": "old"}, "cluster.partition=old: it is down"),
        ({"partition": "short"}, "allows at most 30      fix: resources.time_limit_min=30"),
        ({"partition": "short,main"}, None),
    ],
)
def test_a_request_that_a_cluster_cannot_satisfy_is_reported_with_what_it_offers(
    settings: dict, told: str | None, tmp_path: Path
) -> None:
    found = problem_of(point(tmp_path, **settings), read_sinfo(SINFO))
    assert (found is None) == (told is None)
    assert told is None or told in (found or "")
