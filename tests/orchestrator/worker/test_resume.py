"""A run killed at any moment resumes from its last checkpoint, with the loss curve of an uninterrupted run."""

from __future__ import annotations

import os
import random
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from harness.patience import HANG_S
from harness.ranks import fork_context, run_alone
from points import LLAMA, config_of

from orchestrator.config.schema import (
    Measure,
    Model,
    RunConfig,
    WeightsExport,
    to_dict,
)
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import EventTail, read_json, require_json, write_json_atomic
from orchestrator.records.record_shapes import RESULT
from orchestrator.records.run_record import AttemptPaths
from orchestrator.report import summary
from zero_runtime.checkpoint.retention import committed

WORLD = 2


def _rank_main(root: Path, rank: int) -> None:
    from orchestrator.worker.train import run_rank

    os.environ["LOCAL_RANK"] = str(rank)  # as the launcher sets it
    try:
        run_rank(AttemptPaths(root), RankInfo(rank, WORLD, rank, root / "rendezvous"))
    except BaseException:
        (root / f"rank{rank}.log").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


class Try:
    """One attempt at a point, with ranks forked from the warm fork server."""

    def __init__(self, point: Path, config: RunConfig, contents: dict[str, str] | None = None) -> None:
        number = len(list((point / "attempts").glob("*"))) + 1
        self.paths = AttemptPaths(point / "attempts" / f"{number:02d}")
        self.paths.root.mkdir(parents=True)
        write_json_atomic(self.paths.config, to_dict(config))
        write_json_atomic(self.paths.state, {"contents": contents or {}})
        context = fork_context()
        self._ranks = [context.Process(target=_rank_main, args=(self.paths.root, rank)) for rank in range(WORLD)]
        for rank in self._ranks:
            rank.start()

    @property
    def runs(self) -> bool:
        return all(rank.is_alive() for rank in self._ranks)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()

    def wait(self, limit_s: float = HANG_S) -> list[int | None]:
        deadline = time.monotonic() + limit_s
        for rank in self._ranks:
            rank.join(max(deadline - time.monotonic(), 0))
        codes = [rank.exitcode for rank in self._ranks]
        self.kill()
        return codes

    def curve(self) -> dict[int, float]:
        """Losses by step in this attempt's record."""
        events = EventTail(self.paths.metrics).read_new()
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def unbroken(tmp_path: Path, steps: int) -> dict[int, float]:
    one = Try(tmp_path / "unbroken", config_of(steps, every=None))
    assert one.wait() == [0, 0]
    return one.curve()


def killed_and_resumed(point: Path, config: RunConfig, steps: list[int]) -> Try:
    """Starts an attempt for each of `steps` and kills it a random moment after that step. Returns one more, running."""
    for step in steps:
        one = Try(point, config)
        while max(one.curve(), default=0) < step:
            assert one.runs, f"ended before step {step}"
            time.sleep(0.002)
        time.sleep(random.random() * 0.05)
        one.kill()
    return Try(point, config)


def assert_same_curve(last: Try, wanted: dict[int, float]) -> None:
    assert last.wait() == [0, 0]
    assert last.curve() == wanted
    result = read_json(last.paths.result)
    assert result is not None
    assert result["loss"]["first"] == wanted[1]
    assert result["loss"]["last"] == wanted[max(wanted)]


@pytest.mark.full
def test_a_run_killed_twice_has_the_loss_curve_of_an_uninterrupted_run(tmp_path: Path) -> None:
    last = killed_and_resumed(tmp_path / "point", config_of(20, every=3), [5, 12])
    assert_same_curve(last, unbroken(tmp_path, 20))
    result = read_json(last.paths.result)
    assert result is not None
    resumed = result["checkpoints"]["resumed_from_step"]
    assert resumed >= 6
    steps = [event for event in EventTail(last.paths.metrics).read_new() if event["event"] == "step"]
    assert [one["step"] for one in steps if one.get("earlier")] == list(range(1, resumed + 1))
    assert sorted(one.name for one in last.paths.checkpoints.iterdir()) == ["step-00000018", "step-00000020"]


@pytest.mark.full
def test_200_steps_killed_5_times_at_random_have_the_loss_curve_of_an_uninterrupted_run(tmp_path: Path) -> None:
    steps = sorted(random.sample(range(10, 190), 5))
    print(f"killed after steps {steps}")
    last = killed_and_resumed(tmp_path / "point", config_of(200, every=7), steps)
    assert_same_curve(last, unbroken(tmp_path, 200))


def test_a_checkpoint_resumes_at_another_stage_and_with_more_steps(tmp_path: Path) -> None:
    first = Try(tmp_path / "first", config_of(10, every=None))
    assert first.wait() == [0, 0]
    folder = first.paths.checkpoints / "step-00000010"
    second = Try(tmp_path / "second", config_of(14, every=None, stage=3, resume=str(folder)))
    assert second.wait() == [0, 0]
    assert list(second.curve()) == list(range(1, 15))
    assert {step: loss for step, loss in second.curve().items() if step <= 10} == first.curve()


@pytest.mark.full
def test_a_resumed_run_says_which_steps_of_its_curve_are_missing(tmp_path: Path) -> None:
    first = Try(tmp_path / "point", config_of(12, every=3))
    saved = first.paths.checkpoints / "step-00000006"  # saved in the background, maybe until after the next step
    while max(first.curve(), default=0) < 7 or not saved.exists():
        assert first.runs
        time.sleep(0.002)
    first.kill()
    before = first.curve()
    lines = first.paths.metrics.read_text().splitlines()
    kept = [line for line in lines if '"step":1,' not in line and '"step":2,' not in line]
    changed = [line.replace('"loss":', '"loss"') if '"event":"step","time"' in line and '"step":4,' in line
               else line for line in kept]  # fmt: skip
    assert changed != kept != lines
    first.paths.metrics.write_text("\n".join([*changed, "half a li"]))
    second = Try(tmp_path / "point", config_of(12, every=3))
    assert second.wait() == [0, 0]
    result = require_json(second.paths.result, RESULT)
    assert result["loss"]["missing_steps"] == [[1, 2], [4, 4]]
    assert result["loss"]["first"] is None
    curve = second.curve()
    assert list(curve) == [3, *range(5, 13)]
    assert {step: curve[step] for step in (3, 5, 6)} == {step: before[step] for step in (3, 5, 6)}
    (told,) = (event for event in EventTail(second.paths.metrics).read_new() if event["event"] == "resumed")
    missing = "the losses of steps 1 to 2 and 4 are missing from the record of the earlier attempt"
    assert summary.resumed_text(told).endswith(f"; {missing} ({first.paths.metrics})")
    (row,) = (row for row in summary.learning_rows(result) if row.name == "loss")
    assert row.text.startswith("- first, ")
    assert row.text.endswith(missing)


def test_a_run_killed_between_its_last_save_and_its_result_recovers_the_measured_result(tmp_path: Path) -> None:
    config = config_of(6, every=3)
    config = replace(config, checkpoint=replace(config.checkpoint, weights=WeightsExport.bf16))
    first = Try(tmp_path / "point", config)
    assert first.wait() == [0, 0]
    measured = read_json(first.paths.result)
    first.paths.result.unlink()
    second = Try(tmp_path / "point", config)
    assert second.wait() == [0, 0]
    result = read_json(second.paths.result)
    assert result is not None
    assert measured is not None
    for key in ("throughput", "phases_ms", "communication", "loss", "steps", "data", "batch", "environment"):
        assert result[key] == measured[key]
    states, told = result["memory"]["states"], result["checkpoints"]
    assert states == measured["memory"]["states"]
    assert (told["saved"], told["measured_by"], told["resumed_from_step"]) == (2, str(first.paths.root), None)
    assert second.curve() == first.curve()
    assert {one.name for one in second.paths.weights.iterdir()} == {one.name for one in first.paths.weights.iterdir()}
    assert any(row.name == "measured" for row in summary.checkpoint_rows(result))


def test_a_run_with_a_folder_on_each_node_saves_and_resumes_there(tmp_path: Path) -> None:
    local = tmp_path / "disk"
    for steps, saved in ((4, [3, 4]), (6, [4, 6])):
        config = config_of(steps, every=3)
        config = replace(config, checkpoint=replace(config.checkpoint, node_folder=str(local)))
        one = Try(tmp_path / "point", config)
        assert one.wait() == [0, 0], one.paths.rank_log(0).read_text()
        assert list(committed(local / "point")) == saved
        assert not one.paths.checkpoints.exists()
    result = read_json(one.paths.result)
    assert result is not None
    assert (result["checkpoints"]["resumed_from_step"], result["checkpoints"]["folder"]) == (4, str(local / "point"))


def test_damaged_checkpoints_are_kept_and_a_run_without_a_good_one_is_refused(tmp_path: Path) -> None:
    first = Try(tmp_path / "point", config_of(4, every=2))
    assert first.wait() == [0, 0]
    root = first.paths.checkpoints
    damaged = {name: (root / name).stat().st_ino for name in ("step-00000002", "step-00000004")}
    for path in root.glob("*/rank-00000*"):
        path.write_bytes(path.read_bytes() + b"x")
    refused = Try(tmp_path / "point", config_of(4, every=2))
    assert 0 not in refused.wait()
    assert "begin anew with checkpoint.resume=none" in refused.paths.rank_log(0).read_text()
    assert {path.name: path.stat().st_ino for path in root.iterdir()} == damaged
    anew = Try(tmp_path / "point", config_of(4, every=2, resume="none"))
    assert anew.wait() == [0, 0]
    assert anew.curve() == first.curve()
    assert {path.name.partition(".aside-")[0]: path.stat().st_ino for path in root.glob("*.aside-*")} == damaged
    assert sorted(committed(root)) == [2, 4]


@pytest.mark.full
def test_a_checkpoint_is_refused_if_other_weights_are_now_at_the_same_path(tmp_path: Path) -> None:
    config = config_of(4, every=None)
    assert Try(tmp_path / "point", config, {"model": "old"}).wait() == [0, 0]
    second = Try(tmp_path / "point", config, {"model": "new"})
    assert 0 not in second.wait()
    told = second.paths.rank_log(0).read_text()
    assert "step-00000004: expected the weights that it began with" in told
    assert "changed since; give the same weights, or checkpoint.resume=none" in told


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"measure": Measure(warmup_steps=2, steps=8)}, "nothing is left to train; give more measure.steps"),
        ({"seed": 5}, "expected the data that it was trained on"),
        ({"model": Model("tiny", "llama", {**LLAMA, "vocab_size": 65})}, "expected the data that it was trained on"),
    ],
)
def test_a_run_that_cannot_resume_says_why(changed: dict, told: str, tmp_path: Path) -> None:
    first = Try(tmp_path / "first", config_of(10, every=None))
    assert first.wait() == [0, 0]
    folder = first.paths.checkpoints / "step-00000010"
    other = replace(config_of(12, every=None, resume=str(folder)), **changed)
    second = Try(tmp_path / "second", other)
    assert 0 not in second.wait()
    assert told in second.paths.rank_log(0).read_text()


def _save_elsewhere(path: Path) -> None:
    """Plain torch trains the same architecture and saves it as one rank of DeepSpeed does at stage 3."""
    import torch

    from orchestrator.workloads.models import build_model, token_losses

    model = build_model("llama", LLAMA, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(32).view(2, 16)
    for _ in range(4):
        token_losses(model, ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    states = list(optimizer.state.values())
    moments = {name: flat([one[name] for one in states]) for name in ("exp_avg", "exp_avg_sq")}
    shards = {
        "partition_count": 1,
        "fp32_flat_groups": [flat(list(model.parameters()))],
        "optimizer_state_dict": {"state": {0: {"step": 4, **moments}}},
    }
    shapes = {name: param.shape for name, param in model.named_parameters()}
    path.mkdir()
    torch.save({"optimizer_state_dict": shards}, path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"param_shapes": [shapes], "module": {}}, path / "zero_pp_rank_0_mp_rank_00_model_states.pt")


@pytest.mark.full
def test_a_run_loads_another_librarys_states_and_follows_its_own_schedule(tmp_path: Path) -> None:
    run_alone(_save_elsewhere, tmp_path / "elsewhere")
    own = Try(tmp_path / "own", config_of(6, every=None, resume="none"))
    config = config_of(6, every=3, resume=str(tmp_path / "elsewhere"))
    config = replace(config, checkpoint=replace(config.checkpoint, weights=WeightsExport.bf16))
    other = Try(tmp_path / "other", config)
    assert (own.wait(), other.wait()) == ([0, 0], [0, 0])
    events = EventTail(other.paths.metrics).read_new()
    (told,) = [event for event in events if event["event"] == "resumed"]
    assert (told["step"], told["updates"], told["kind"]) == (0, 4, "DeepSpeed ZeRO stage 3, 1 ranks")
    rates = [
        [event["lr"] for event in EventTail(one.paths.metrics).read_new() if event["event"] == "step"]
        for one in (own, other)
    ]
    assert rates[0] == rates[1]
    assert other.curve()[1] != own.curve()[1]
    assert {one.name for one in other.paths.weights.iterdir()} >= {"model.safetensors", "config.json"}
    # A checkpoint of this run itself resumes the schedule where it was.
    again = Try(tmp_path / "again", config_of(6, every=3, resume=str(other.paths.checkpoints / "step-00000003")))
    assert again.wait() == [0, 0]
    assert again.curve() == other.curve()
