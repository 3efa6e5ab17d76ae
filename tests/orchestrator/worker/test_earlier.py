"""Records, identities and checkpoints that an earlier version wrote (tests/earlier) can be read by this version.

tests/earlier/output_folder was written by the commit c07c44b, before files moved into packages, with the command that
is recorded in its sweep.json. The folder /opt/work and the host node1 in the records were chosen for that run; the
records have checksums and stay as they were written.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_resume import Try

from orchestrator import cli
from orchestrator.config.schema import from_dict, to_dict
from orchestrator.config.state_groups import Zero
from orchestrator.records.record_file import EventTail, append_event, require_json
from orchestrator.records.record_shapes import SWEEP_EVENTS
from orchestrator.records.run_record import point_id
from zero_runtime.checkpoint.load import CheckpointReader

EARLIER = Path(__file__).resolve().parents[2] / "earlier" / "output_folder"
POINTS = ("299990b849", "8880cd7c52")  # stage 1, stage 3
SAVED = EARLIER / "points" / POINTS[1] / "checkpoints" / "step-00000004"


@pytest.mark.parametrize("point", POINTS)
def test_a_configuration_keeps_the_identity_that_the_earlier_version_gave_it(point: str) -> None:
    identity = require_json(EARLIER / "points" / point / "identity.json")
    assert point_id(identity["config"], identity["world"], identity["hardware"]) == point
    read = to_dict(from_dict(require_json(EARLIER / "points" / point / "config.json")))
    assert point_id(read, identity["world"], identity["hardware"]) == point


def test_a_sweep_is_reported_with_the_numbers_that_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EARLIER, tmp_path / "out")
    # Events name attempts by their absolute path, so those of the copy are written again for its place.
    (path,) = tmp_path.glob("out/sweeps/*/events.jsonl")
    events = EventTail(path, SWEEP_EVENTS).read_new()
    assert [event["event"] for event in events] == ["started", "ended", "started", "ended", "end"]
    path.unlink()
    for event in events:
        places = {key: value.replace("/opt/work", str(tmp_path)) for key, value in event.items() if key == "attempt"}
        append_event(path, event | places)
    assert cli.main(["report", "--output", str(tmp_path / "out"), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    shown = {one["label"]: one["result"]["loss"]["last"] for one in points}
    assert shown == {"stage1": 4.0085508823394775, "stage3": 4.0085508823394775}


def test_a_checkpoint_is_complete_and_a_run_at_another_stage_resumes_from_it(tmp_path: Path) -> None:
    with CheckpointReader.open(SAVED) as checkpoint:
        checkpoint.verify()
        source = checkpoint.state("master")
        sizes = {name: torch.Size(source.shape(name)).numel() for name in source.names()}
        read = {name: source.read(name, 0, size) for name, size in sizes.items()}
    assert {name: values.numel() for name, values in read.items()} == sizes
    assert all(values.isfinite().all() for values in read.values())
    config = from_dict(require_json(EARLIER / "points" / POINTS[1] / "config.json"))
    config = replace(
        config,
        zero=Zero(stage=2),
        measure=replace(config.measure, steps=5),
        checkpoint=replace(config.checkpoint, resume=str(SAVED)),
    )
    resumed = Try(tmp_path / "point", config)
    assert resumed.wait() == [0, 0]
    assert list(resumed.curve())[-2:] == [5, 6]
