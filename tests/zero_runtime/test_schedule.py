"""The schedule gathers, reduces and releases units in the right order without changing a bit or blocking a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.oracle import ADAMW, Case
from harness.plain_optimizers import plain_optimizer
from harness.ranks import run_ranks
from harness.trainee import train
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_runtime.plan import Phase, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.schedule import Schedule
from zero_runtime.unit import Unit
from zero_runtime.unit_gradients import GradState
from zero_runtime.unit_parameters import DataState

STAGES = (0, 1, 2, 3)

# ---- the order of calls, on fake units that record them --------------------------------------------------------------


@dataclass(eq=False)
class FakeUnit:
    name: str
    log: list[str]
    trainable: bool = True

    def unshard(self) -> None:
        self.log.append(f"unshard {self.name}")

    def send_grad(self) -> None:
        """A no-op: no part of this unit is updated on another device."""

    def begin_fetch(self) -> None:
        self.log.append(f"fetch {self.name}")

    def wait_unshard(self) -> None:
        self.log.append(f"use {self.name}")

    def reshard(self, after: Phase) -> None:
        self.log.append(f"reshard {self.name} {after.value}")

    waits_late: bool = False

    def begin_backward(self) -> None: ...

    def reduce_grad(self) -> None:
        self.log.append(f"reduce {self.name}")

    def wait_reduce(self) -> None:
        self.log.append(f"reduced {self.name}")


@dataclass
class Rehearsal:
    """A schedule over three fake units, a, b and c, and the log of its calls."""

    row: int
    prefetch: int
    frozen: str = ""
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.units = [FakeUnit(name, self.log, name not in self.frozen) for name in "abc"]
        plan = ZeroPlan.from_stage(self.row)
        self.schedule = Schedule(self.units, plan, prefetch=self.prefetch)  # type: ignore[arg-type]

    def forward(self) -> None:
        for unit in self.units:
            self.schedule.before_unit_forward(unit)  # type: ignore[arg-type]
            self.schedule.after_unit_forward(unit)  # type: ignore[arg-type]

    def backward(self, *, boundary: bool = True, without: str = "") -> None:
        self.schedule.begin_backward(boundary=boundary)
        for unit in reversed(self.units):
            self.schedule.before_unit_backward(unit)  # type: ignore[arg-type]
            if unit.name not in without:
                self.schedule.after_unit_backward(unit)  # type: ignore[arg-type]
        self.schedule.end_backward()

    def said(self, *verbs: str) -> list[str]:
        """Log lines of these methods since the last call."""
        lines = [line for line in self.log if line.split()[0] in verbs]
        self.log.clear()
        return lines


AHEAD = {0: ["a", "b", "c"], 1: ["ab", "bc", "c"], 2: ["abc", "bc", "c"], 9: ["abc", "bc", "c"]}


@pytest.mark.parametrize("prefetch", AHEAD)
def test_the_next_units_in_recorded_order_are_prefetched_before_waiting_for_the_current_unit(prefetch: int) -> None:
    rehearsal = Rehearsal(3, prefetch)
    rehearsal.forward()
    first = rehearsal.said("unshard", "use")
    assert first == [line for name in "abc" for line in (f"unshard {name}", f"use {name}")]
    rehearsal.backward()
    assert rehearsal.said("unshard", "use") == [line for name in "cba" for line in (f"unshard {name}", f"use {name}")]
    mirror = str.maketrans("abc", "cba")
    for run, names in ((rehearsal.forward, str), (rehearsal.backward, lambda name: name.translate(mirror))):
        run()
        wanted = []
        for group in AHEAD[prefetch]:
            wanted += [f"unshard {names(name)}" for name in group] + [f"use {names(group[0])}"]
        assert rehearsal.said("unshard", "use") == wanted


def test_units_that_were_used_between_two_modules_of_another_are_not_gathered_again() -> None:
    rehearsal = Rehearsal(3, 1)
    first, between, last = rehearsal.units
    schedule: Any = rehearsal.schedule

    def forward() -> None:  # `first` has two modules, and `between` is called between them
        for unit, ended in ((first, None), (between, between), (first, first), (last, last)):
            schedule.before_unit_forward(unit)
            if ended is not None:
                schedule.after_unit_forward(ended)

    def backward() -> None:
        schedule.begin_backward(boundary=True)
        for unit, ended in ((last, last), (first, None), (between, between), (first, first)):
            schedule.before_unit_backward(unit)
            if ended is not None:
                schedule.after_unit_backward(ended)
        schedule.end_backward()

    for _ in range(2):  # the first records the order
        rehearsal.log.clear()
        forward()
        backward()
    lines = [line for line in rehearsal.log if line.startswith(("unshard", "reshard"))]
    gathered, released = [lines.index(f"unshard {first.name}"), lines.index(f"reshard {between.name} forward")]
    assert f"unshard {between.name}" in lines[gathered:released]
    until_backward = lines[released : lines.index(f"reshard {last.name} forward")]
    assert f"unshard {between.name}" not in until_backward
    ended = lines.index(f"reshard {between.name} backward")
    assert f"unshard {between.name}" not in lines[ended:]


@pytest.mark.parametrize(("prefetch", "beyond"), [(0, "bc"), (1, "c"), (2, "")])
def test_the_unit_after_the_prefetched_ones_begins_its_fetch_from_offload_memory(prefetch: int, beyond: str) -> None:
    rehearsal = Rehearsal(3, prefetch)
    rehearsal.forward()
    rehearsal.backward()
    assert rehearsal.said("fetch") == [], "the order is not known yet"
    rehearsal.forward()
    assert rehearsal.said("fetch") == [f"fetch {name}" for name in beyond]


def test_a_forward_during_backward_releases_no_units() -> None:
    rehearsal = Rehearsal(3, 0)
    rehearsal.forward()
    assert rehearsal.said("reshard") == [f"reshard {name} forward" for name in "abc"]
    rehearsal.schedule.begin_backward(boundary=True)
    rehearsal.forward()
    assert rehearsal.said("reshard") == []


def test_at_most_one_reduction_is_in_flight_and_none_after_backward() -> None:
    rehearsal = Rehearsal(2, 0)
    rehearsal.forward()
    rehearsal.backward()
    order = ["reduce c", "reduced c", "reduce b", "reduced b", "reduce a", "reduced a"]
    assert rehearsal.said("reduce", "reduced") == order


@pytest.mark.parametrize("row", STAGES)
def test_gradients_are_reduced_at_the_boundary_or_in_every_backward_depending_on_the_stage(row: int) -> None:
    rehearsal = Rehearsal(row, 0)
    rehearsal.backward(boundary=False)
    assert len(rehearsal.said("reduce")) == (3 if row >= 2 else 0)
    rehearsal.backward()
    assert len(rehearsal.said("reduce")) == 3


def test_units_without_gradients_are_reduced_once_at_the_end_and_frozen_units_never() -> None:
    rehearsal = Rehearsal(2, 0, frozen="a")
    rehearsal.backward(without="abc")
    assert rehearsal.said("reduce") == ["reduce c", "reduce b"]


def test_a_unit_that_is_complete_early_is_reduced_after_the_units_before_it() -> None:
    rehearsal = Rehearsal(2, 0)
    rehearsal.backward(without="c")
    assert rehearsal.said("reduce") == ["reduce c", "reduce b", "reduce a"]


def test_every_unit_is_released_after_its_last_use_by_the_end_of_backward() -> None:
    rehearsal = Rehearsal(3, 1)
    rehearsal.forward()
    for without in ("b", "abc"):
        rehearsal.backward(without=without)
        for name in "abc":
            last = [line for line in rehearsal.log if line.split()[1] == name and line.split()[0] != "reduced"]
            assert f"reshard {name} backward" in last[last.index(f"use {name}") :]
            assert last[-1] in (f"reshard {name} backward", f"reduce {name}")
        rehearsal.log.clear()


@pytest.mark.parametrize("late", [False, True])
def test_reductions_that_hold_memory_are_waited_for_before_the_next_and_others_at_the_end(late: bool) -> None:
    rehearsal = Rehearsal(1, 1)
    for unit in rehearsal.units:
        unit.waits_late = late
    rehearsal.forward()
    rehearsal.backward()
    begun, ended = ([f"{verb} {name}" for name in "cba"] for verb in ("reduce", "reduced"))
    in_turn = [line for both in zip(begun, ended, strict=True) for line in both]
    assert rehearsal.said("reduce", "reduced") == (begun + ended if late else in_turn)


def test_after_step_reshards_every_unit() -> None:
    rehearsal = Rehearsal(1, 1)
    rehearsal.schedule.after_step()
    assert rehearsal.log == [f"reshard {name} step" for name in "abc"]


# ---- prefetch depth changes no bits ----------------------------------------------------------------------------------


def _by_depth(case: Case) -> dict[int, Any]:
    return {prefetch: train(case, prefetch=prefetch) for prefetch in (0, 1, 2, 5)}


@pytest.mark.full
def test_prefetch_depth_changes_no_bits_at_any_stage() -> None:
    for by_depth in run_ranks(_by_depth, 2, Case(2, 2, steps=4)):
        for prefetch in (1, 2, 5):
            for stage, trace in by_depth[prefetch].items():
                wanted = by_depth[0][stage]
                assert (trace.losses, trace.norms) == (wanted.losses, wanted.norms)
                assert all(torch.equal(trace.weights[name], weight) for name, weight in wanted.weights.items())


# ---- unused parameters -----------------------------------------------------------------------------------------------

WIDTH = 5


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        y = x + torch.tanh(self.always(x))
        return y + torch.tanh(self.sometimes(x)) if whole else y


class Branches(nn.Module):
    """Blocks that can be skipped or partly run, of equal sizes, so that mixed-up units would cause no size error."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.blocks = nn.ModuleList(Branch() for _ in range(4))
        self.recompute = recompute

    def forward(self, x: torch.Tensor, skipped: tuple[int, ...] = (), partial: tuple[int, ...] = ()) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index in skipped:
                continue
            if self.recompute:
                x = checkpoint(block, x, index not in partial, use_reentrant=False)
            else:
                x = block(x, index not in partial)
        return x.square().sum() / 100


@dataclass(frozen=True)
class Use:
    """The blocks that one step skips or runs in part, on the given ranks."""

    skipped: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0, 1)

    def on(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.skipped, self.partial) if rank in self.ranks else ((), ())


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def small_runtime(model: nn.Module, stage: int, **settings: Any) -> ZeroRuntime:
    plan = ZeroPlan.from_stage(stage)
    return ZeroRuntime(model, plan, MixedPrecision(), ADAMW, RuntimeSettings(**settings), torch.device("cpu"))


def _train_branches(uses: list[Use], stages: tuple[int, ...], recompute: bool = False) -> dict[int, Any]:
    """By stage: each step's (states of the units after backward, loss), and the master shards after the last step."""
    found = {}
    for stage in stages:
        runtime = small_runtime(Branches(recompute=recompute), stage)
        steps = []
        for step, use in enumerate(uses):
            runtime.backward(runtime(inputs(step, dist.get_rank()), *use.on(dist.get_rank())))
            states = [(unit.parameters.state, unit.gradients.state, _full_bytes(unit)) for unit in runtime.units]
            steps.append((states, runtime.step(1e-2).loss))
        found[stage] = steps, [unit.master_shard for unit in runtime.units]
    return found


def _full_bytes(unit: Unit) -> int:
    return unit.parameters.unsharded_param.untyped_storage().nbytes()


def plain_branches(uses: list[Use], world: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of plain torch in one process, where unused parameters have a gradient of zero."""
    model = Branches()
    optimizer = plain_optimizer(ADAMW, dict(model.named_parameters()), 1e-2)
    losses = []
    for step, use in enumerate(uses):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        per_rank = [model(inputs(step, rank), *use.on(rank)) for rank in range(world)]
        for loss in per_rank:
            loss.backward()
        losses.append(sum(float(loss.detach()) for loss in per_rank))
        optimizer.step()
    return losses, [torch.cat([p.detach().reshape(-1) for p in block.parameters()]) for block in model.blocks]


def assert_trained_as_plain(results: list[dict[int, Any]], uses: list[Use]) -> None:
    """Assert equal bits: at world 2 gloo's sum is r0 + r1, and 0 + r0 equals r0."""
    losses, weights = plain_branches(uses, len(results))
    for stage in results[0]:
        for steps, _ in (by_stage[stage] for by_stage in results):
            assert [loss for _, loss in steps] == losses, f"stage {stage}"
        shards = zip(*(by_stage[stage][1] for by_stage in results), strict=True)
        for unit, (weight, parts) in enumerate(zip(weights, shards, strict=True)):
            full = torch.cat(parts) if stage else parts[0]
            assert torch.equal(full[: weight.numel()], weight), f"stage {stage}, block {unit}"


ON_ALL_RANKS = [
    Use(),
    Use(skipped=(1,)),
    Use(partial=(0, 3)),
    Use(skipped=(0, 3)),
    Use(skipped=(1, 2, 3), partial=(0,)),
    Use(),
]


def test_unused_parameters_count_as_zero_gradients() -> None:
    results = run_ranks(_train_branches, 2, ON_ALL_RANKS, STAGES)
    assert_trained_as_plain(results, ON_ALL_RANKS)


def test_after_backward_every_unit_is_reduced_and_at_stage_3_also_released() -> None:
    for by_stage in run_ranks(_train_branches, 2, ON_ALL_RANKS, STAGES):
        for stage, (steps, _) in by_stage.items():
            for states, _ in steps:
                assert {grad for _, grad, _ in states} == {GradState.REDUCED}
                if stage == 3:
                    assert {(data, full_bytes) for data, _, full_bytes in states} == {(DataState.STALE, 0)}


# Only one rank runs a block in part, so its unit is complete at a different time than on the other rank.
ON_ONE_RANK = [Use(), Use(partial=(3,), ranks=(1,)), Use(partial=(1, 2), ranks=(0,)), Use()]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_unused_on_only_one_rank_count_as_zero_gradients(stage: int) -> None:
    """Every rank must issue the same collectives in the same order, whenever its gradients arrive."""
    results = run_ranks(_train_branches, 2, ON_ONE_RANK, (stage,))
    assert_trained_as_plain(results, ON_ONE_RANK)


def test_recomputed_blocks_change_no_bits_at_any_stage() -> None:
    uses = [Use(), Use(skipped=(1,)), Use()]
    assert_trained_as_plain(run_ranks(_train_branches, 2, uses, STAGES, True), uses)


# ---- number of gathers -----------------------------------------------------------------------------------------------


def _gathers() -> dict[tuple[int, int], int]:
    """Number of all-gather calls in the third step, by (stage, prefetch)."""
    found = {}
    for stage in (1, 2, 3):
        for prefetch in (0, 1, 5):
            runtime = small_runtime(Branches(), stage, prefetch=prefetch)
            for step in range(3):
                runtime.reset_ledger()
                runtime.backward(runtime(inputs(step, dist.get_rank())))
                runtime.step(1e-2)
            found[stage, prefetch] = runtime.reset_ledger().data["all_gather"].calls
    return found


def test_each_unit_is_gathered_once_per_step_or_twice_at_stage_3_at_every_prefetch_depth() -> None:
    for found in run_ranks(_gathers, 2):
        assert found == {(stage, prefetch): 8 if stage == 3 else 4 for stage in (1, 2, 3) for prefetch in (0, 1, 5)}


class Flow(nn.Module):
    """A frozen linear layer between two trainable ones: gradients flow through it, its weights never change."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.last(torch.tanh(self.frozen(self.first(x))))).sum()


def _train_around_frozen() -> dict[int, tuple[list[float], bool]]:
    found = {}
    for stage in STAGES:
        model = Flow()
        runtime = small_runtime(model, stage)
        losses = []
        for step in range(4):
            runtime.backward(runtime(inputs(step, dist.get_rank())))
            losses.append(runtime.step(1e-2).loss)
        frozen = next(unit for unit in runtime.units if not unit.trainable)
        frozen.wait_unshard()
        found[stage] = losses, torch.equal(model.frozen.weight, Flow().frozen.weight)
    return found


def test_frozen_weights_stay_unchanged_and_pass_gradients_through_at_every_stage() -> None:
    for by_stage in run_ranks(_train_around_frozen, 2):
        assert len({tuple(losses) for losses, _ in by_stage.values()}) == 1
        assert all(same for _, same in by_stage.values())
