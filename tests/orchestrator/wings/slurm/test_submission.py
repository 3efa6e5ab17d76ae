"""Jobs reach SLURM with the right script, calls and permissions; programs on the PATH stand in for SLURM's tools."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from points import make_config

from orchestrator.config.cluster import Cluster, ClusterError, ClusterKind
from orchestrator.config.schema import RunConfig
from orchestrator.launch.environment import GLIBC
from orchestrator.launch.rank import ENTRY
from orchestrator.machine.hardware import detect
from orchestrator.records.record_file import read_json
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.slurm import jobs as slurm
from orchestrator.wings.slurm.sweep import SlurmCluster

SBATCH = """#!/bin/sh
case "$(cat)" in *nowhere*) echo "sbatch: error: invalid partition specified: nowhere" >&2; exit 1;; esac
umask >>"{folder}/umask"
env >"{folder}/environment"
echo x >>"{folder}/sent"
echo "4411$(wc -l <"{folder}/sent");cluster"
"""


@pytest.fixture
def slurm_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the stand-in programs record how they were called."""
    programs = {
        "sbatch": SBATCH.format(folder=tmp_path),
        "scontrol": "#!/bin/sh\necho 'MaxArraySize            = 3'\n",
        "scancel": f'#!/bin/sh\necho "$@" >>"{tmp_path}/cancelled"\n',
        "srun": "#!/bin/sh\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # submitted from inside another job
    return tmp_path


def jobs(folder: Path, count: int, **cluster: object) -> list[tuple[AttemptPaths, RunConfig]]:
    config = make_config(folder)
    config = replace(config, cluster=Cluster(ClusterKind.slurm, **cluster))  # type: ignore[arg-type]
    made = [AttemptPaths(folder / f"point{number}{cluster.get('partition', '')}") for number in range(count)]
    for attempt in made:
        attempt.root.mkdir()
    return [(attempt, config) for attempt in made]


def test_a_plan_is_made_where_slurm_does_not_answer_and_nothing_is_sent(
    slurm_tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = jobs(slurm_tools, 1)[0][1]
    configs, sinfo = [config, replace(config, cluster=Cluster(ClusterKind.slurm, partition="big"))], slurm_tools / "bin"
    (sinfo / "sinfo").write_text("#!/bin/sh\necho 'no configuration' >&2; exit 1\n")
    (sinfo / "sinfo").chmod(0o755)
    name = SlurmCluster().namer(detect())
    assert [name(one) for one in configs] == ["slurm/unknown"] * 2
    assert capsys.readouterr().err.count("warning: the plan is made without the cluster") == 1
    (sinfo / "sinfo").write_text("#!/bin/sh\necho 'big*|up|1:00:00|4|64|512000|(null)'\n")
    with pytest.raises(ClusterError, match="no configuration"):  # its points have no names of nodes
        SlurmCluster().preflight(configs)
    assert SlurmCluster().namer(detect())(configs[1]) == "slurm/big"
    assert SlurmCluster().preflight(configs) == []


def test_an_arrays_script_contains_the_requested_settings_and_starts_every_rank(slurm_tools: Path) -> None:
    sent = jobs(slurm_tools, 2, setup=["module load cuda"], additional={"reservation": "a day"})
    assert slurm.submit(sent, slurm_tools / "jobs", name="stages") == ["44111_0", "44111_1"]
    facts = read_json(sent[1][0].job)
    assert facts is not None
    assert facts["log"].endswith("/jobs/44111_1_0_log.out")
    script = Path(facts["script"]).read_text()
    for line in (
        "#SBATCH --array=0-1%2",
        "#SBATCH --job-name=stages",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --signal=USR2@90",
        "#SBATCH --requeue",
        "#SBATCH --reservation='a day'",
        "module load cuda",
    ):
        assert line in script.splitlines()
    command = script.splitlines()[-1]
    assert command.startswith("srun --unbuffered")
    assert '--kill-on-bad-exit=1 --cpus-per-task=1 sh -c \'trap "" USR2; exec "$@"\' rank env ' in command
    assert f" GLIBC_TUNABLES={GLIBC} " in command
    assert f"/orchestrator/machine/children.py orchestrator.wings.slurm.executor {slurm_tools}/jobs {ENTRY}" in command
    assert "wckey" not in script


def test_a_call_is_stored_as_json_and_all_files_are_private_to_the_owner(slurm_tools: Path) -> None:
    sent = jobs(slurm_tools, 1)
    assert slurm.submit(sent, slurm_tools / "jobs", entry="mine:run") == ["44111"]
    for path in (slurm_tools / "jobs", *(slurm_tools / "jobs").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert (slurm_tools / "umask").read_text() == "0077\n"
    call = read_json(slurm_tools / "jobs" / "44111_submitted.json")
    assert call == {"attempt": str(sent[0][0].root)}
    assert Path((read_json(sent[0][0].job) or {})["script"]).read_text().endswith(" mine:run\n")
    assert not list(slurm_tools.rglob("*.pkl"))
    assert "SLURM_JOB_ID" not in (slurm_tools / "environment").read_text()


def test_job_ids_are_in_the_order_of_the_attempts_whatever_the_arrays(slurm_tools: Path) -> None:
    sent = jobs(slurm_tools, 4) + jobs(slurm_tools, 1, partition="long")
    assert slurm.submit(sent, slurm_tools / "jobs") == ["44111_0", "44111_1", "44111_2", "44112", "44113"]
    assert [(read_json(attempt.job) or {})["job"] for attempt, _ in sent][2:] == ["44111_2", "44112", "44113"]


def dependencies(sent: list[tuple[AttemptPaths, RunConfig]]) -> list[str]:
    """The dependency of each array, or "", in the order of the arrays' first attempts."""
    scripts = dict.fromkeys((read_json(attempt.job) or {})["script"] for attempt, _ in sent)
    lines = [Path(script).read_text().splitlines() for script in scripts]
    return [next((line.partition("dependency=")[2] for line in one if "dependency=" in line), "") for one in lines]


def test_an_array_that_would_exceed_the_throttle_waits_until_the_arrays_before_it_have_ended(slurm_tools: Path) -> None:
    shapes = [jobs(slurm_tools, count, throttle=3, partition=name) for count, name in ((2, "a"), (1, "b"), (5, "c"))]
    sent = [one for shape in shapes for one in shape]
    slurm.submit(sent, slurm_tools / "jobs")
    assert dependencies(sent) == ["", "", "afterany:44111:44112", "afterany:44113"]


def test_arrays_without_a_throttle_do_not_wait_and_a_users_own_dependency_is_kept(slurm_tools: Path) -> None:
    free = jobs(slurm_tools, 2) + jobs(slurm_tools, 1, partition="long")
    slurm.submit(free, slurm_tools / "jobs")
    assert dependencies(free) == ["", ""]
    own = {"additional": {"dependency": "afterok:7"}, "throttle": 1}
    sent = jobs(slurm_tools, 1, partition="a", **own) + jobs(slurm_tools, 1, partition="b", **own)
    slurm.submit(sent, slurm_tools / "jobs")
    assert dependencies(sent) == ["afterok:7", "afterok:7,afterany:44113"]


def test_the_largest_request_is_submitted_last_if_arrays_wait_for_each_other(slurm_tools: Path) -> None:
    (large,) = jobs(slurm_tools, 1, partition="large", throttle=1)
    (small,) = jobs(slurm_tools, 1, partition="small", throttle=1)
    large = (large[0], replace(large[1], resources=replace(large[1].resources, time_limit_min=600)))
    assert slurm.submit([large, small], slurm_tools / "jobs") == ["44112", "44111"]


def test_if_one_array_is_refused_the_others_are_cancelled(slurm_tools: Path) -> None:
    sent = jobs(slurm_tools, 2) + jobs(slurm_tools, 1, partition="nowhere")
    with pytest.raises(ClusterError, match="sbatch --parsable: sbatch: error: invalid partition specified: nowhere"):
        slurm.submit(sent, slurm_tools / "jobs")
    assert (slurm_tools / "cancelled").read_text() == "--quiet 44111_0 44111_1\n"
