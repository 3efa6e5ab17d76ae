"""A run whose tensors have other dtypes than its configuration asks for ends as an error without a result."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.patience import HANG_S
from harness.ranks import fork_context
from points import config_of

from orchestrator.config.schema import to_dict
from orchestrator.launch.rank import ENTRY, RankInfo, leave_failed, run_recorded
from orchestrator.launch.verdict import Verdict, judge, look_at_ranks
from orchestrator.records.record_file import require_json, write_json_atomic
from orchestrator.records.record_shapes import RESULT, misfit
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.report.summary import dtype_rows
from zero_runtime.unit_gradients import UnitGradients

STEPS = 4


def _rank_main(root: Path, rank: int, world: int, faulty: int | None) -> None:
    """`faulty`: the rank that keeps the sum of its gradients in bf16. The messages are as on the other ranks."""
    init = UnitGradients.__init__

    def changed(self: UnitGradients, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if rank == faulty:
            self.grad_dtype = torch.bfloat16

    with mock.patch.object(UnitGradients, "__init__", changed):
        ended = run_recorded(AttemptPaths(root), RankInfo(rank, world, rank, root / "rendezvous"), ENTRY)
    if isinstance(ended, BaseException):
        leave_failed()
    os._exit(0)


def _run(attempt: AttemptPaths, world: int, faulty: int | None) -> Verdict | None:
    attempt.root.mkdir(parents=True)
    write_json_atomic(attempt.config, to_dict(config_of(STEPS, every=1, stage=2, resume="none", ranks=world)))
    context = fork_context()
    ranks = [context.Process(target=_rank_main, args=(attempt.root, rank, world, faulty)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANG_S)
        rank.kill()
    return judge(look_at_ranks(attempt, world), has_result=attempt.result.exists(), controller_alive=False)


def test_one_rank_with_another_dtype_ends_the_run_on_all_ranks_and_leaves_no_result(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempts" / "01")
    verdict = _run(attempt, 2, faulty=1)
    assert verdict is not None
    assert verdict.state is RunState.error
    says = r"DTypeError: dtypes on rank 1: grads of unit .*: expected fp32 \(.*\) \(precision\.reduce\), found bf16 \("
    for rank in range(2):
        record = require_json(attempt.rank_record(rank))
        assert re.match(says, record["error"]), record["error"]
    assert re.search(says, verdict.message)
    saved = {path.name for path in attempt.checkpoints.glob("step-*")}
    assert saved == {"step-00000001"}, "nothing is saved of the step that was refused"
    assert not verdict.state.measured, "the same command would take it for an answer"


@pytest.mark.full
def test_the_result_of_a_correct_run_has_its_bytes_by_dtype(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempts" / "01")
    assert _run(attempt, 1, faulty=None) == Verdict(RunState.ok)
    result = require_json(attempt.result)
    assert misfit(result, RESULT) is None
    states = {one["component"]: one["measured_bytes"] for one in result["memory"]["states"]}
    found = result["dtypes"]
    assert {dtype for amounts in found.values() for dtype in amounts} == {"fp32"}
    assert found["params"] == found["gathered"] == found["master"] == {"fp32": states["params"]}  # one tensor
    assert found["exp_avg"]["fp32"] + found["exp_avg_sq"]["fp32"] == states["optimizer"]
    assert found["grads"] == {"fp32": states["grads"]}
    (row,) = dtype_rows(result)
    assert row.text.startswith("as configured: params fp32")
    assert "sent" not in row.text
