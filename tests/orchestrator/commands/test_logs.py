"""`logs -f` shows the steps of a rank that prints nothing because it is well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stub_worker import step_event

from orchestrator.commands import verbs
from orchestrator.records.run_record import AttemptPaths


@pytest.fixture
def ended(tmp_path: Path) -> AttemptPaths:
    """An attempt that has ended, with a log of one line and six steps, the first of an earlier start."""
    attempt = AttemptPaths(tmp_path)
    attempt.rank_log(0).write_text("rank 0 of 1, pid 7\n")
    events = [{**step_event(1, 2), "earlier": True}, *(step_event(step, 2) for step in range(2, 7))]
    attempt.metrics.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    attempt.state.write_text(json.dumps({"state": "ok"}))
    return attempt


def test_the_steps_follow_the_log(ended: AttemptPaths, capfd: pytest.CaptureFixture[str]) -> None:
    verbs._print_log(ended.rank_log(0), ended, 6, follow=True)
    first, *steps = capfd.readouterr().out.splitlines()
    assert first == "rank 0 of 1, pid 7"
    assert steps[0] == "warm-up step 2/6  loss 5.9800  9,402 tokens/s  rss 512 MiB"
    assert [line.split()[-8] for line in steps[1:]] == ["3/6", "4/6", "5/6", "6/6"]


def test_without_following_a_log_is_as_it_was_written(ended: AttemptPaths, capfd: pytest.CaptureFixture[str]) -> None:
    verbs._print_log(ended.rank_log(0), ended, 6, follow=False)
    assert capfd.readouterr().out == "rank 0 of 1, pid 7\n"
