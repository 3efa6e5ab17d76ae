"""Training to an end: validated on the way, the best checkpoint kept, and continued after a kill with equal bits."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.ranks import run_alone
from harness.sft_files import loss_by_hand, make_sft_files
from points import config_of, config_of_line
from test_resume import WORLD, Try

from orchestrator.commands.line import sweep_request
from orchestrator.config.optimizer import Scheduler
from orchestrator.config.schema import CheckpointKind, Measure, RunConfig, Train
from orchestrator.records.record_file import EventTail, require_json
from orchestrator.records.record_shapes import RESULT
from orchestrator.worker.saving import AUTO, Best, Saving
from orchestrator.workloads.data import TokenData
from zero_runtime.optim.lr_settings import RangeTestSettings

STEPS = 12


def trained(steps: int = STEPS, **train: Any) -> RunConfig:
    """Two tiny blocks whose rate rises until they lose what they learned: the last validation is not the best one."""
    config = config_of(STEPS, every=5)
    return replace(
        config,
        measure=Measure(warmup_steps=2, steps=None, validation_batches=3),
        train=Train(max_steps=steps, **{"eval_every": 2, "examples": 3, "new_tokens": 4} | train),
        checkpoint=replace(config.checkpoint, keep_last=1),
        optimizer=replace(config.optimizer, lr=3e-3),
        scheduler=Scheduler(RangeTestSettings(interval_steps=1, interval_rate=30.0)),
    )


def events_of(one: Try, kind: str) -> list[dict[str, Any]]:
    return [event for event in EventTail(one.paths.metrics).read_new() if event["event"] == kind]


def validations(one: Try) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in events_of(one, "validation")]


def states_of(one: Try, step: int) -> list[bytes]:
    """The files of a checkpoint with its tensors, by rank."""
    folder = one.paths.checkpoints / f"step-{step:08d}"
    return [(folder / f"rank-{rank:05d}-of-{WORLD:05d}.safetensors").read_bytes() for rank in range(WORLD)]


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_training_continues_with_the_bits_and_the_curves_of_an_uninterrupted_one(
    stage: int, tmp_path: Path
) -> None:
    config = replace(trained(), zero=replace(trained().zero, stage=stage))
    whole = Try(tmp_path / "whole", config)
    assert whole.wait() == [0, 0]
    killed = Try(tmp_path / "killed", config)
    saved = killed.paths.checkpoints / "step-00000005"
    while max(killed.curve(), default=0) < 7 or not saved.exists():
        assert killed.runs
        time.sleep(0.002)
    killed.kill()
    last = Try(tmp_path / "killed", config)
    assert last.wait() == [0, 0]
    assert [event["step"] for event in events_of(last, "step")] == list(range(1, STEPS + 1))
    assert last.curve() == whole.curve()
    assert validations(last) == validations(whole)
    assert [step for step, _ in validations(whole)] == [2, 4, 6, 8, 10, 12]
    assert states_of(last, STEPS) == states_of(whole, STEPS)
    results = [require_json(one.paths.result, RESULT) for one in (whole, last)]
    assert results[1]["checkpoints"]["resumed_from_step"] >= 5
    facts = [result["training"] for result in results]
    for key in ("epochs", "tokens", "learned_tokens", "validations", "examples"):
        assert facts[0][key] == facts[1][key]
    best = min(validations(whole), key=lambda one: one[1])
    assert best[0] < STEPS, "else this test would not show that it is kept"
    assert [(one["best"]["step"], one["best"]["loss"]) for one in facts] == [best, best]
    for one, said in zip((whole, last), facts, strict=True):
        assert {folder.name for folder in one.paths.checkpoints.iterdir()} == {
            f"step-{step:08d}" for step in (best[0], STEPS)
        }
        assert Path(said["best"]["checkpoint"]).name == f"step-{best[0]:08d}"
        assert Path(said["last_checkpoint"]).name == f"step-{STEPS:08d}"


@pytest.mark.full
def test_validation_and_examples_change_no_bit_of_training(tmp_path: Path) -> None:
    """At stage 3, where a validation gathers; one is before the last step, whose messages the result has."""
    plain = trained(eval_every=None, keep_best=False, examples=0)
    plain = replace(plain, zero=replace(plain.zero, stage=3))
    bare = Try(tmp_path / "bare", replace(plain, measure=replace(plain.measure, validation_batches=0)))
    watched = Try(tmp_path / "watched", replace(plain, train=trained(eval_every=1).train))
    assert (bare.wait(), watched.wait()) == ([0, 0], [0, 0])
    assert bare.curve() == watched.curve()
    assert states_of(bare, STEPS) == states_of(watched, STEPS)
    results = [require_json(one.paths.result, RESULT) for one in (bare, watched)]
    assert results[0]["communication"]["data"] == results[1]["communication"]["data"]
    assert {folder.name for folder in bare.paths.checkpoints.iterdir()} == {f"step-{STEPS:08d}"}


def line_of(folder: Path, more: str = "") -> RunConfig:
    return config_of_line(
        f"experiment=sft_qwen model.path={folder}/model data.path={folder}/train.json precision=fp32 "
        "resources.device=cpu resources.ranks=2 resources.threads=1 batch.seq=48 batch.accumulation=2 "
        f"data.validation_fraction=0.11 optimizer.lr=3e-3 tracking=none {more}"
    )


def _data(config: RunConfig) -> TokenData:
    from orchestrator.worker.setup import build_data

    return build_data(config)


def _pairs_of(config: RunConfig, count: int) -> tuple[list[int], list[int], int]:
    """The places in the file of the first samples and of the held-out ones, and the number of training samples."""
    from orchestrator.workloads.data import epoch_order

    data = _data(config)
    first = data.train_windows[epoch_order(data.train_samples, data.seed, 0)[:count]]
    return first.tolist(), data.validation_windows.tolist(), data.train_samples


@pytest.mark.full
def test_fine_tuning_counts_the_responses_of_all_ranks_and_nothing_else(tmp_path: Path) -> None:
    run_alone(make_sft_files, tmp_path)
    config = line_of(tmp_path, "train.epochs=0.1 train.eval_every=null checkpoint.every=null optimizer.lr=0.0")
    one = Try(tmp_path / "point", config)
    assert one.wait() == [0, 0], one.paths.rank_log(0).read_text()
    first, held, samples = run_alone(_pairs_of, config, 4)
    wanted, counts = run_alone(loss_by_hand, tmp_path / "model", tmp_path / "train.json", first)
    assert len({sum(counts[:2]), sum(counts[2:])}) == 2, "the ranks must count differently for this test"
    # fp32 against fp64 in the softmax, and filled rows against bare ones: a few roundings of 6e-8 of each of some 40
    # summands; measured 1e-7.
    assert one.curve()[1] == pytest.approx(wanted, rel=2e-6)
    result = require_json(one.paths.result, RESULT)
    assert len(held) % 2, "an even number would fill the last batches of both ranks"
    # The rate is 0, so the weights are still the first: all held-out pairs, each once.
    on_held_out, _ = run_alone(loss_by_hand, tmp_path / "model", tmp_path / "train.json", held)
    assert result["loss"]["validation"] == pytest.approx(on_held_out, rel=2e-6)
    steps = -(-samples // 40)
    assert (samples, result["steps"]) == (64 - len(held), steps)
    training = result["training"]
    assert training["epochs"] == 0.1 < 4 * steps / samples  # as asked for: the last step is filled up
    assert training["tokens"] == 4 * steps * 48
    assert 0 < training["learned_tokens"] < training["tokens"] / 2
    assert len(training["examples"]) == 2
    assert all("assistant" in one["prompt"]["text"] and one["answer"]["ids"] for one in training["examples"])


@pytest.mark.full
def test_fine_tuning_resumes_to_its_end_and_has_learned_the_pairs(tmp_path: Path) -> None:
    run_alone(make_sft_files, tmp_path)
    config = line_of(tmp_path, "train.epochs=6 train.eval_every=20 checkpoint.every=10")
    whole = Try(tmp_path / "whole", config)
    assert whole.wait() == [0, 0], whole.paths.rank_log(0).read_text()
    killed = Try(tmp_path / "killed", config)
    while max(killed.curve(), default=0) < 25:
        assert killed.runs
        time.sleep(0.002)
    killed.kill()
    last = Try(tmp_path / "killed", config)
    assert last.wait() == [0, 0]
    assert last.curve() == whole.curve()
    assert validations(last) == validations(whole)
    result = require_json(last.paths.result, RESULT)
    assert result["loss"]["last"] < 0.5 * result["loss"]["first"]
    assert result["loss"]["validation"] < 0.5 * validations(whole)[0][1] or result["loss"]["validation"] < 1.0


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    saving = Saving.__new__(Saving)
    saving.best = None
    found = [saving.validated(step, loss) for step, loss in enumerate((math.nan, 3.0, math.inf, 3.0, math.nan, 2.0))]
    assert found == [False, True, False, False, False, True]
    assert saving.best == Best(5, 2.0)


@pytest.mark.parametrize(("folder", "best"), [("mine", Best(4, 2.5)), ("another", None)])
def test_a_resumed_training_knows_the_best_loss_of_its_own_checkpoints_alone(
    folder: str, best: Best | None, tmp_path: Path
) -> None:
    """A checkpoint of another run has losses of other held-out data."""
    trainer = {"step": 6, "samples": 48, "best": {"step": 4, "loss": 2.5}}
    found = SimpleNamespace(path=tmp_path / folder / "step-00000006", index=SimpleNamespace(trainer=trainer))
    saving = Saving.__new__(Saving)
    saving.best = None
    for name, value in {
        "rank": 1,
        "restarted": False,
        "steps": STEPS,
        "checkpoints": SimpleNamespace(load=lambda checkpoint: None, clear_leftovers=lambda: None),
        "config": SimpleNamespace(resume=AUTO, kind=CheckpointKind.none),
        "folder": tmp_path / "mine",
        "chosen": lambda: found,
        "check_data": lambda path, trainer: None,
    }.items():
        setattr(saving, f"_{name}", value)
    assert saving.resume().step == 6
    assert saving.best == best
    assert saving.validated(8, 2.6) is (best is None)


@pytest.mark.parametrize(
    ("epochs", "samples", "steps"),
    [(1.0, 64, 16), (1.0, 65, 17), (0.1, 30, 1), (0.4, 30, 3), (3.0, 61, 46), (0.001, 9, 1)],
)
def test_epochs_are_whole_steps_rounded_up(epochs: float, samples: int, steps: int) -> None:
    config = replace(trained(), train=Train(epochs=epochs))
    config = replace(config, batch=replace(config.batch, global_size=4))
    assert config.steps() is None
    assert config.steps(samples) == steps


@pytest.mark.parametrize(
    ("line", "metric"),
    [
        ("-m measure=train train.max_steps=5 seed=1,2", "loss_validation"),
        ("-m measure=train train.max_steps=5 measure.validation_batches=0 seed=1,2", ""),
        ("-m measure=quick,standard", ""),
    ],
)
def test_points_that_train_to_an_end_are_compared_by_what_they_learned(line: str, metric: str) -> None:
    request, _ = sweep_request(line.split())
    assert request.rank_by == metric
