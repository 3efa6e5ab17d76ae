"""On a cluster with accounting, the states of ended jobs are read from sacct and lead to the same outcomes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import running_cluster
from sending import send, stub_config, until

from orchestrator.records.run_state import RunState
from orchestrator.wings.slurm import jobs as slurm
from orchestrator.wings.slurm import tools as slurm_tools
from orchestrator.wings.slurm.tools import JobPhase

pytestmark = pytest.mark.skipif(
    shutil.which("slurmdbd") is None or shutil.which("mariadbd") is None,
    reason="accounting needs the packages slurmdbd and mariadb-server",
)


@pytest.fixture(scope="module")
def accounting() -> Iterator[Path]:
    with running_cluster(ACCOUNTING="1") as folder:
        yield folder


def test_sacct_is_used_on_a_cluster_with_accounting(accounting: Path, tmp_path: Path) -> None:
    assert slurm_tools.accounting_works()
    array = send(tmp_path / "array", [stub_config(tmp_path)] * 2)
    raised = send(tmp_path / "raised", [stub_config(tmp_path, ranks=2)], ZLAB_FAULT="raise@step2:rank1")
    cancelled = send(tmp_path / "cancelled", [stub_config(tmp_path)], ZLAB_FAULT="hang@step2:rank0")
    assert [verdict.state for verdict in array.ends()] == [RunState.ok] * 2
    assert [(verdict.state, verdict.rank) for verdict in raised.ends()] == [(RunState.error, 1)]
    until(cancelled.attempts[0].rank_record(0).exists, "the third one runs")
    slurm.cancel(cancelled.ids)
    assert [verdict.state for verdict in cancelled.ends()] == [RunState.cancelled]

    jobs = [*array.ids, *raised.ids, *cancelled.ids]

    def told() -> dict[str, slurm_tools.JobSight]:
        return slurm_tools.read_sacct(slurm_tools.ask(slurm_tools.sacct_words(jobs)))

    # sacct lists a job some seconds late; until then the controller is asked.
    ended = [JobPhase.ended] * 4
    until(lambda: [told().get(job, slurm_tools.UNSEEN).state for job in jobs] == ended, "sacct has all", 60)
    assert [told()[job].slurm_state for job in jobs] == ["COMPLETED", "COMPLETED", "FAILED", "CANCELLED"]
    assert told()[raised.ids[0]].exit_code not in ("", "0:0")
    assert slurm.SlurmQueue().look(jobs) == {job: told()[job] for job in jobs}
