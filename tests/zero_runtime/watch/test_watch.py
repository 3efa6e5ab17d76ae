"""If ranks differ, die, fail or stop, every rank ends within seconds and names the rank to blame with its stack."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec, TinyTransformer, batch, token_loss_sum
from harness.outcomes import HASTY, Outcome, rank_outcomes
from torch import nn

from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch

SPEC = TinySpec(blocks=2)
BAD_RANK, BAD_STEP = 1, 3


class Bad(nn.Module):
    """A block that calls `act` on the bad rank in one of its forwards, counted from 1, before it runs `block`."""

    def __init__(self, block: nn.Module, forward: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.block, self.at, self.act = block, forward, act
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if dist.get_rank() == BAD_RANK and self.count == self.at:
            self.act()
        return self.block(x)


def make_runtime(watch: RankWatch, stage: int = 3, model: nn.Module | None = None) -> ZeroRuntime:
    return ZeroRuntime(
        model or TinyTransformer(SPEC),
        ZeroPlan.from_stage(stage),
        MixedPrecision(),
        AdamWConfig(),
        RuntimeSettings(watch=watch),
        torch.device("cpu"),
    )


def one_step(runtime: ZeroRuntime, step: int) -> None:
    ids, labels = batch(SPEC, 0, dist.get_rank(), step)
    runtime.backward(token_loss_sum(runtime.model, ids, labels))
    runtime.step(1e-3)


def train_with(watch: RankWatch, act: Callable[[], object], *, stage: int = 3, steps: int = 5) -> None:
    """Train, and call `act` on the bad rank in the forward of the second block in the bad step."""
    model = TinyTransformer(SPEC)
    model.blocks = nn.ModuleList(Bad(block, BAD_STEP if i == 1 else 0, act) for i, block in enumerate(model.blocks))
    runtime = make_runtime(watch, stage, model)
    for step in range(steps):
        one_step(runtime, step)


def assert_blamed(outcomes: list[Outcome], *words: str) -> str:
    """Assert that every other rank blames the bad rank with a text that contains all `words`; return one of the texts.

    Ranks that gloo aborted are ignored: gloo aborts a rank that receives more than it expects, to blame or not.
    """
    others = [one for rank, one in enumerate(outcomes) if rank != BAD_RANK and one.exit_code != -signal.SIGABRT]
    others = others or [outcomes[BAD_RANK]]  # the only rank that could report
    for outcome in others:
        assert outcome.how in ("raised", "ended"), outcome
        assert outcome.blamed == (BAD_RANK,), outcome
        for word in words:
            assert word in outcome.text, f"{word!r} is not in: {outcome.text}"
    return others[0].text


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_ends_also_where_the_file_of_the_rendezvous_is_gone(world: int, tmp_path: Path) -> None:
    """torch's file store would wait for it for five minutes, at the end of the process."""
    folder = tmp_path / "world"
    folder.mkdir()
    store = dist.FileStore(str(folder / "file"), world)
    watch = RankWatch(store, 0, world, replace(HASTY, answer_s=0.1))
    shutil.rmtree(folder)
    watch.close()
    assert store.timeout.total_seconds() == (
        0.1 if world > 1 else 300
    )  # what the last call waited for, if one was made


# ---- ranks that differ -------------------------------------------------------------------------------------------


def _skips_a_step(watch: RankWatch) -> None:
    """The bad rank has fewer batches, and continues with the evaluation."""
    runtime = make_runtime(watch)
    for step in range(BAD_STEP - 1 if dist.get_rank() == BAD_RANK else 5):
        one_step(runtime, step)
    with torch.no_grad():
        runtime(batch(SPEC, 0, 0, 0)[0])
        runtime.sum_over_ranks(1)


def test_a_rank_with_fewer_batches_is_named_with_both_collectives_and_both_stacks() -> None:
    text = assert_blamed(
        rank_outcomes(_skips_a_step, 3), "the ranks wait for each other", "step 3", "rank 1 issued control_sum"
    )
    assert "ranks 0, 2 issued" in text
    assert "_skips_a_step" in text
    assert "one_step" in text


def _has_a_wider_block(watch: RankWatch) -> None:
    wide = TinySpec(blocks=2, width=24)
    runtime = make_runtime(watch, model=TinyTransformer(wide if dist.get_rank() == BAD_RANK else SPEC))
    for step in range(3):
        one_step(runtime, step)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_with_a_different_model_size_is_named_even_though_the_backend_aborts(world: int) -> None:
    usual = SPEC.vocab * SPEC.width  # elements of the first broadcast from rank 0
    told = f"broadcast of unit embed ({usual} x float32) in start of step 1"
    text = assert_blamed(rank_outcomes(_has_a_wider_block, world), "the ranks differ in collective world 1: ", told)
    assert "_has_a_wider_block" in text


def _has_a_block_more(watch: RankWatch) -> None:
    runtime = make_runtime(watch, model=TinyTransformer(TinySpec(blocks=3 if dist.get_rank() == BAD_RANK else 2)))
    one_step(runtime, 0)


def test_a_rank_with_an_extra_block_is_named_with_the_unit() -> None:
    assert_blamed(rank_outcomes(_has_a_block_more, 3), "the ranks differ", "blocks.2", "step 1")


def _reduces_another_dtype(watch: RankWatch) -> None:
    """The number of bytes is equal on every rank, so the backend reports no error although the numbers are wrong."""
    runtime = make_runtime(watch, stage=0)
    one_step(runtime, 0)
    bad = dist.get_rank() == BAD_RANK
    full = torch.ones(12, dtype=torch.float64) if bad else torch.ones(24)
    runtime.collectives.reduce(full, full, "blocks.0").wait()
    one_step(runtime, 1)


def test_a_mismatch_that_the_backend_does_not_detect_is_reported_before_any_update() -> None:
    outcomes = rank_outcomes(_reduces_another_dtype, 3)
    assert_blamed(outcomes, "rank 1 issued all_reduce of unit blocks.0 (12 x float64)", "step 2")
    assert [outcome.how for outcome in outcomes] == ["raised"] * 3


def _saves_on_one_rank(watch: RankWatch) -> None:
    runtime = make_runtime(watch)
    one_step(runtime, 0)
    if dist.get_rank() == BAD_RANK:
        runtime.collectives.gather_objects({"checkpoint": 1})
    one_step(runtime, 1)


def test_a_rank_that_alone_saves_a_checkpoint_is_named() -> None:
    text = assert_blamed(rank_outcomes(_saves_on_one_rank, 3), "rank 1 issued gather_objects", "step 2")
    assert "_saves_on_one_rank" in text


# ---- ranks that end ----------------------------------------------------------------------------------------------


def _ends_early(watch: RankWatch) -> None:
    runtime = make_runtime(watch)
    for step in range(2 if dist.get_rank() == BAD_RANK else 5):
        one_step(runtime, step)
    if dist.get_rank() == BAD_RANK:
        watch.close()
        time.sleep(4)  # stays connected, like a rank that is writing its results


@pytest.mark.full
def test_a_rank_that_ended_early_is_named_while_its_process_still_lives() -> None:
    text = assert_blamed(rank_outcomes(_ends_early, 3), "rank 1 ended while others go on")
    assert "step 3" in text


def _raise() -> None:
    raise KeyError("no such token")


def _raises_in_forward(watch: RankWatch) -> None:
    train_with(watch, _raise)


def test_a_rank_that_raises_in_forward_is_named_with_its_error_and_place() -> None:
    outcomes = rank_outcomes(_raises_in_forward, 3)
    text = assert_blamed(outcomes, "rank 1 failed: KeyError: 'no such token'", "step 3", "forward", "unit blocks.1")
    assert "in _raise" in text
    assert "no such token" in outcomes[BAD_RANK].text


def _exit() -> None:
    os._exit(3)


def _exits(watch: RankWatch) -> None:
    train_with(watch, _exit)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _is_killed(watch: RankWatch) -> None:
    train_with(watch, _kill)


@pytest.mark.parametrize("function", [_exits, _is_killed])
def test_a_rank_whose_process_died_is_named_with_its_last_position(function: Callable[[RankWatch], None]) -> None:
    outcomes = rank_outcomes(function, 3)  # HASTY reports no rank as stuck within the time of a test
    assert_blamed(outcomes, "rank 1 is gone", "step 3, forward, unit blocks.1", "the last was")
    assert outcomes[BAD_RANK].how == "died"


def _exhaust() -> None:
    torch.empty(1 << 50)


def _runs_out_of_memory(watch: RankWatch) -> None:
    train_with(watch, _exhaust)


def test_an_out_of_memory_error_on_one_rank_is_reported_by_all_ranks() -> None:
    outcomes = rank_outcomes(_runs_out_of_memory, 3)
    told = "out of memory in forward of step 3, unit blocks.1: wanted 4503599627370496 bytes"
    assert_blamed(outcomes, told)
    assert told in outcomes[BAD_RANK].text
    assert outcomes[BAD_RANK].blamed == (BAD_RANK,)


def _rank_0_ends(watch: RankWatch, act: Callable[[], object]) -> None:
    runtime = make_runtime(watch)
    one_step(runtime, 0)
    if dist.get_rank() == 0:
        act()
    one_step(runtime, 1)


@pytest.mark.parametrize(("act", "told"), [(_kill, "rank 0"), (_raise, "rank 0 failed: KeyError: 'no such token'")])
def test_the_other_ranks_name_rank_0_even_though_the_store_ends_with_it(act: Callable[[], object], told: str) -> None:
    outcomes = rank_outcomes(partial(_rank_0_ends, act=act), 3, tcp=True)
    for outcome in outcomes[1:]:
        assert outcome.how in ("raised", "ended")
        assert outcome.blamed == (0,)
        assert told in outcome.text


# ---- ranks that stop ---------------------------------------------------------------------------------------------


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _is_stopped(watch: RankWatch) -> None:
    train_with(watch, _stop)


def test_a_rank_that_is_stopped_is_named() -> None:
    outcomes = rank_outcomes(_is_stopped, 3)
    assert_blamed(outcomes, "rank 1 is stopped by a signal", "step 3, forward, unit blocks.1")


def _loop_for_ever() -> None:
    while True:
        sum(range(1000))


def _never_returns(watch: RankWatch) -> None:
    train_with(watch, _loop_for_ever)


@pytest.mark.full
def test_a_rank_in_an_endless_loop_is_named_with_its_stack() -> None:
    outcomes = rank_outcomes(_never_returns, 3, replace(HASTY, stuck_s=6.0))
    text = assert_blamed(outcomes, "rank 1 has not come to it", "in _loop_for_ever", "step 3")
    assert "in collective" in text.partition("--- rank 0")[2].partition("--- rank 1")[0]
    assert outcomes[BAD_RANK].how == "ended"
    assert outcomes[BAD_RANK].blamed == (BAD_RANK,)


def _sleep() -> None:
    time.sleep(3.0)


def _is_slow(watch: RankWatch) -> None:
    train_with(watch, _sleep)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_a_slow_rank_is_not_blamed(world: int) -> None:
    outcomes = rank_outcomes(_is_slow, world, replace(HASTY, slow_s=0.3))
    assert [outcome.how for outcome in outcomes] == ["ok"] * world, outcomes
    assert outcomes[0].seconds > 3.0


def _works_alone_at_the_end(watch: RankWatch) -> None:
    runtime = make_runtime(watch)
    one_step(runtime, 0)
    if dist.get_rank() == 0:
        time.sleep(8.0)


@pytest.mark.full
def test_a_rank_that_still_works_after_the_others_have_ended_blames_no_rank() -> None:
    outcomes = rank_outcomes(_works_alone_at_the_end, 2, replace(HASTY, slow_s=0.3, stuck_s=5.0))
    assert [outcome.how for outcome in outcomes] == ["ok", "ok"], outcomes


# ---- cost --------------------------------------------------------------------------------------------------------


class CountingStore:
    """Records the calls; the second rank of this world of two does not exist."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.calls.append(f"set {key}")

    def get(self, key: str) -> bytes:
        raise AssertionError(key)

    def add(self, key: str, amount: int) -> int:
        raise AssertionError(key)

    def check(self, keys: list[str]) -> bool:
        self.calls.append(f"check {keys}")
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        pass


def test_a_run_that_progresses_checks_the_store_once_per_poll_s_and_not_per_collective() -> None:
    store = CountingStore()
    begun = time.monotonic()
    watch = RankWatch(store, 0, 2, replace(HASTY, poll_s=0.1))
    issued = 0
    while len(store.calls) < 8:
        watch.journal.wait(watch.journal.issue("all_gather", "blocks.0", 1000, torch.float32))
        watch.journal.wait(0)
        issued += 1
    looks = store.calls[1:]
    watch.close()
    assert issued > 100 * len(looks)
    assert set(looks) == {"check ['ask/1']"}
    assert len(looks) <= (time.monotonic() - begun) / 0.1 + 1
