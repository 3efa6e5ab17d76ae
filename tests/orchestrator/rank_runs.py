"""Runs all ranks of a configuration as their processes do, without a command."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.patience import HANG_S
from harness.ranks import fork_context

from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import EventTail, read_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths


def _rank_main(root: Path, rank: int, world: int, prepare: Callable[[], None]) -> None:
    from orchestrator.worker.train import run_rank

    prepare()
    try:
        run_rank(AttemptPaths(root), RankInfo(rank, world, rank, root / "rendezvous"))
    except BaseException:
        (root / f"rank{rank}.log").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _nothing() -> None: ...


def run(root: Path, config: RunConfig, prepare: Callable[[], None] = _nothing) -> dict[str, Any]:
    """The result of a run, with the losses of its steps in `curve`. prepare: called in each rank before it begins."""
    paths = AttemptPaths(root / "attempts" / "01")
    paths.root.mkdir(parents=True)
    write_json_atomic(paths.config, to_dict(config))
    write_json_atomic(paths.state, {"contents": {}})
    context, world = fork_context(), config.ranks
    ranks = [context.Process(target=_rank_main, args=(paths.root, rank, world, prepare)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANG_S)
    result = read_json(paths.result)
    assert result is not None, [file.read_text() for file in paths.root.glob("rank*.log")]
    events = EventTail(paths.metrics).read_new()
    return {**result, "curve": [event["loss"] for event in events if event["event"] == "step"]}
