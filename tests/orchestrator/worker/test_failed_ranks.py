"""A failed rank records its error even if the destruction of a process group waits for all ranks, as that of NCCL."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from harness.patience import HANG_S
from harness.ranks import fork_context
from points import config_of

from orchestrator.config.schema import to_dict
from orchestrator.launch.rank import ENTRY, RankInfo, leave_failed, run_recorded
from orchestrator.launch.verdict import Verdict, judge, look_at_ranks
from orchestrator.records.record_file import require_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState

WORLD = 2


def _rank_main(root: Path, rank: int, fault: str) -> None:
    os.environ["ZLAB_FAULT"] = fault
    destroy = dist.destroy_process_group

    def collective_destroy(group: Any = None) -> None:
        """Blocks until every rank is here."""
        (root / f"destroys{rank}").touch()
        while len(list(root.glob("destroys*"))) < WORLD:
            time.sleep(0.01)
        destroy(group)

    with mock.patch.object(dist, "destroy_process_group", collective_destroy):
        ended = run_recorded(AttemptPaths(root), RankInfo(rank, WORLD, rank, root / "rendezvous"), ENTRY)
    if isinstance(ended, BaseException):
        leave_failed()
    os._exit(0)


def _run(root: Path, fault: str) -> tuple[list[int | None], Verdict | None]:
    attempt = AttemptPaths(root)
    write_json_atomic(attempt.config, to_dict(config_of(4, every=None, stage=3, resume="none")))
    ranks = [fork_context().Process(target=_rank_main, args=(root, rank, fault)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + HANG_S
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes, judge(look_at_ranks(attempt, WORLD), has_result=attempt.result.exists(), controller_alive=True)


@pytest.mark.full
def test_ranks_that_succeed_destroy_their_groups_together(tmp_path: Path) -> None:
    codes, verdict = _run(tmp_path, "")
    assert codes == [0, 0]
    assert verdict == Verdict(RunState.ok)
    assert len(list(tmp_path.glob("destroys*"))) == WORLD


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        ("oom@step2:rank1", RunState.oom),
        pytest.param("raise@step2:rank0", RunState.error, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_alone_is_recorded_with_its_own_outcome_and_destroys_nothing(
    fault: str, state: RunState, tmp_path: Path
) -> None:
    codes, verdict = _run(tmp_path, fault)
    failed = int(fault[-1])
    assert codes == [1, 1], "a rank waited for the other one to destroy its groups"
    assert verdict is not None
    assert (verdict.state, verdict.rank) == (state, failed)
    assert not list(tmp_path.glob("destroys*"))
    own, other = (require_json(AttemptPaths(tmp_path).rank_record(rank)) for rank in (failed, 1 - failed))
    assert (own["outcome"], own["blamed"]) == (state.value, [])
    assert (other["state"], other["blamed"]) == ("error", [failed])
    if state is RunState.oom:
        assert own["memory"]["phase"] == "forward"
        assert own["memory"]["wanted"] == "1152921504606846976 bytes"
