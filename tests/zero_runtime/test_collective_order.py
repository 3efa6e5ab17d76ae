"""Ranks of NCCL never wait for each other forever: 8 to 1,024 ranks, each run alone, then replayed together.

A rank runs by itself (harness/lone_rank.py), so a world may have any size: some ranks are run, the others do what the
sampled rank of the same parity does. The replay (harness/nccl_replay.py) knows when a kernel starts and ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from harness.attack_counts import Tally
from harness.lone_rank import WORLD, Deed, lone_rank
from harness.models import TinySpec, TinyTransformer, token_loss_sum
from harness.nccl_replay import Replay, Script, interleaving
from harness.shapes import Adapters, build_shape, ids_of
from test_schedule import Branches, Use, inputs
from torch import nn

from zero_runtime.errors import RankError
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import OuterSharding, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.world import leave_world

LONG = pytest.mark.full
IDS = torch.zeros((1, 3), dtype=torch.int64)


@dataclass(frozen=True)
class Program:
    """What all ranks run: a model, a row and two steps."""

    model: str = "partly unused"
    stage: int = 3
    world: int = 8
    shard_ranks: int | None = None
    prefetch: int = 1
    micro_batches: int = 1
    outer_sharding: OuterSharding | None = None

    @property
    def shards(self) -> int:
        return 1 if self.stage == 0 else self.shard_ranks or self.world

    def members_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The members of the rank's groups, by their names in its script."""
        everyone = tuple(range(self.world))
        start, place = rank - rank % self.shards, rank % self.shards
        shard, replicas = everyone[start : start + self.shards], everyone[place :: self.shards]
        across = 1 if self.outer_sharding is None else 2
        kinds = [shard, shard] * (self.shards > 1) + [replicas] * across * (self.shards < self.world)
        return {WORLD: everyone} | {f"group {number}": kind for number, kind in enumerate(kinds, 1)}


def _model_and_loss(name: str) -> tuple[nn.Module, Callable[[nn.Module, int, int], torch.Tensor]]:
    """A model and the loss of (model, step, rank)."""
    if name == "partly unused":  # odd ranks leave parameters of a block unused, in some steps
        uses = [Use(), Use(partial=(2,)), Use(partial=(0, 3))]

        def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
            use = replace(uses[step % 3], ranks=(rank,) if rank % 2 else ())
            return model(inputs(step, rank).bfloat16(), *use.on(rank))

        return Branches(), loss_of
    if name == "adapters":
        return build_shape(Adapters), lambda model, step, rank: model.loss_of(model(ids_of(step, rank)))
    spec = TinySpec(frozen=name == "frozen", tied=name == "frozen", recomputed=name == "recomputed")
    return TinyTransformer(spec), lambda model, step, rank: token_loss_sum(model, IDS, IDS)


def run(program: Program, rank: int, told: list[torch.Tensor], failing_at: int = 0) -> Script:
    """Run one rank. If it fails, it closes its runtime as a `finally` of a user's program would."""
    with lone_rank(rank, program.world, failing_at=failing_at, told=told) as own:
        model, loss_of = _model_and_loss(program.model)
        shard_ranks = program.shard_ranks if program.stage else None
        plan = ZeroPlan.from_stage(program.stage, shard_ranks=shard_ranks, outer_sharding=program.outer_sharding)
        settings = RuntimeSettings(program.micro_batches, prefetch=program.prefetch, read_host=own.read_host)
        runtime = ZeroRuntime(model, plan, MixedPrecision("bf16"), AdamWConfig(), settings, torch.device("cpu"))
        journal = runtime.collectives.journal
        with suppress(torch.OutOfMemoryError), closing(runtime):
            for step in range(2):
                for _ in range(program.micro_batches):
                    runtime.sum_over_ranks(1)
                    runtime.backward(loss_of(runtime.model, step, rank).float())
                runtime.step(1e-3)
        if failing_at:
            own.deeds.append(Deed("die"))
        else:
            leave_world()
        assert own.members == program.members_of(rank)
        return Script(own.with_units(journal), own.members)


@cache
def sampled(program: Program, ranks: tuple[int, ...]) -> dict[int, Script]:
    """The scripts of these ranks; 0 is the first."""
    told: list[torch.Tensor] = []
    return {rank: run(program, rank, told) for rank in ranks}


def whole_world(program: Program, scripts: dict[int, Script]) -> list[Script]:
    """Every rank's script; a rank that was not run does what the first sampled rank of its parity does."""
    by_parity = {rank % 2: script for rank, script in reversed(scripts.items())}
    return [
        scripts.get(rank) or Script(by_parity[rank % 2].deeds, program.members_of(rank))
        for rank in range(program.world)
    ]


def issues(script: Script) -> list[Deed]:
    return [deed for deed in script.deeds if deed.what == "issue"]


# ---- one order and no deadlock ---------------------------------------------------------------------------------------

FIRST = (0, 1, 2, 3, 4, 5, 6, 7)
HYBRID = Program(shard_ranks=4)
OUTER = Program(shard_ranks=4, outer_sharding="optim")
PROGRAMS = [HYBRID, OUTER]
PROGRAMS += [replace(OUTER, model="frozen", micro_batches=2), replace(OUTER, shard_ranks=1)]
PROGRAMS += [Program(model) for model in ("tiny", "frozen", "recomputed", "adapters", "partly unused")]
PROGRAMS += [Program(stage=stage, micro_batches=2) for stage in (0, 1, 2, 3)]
PROGRAMS += [Program("frozen", stage, shard_ranks=2, micro_batches=2) for stage in (1, 2, 3)]
PROGRAMS += [Program(prefetch=prefetch, shard_ranks=shards) for prefetch in (0, 2) for shards in (2, None)]
# Places for kernels on a device, and whether they start in the host's order.
DEVICES = [(1, True), (2, True), (2, False), (3, False)]


def check(program: Program, ranks: tuple[int, ...], checked: Tally, seeds: int = 3) -> None:
    scripts = sampled(program, ranks)
    for rank, script in scripts.items():
        assert interleaving(script) == interleaving(scripts[0]), f"rank {rank} has another order than rank 0"
    everyone = whole_world(program, scripts)
    replays = [(*device, seed) for device in DEVICES for seed in range(1 if device[0] == 1 else seeds)]
    for places, in_host_order, seed in replays:
        replay = Replay(everyone, places=places, in_host_order=in_host_order, seed=seed)
        assert replay.run() == {}, (places, in_host_order, seed)
        assert replay.mismatches == []
    count = len(issues(scripts[0]))
    checked("collective order", ranks=len(everyone), collectives=count, replays=len(replays), deadlocks=0)


@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=() if one in (HYBRID, OUTER) else LONG) for one in PROGRAMS]
)
def test_all_ranks_of_a_node_issue_one_order_and_none_waits_forever(program: Program, checked: Tally) -> None:
    check(program, (0, 1, 4, 7) if program in (HYBRID, OUTER) else FIRST, checked)


@pytest.mark.parametrize("world", [64, pytest.param(1024, marks=LONG)])
def test_hybrid_ranks_of_many_nodes_issue_one_order_and_none_waits_forever(world: int, checked: Tally) -> None:
    drawn = random.Random(world).sample(range(8, world), 1 if world == 64 else 64)
    first = (0, 1) if world == 64 else FIRST
    check(Program(shard_ranks=8, world=world), (*first, *drawn), checked, seeds=1)


@pytest.mark.parametrize("model", ["tiny", pytest.param("frozen", marks=LONG)])
def test_reductions_of_replicas_are_issued_with_their_reduce_scatter(model: str) -> None:
    script = sampled(Program(model, shard_ranks=4), (0,))[0]
    found = issues(script)
    for before, deed in pairwise(found):
        if before.kind == "reduce_scatter":
            assert (deed.kind, deed.unit, deed.stream) == ("all_reduce", before.unit, "side")


# ---- ranks that fail or die ------------------------------------------------------------------------------------------


def _blocked_by(program: Program, rank: int, script: Script) -> dict[int, str]:
    everyone = whole_world(program, sampled(program, (0, 1, 4, 7)))
    everyone[rank] = script
    return Replay(everyone, places=1, in_host_order=True).run()


@pytest.mark.parametrize(
    ("program", "every"),
    [
        (HYBRID, 4),
        *(pytest.param(one, 1, marks=LONG) for one in (HYBRID, Program("frozen", 2), Program("recomputed"))),
    ],
)
def test_a_rank_without_memory_at_a_collective_destroys_nothing_and_is_waited_for_in_a_read(
    program: Program, every: int, checked: Tally
) -> None:
    """Its peers wait on the device, where their watches end them with the verdict, and not in a destruction.

    After the last read of the step they may come to the destruction of their groups, where their watches end them too.
    """
    whole = sampled(program, (0, 1, 4, 7))[1]
    last_read = max(place for place, deed in enumerate(whole.deeds) if deed.what == "read")
    before = issues(Script(whole.deeds[:last_read], whole.members))
    numbers = [deed.number for deed in before if deed.number > _last_of_start(whole)]
    for number in numbers[::every]:
        script = run(program, 1, list(_told(program)), failing_at=number)
        assert not [deed for deed in script.deeds if deed.what == "destroy"]
        blocked = _blocked_by(program, 1, script)
        assert blocked.pop(1) == "die"
        assert set(blocked.values()) == {"read"}
        checked("collective order: a rank fails", collectives=1, ranks_that_wait_in_a_destruction=0)


def _last_of_start(script: Script) -> int:
    """The number of the last collective that builds the runtime."""
    first_sum = next(deed.number for deed in issues(script) if deed.dtype == "int64" and deed.kind == "all_reduce")
    return first_sum - 1


@cache
def _told(program: Program) -> tuple[torch.Tensor, ...]:
    told: list[torch.Tensor] = []
    run(program, 0, told)
    return tuple(told)


def test_a_rank_that_dies_at_any_point_is_waited_for_in_a_rendezvous_or_a_read(checked: Tally) -> None:
    scripts = sampled(HYBRID, (0, 1, 4, 7))
    deeds = list(scripts[4].deeds)
    last_read = max(place for place, deed in enumerate(deeds) if deed.what == "read")
    for place in range(0, len(deeds), 7):
        blocked = _blocked_by(HYBRID, 4, Script([*deeds[:place], Deed("die")], scripts[4].members))
        assert blocked.pop(4) == "die"
        for reason in blocked.values():
            assert reason == "read" or reason.startswith("make" if place <= last_read else "destroy"), reason
        checked("collective order: a rank dies", points=1, ranks_without_end=0)


# ---- seeded faults ---------------------------------------------------------------------------------------------------


def _swapped(script: Script, first: Callable[[Deed], bool], second: Callable[[Deed], bool]) -> Script:
    """The script with a deed that is `first` and the next that is `second` exchanged, and their streams' waits kept."""
    deeds = list(script.deeds)
    one = next(place for place, deed in enumerate(deeds) if deed.number > _last_of_start(script) and first(deed))
    other = next(place for place in range(one + 1, len(deeds)) if second(deeds[place]))
    deeds.insert(one, deeds.pop(other))
    return Script(deeds, script.members)


def _of(kind: str) -> Callable[[Deed], bool]:
    return lambda deed: deed.what == "issue" and deed.kind == kind


def _destroyed_in_another_order(script: Script) -> Script:
    deeds = list(script.deeds)
    places = [place for place, deed in enumerate(deeds) if deed.what == "destroy" and deed.group != WORLD]
    destroyed = [deeds[place] for place in places]
    for place, deed in zip(places, reversed(destroyed), strict=True):
        deeds[place] = deed
    return Script(deeds, script.members)


def _without_one(script: Script) -> Script:
    number = next(deed.number for deed in issues(script)[40:] if deed.kind == "reduce_scatter")
    return Script([deed for deed in script.deeds if deed.number != number], script.members)


def _with_another_size(script: Script) -> Script:
    place = next(place for place, deed in enumerate(script.deeds) if _of("reduce_scatter")(deed))
    deeds = list(script.deeds)
    deeds[place] = deeds[place]._replace(numel=deeds[place].numel + 8)
    return Script(deeds, script.members)


def _fails_and_destroys(script: Script) -> Script:
    """What a `finally` did that destroyed the groups of a rank that had failed."""
    at = next(place for place, deed in enumerate(script.deeds) if _of("reduce_scatter")(deed))
    destroyed = [deed for deed in script.deeds if deed.what == "destroy"]
    return Script([*script.deeds[:at], *destroyed, Deed("die")], script.members)


FAULTS: dict[str, Callable[[Script], Script]] = {
    "groups destroyed in the order of a set": _destroyed_in_another_order,
    "two gathers exchanged": lambda script: _swapped(script, _of("all_gather"), _of("all_gather")),
    "two reductions exchanged": lambda script: _swapped(script, _of("reduce_scatter"), _of("reduce_scatter")),
    "a gather before the reduction that it follows": lambda script: _swapped(
        script, _of("reduce_scatter"), _of("all_gather")
    ),
    "a reduction before the gather that it follows": lambda script: _swapped(
        script, _of("all_gather"), _of("reduce_scatter")
    ),
    "an all-reduce later than on the other ranks": lambda script: _swapped(
        script, _of("all_reduce"), _of("all_gather")
    ),
    "a reduction that is left out": _without_one,
    "a reduction of another size": _with_another_size,
    "a failed rank that destroys its groups": _fails_and_destroys,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_departs_from_the_order_is_found(name: str, checked: Tally) -> None:
    scripts = sampled(HYBRID, (0, 1, 4, 7))
    everyone = whole_world(HYBRID, scripts)
    everyone[1] = FAULTS[name](everyone[1])
    assert interleaving(everyone[1]) != interleaving(everyone[0])
    replay = Replay(everyone, places=1, in_host_order=True)
    blocked = replay.run()
    assert blocked or replay.mismatches
    if "destroy" in name:
        assert any(reason.startswith("destroy") for reason in blocked.values())
    checked("collective order: seeded faults", faults=1, found=1)


def test_without_the_hosts_order_two_communicators_need_two_places_on_the_device(checked: Tally) -> None:
    """Why NCCL_LAUNCH_ORDER_IMPLICIT is set: with one place, each of two ranks may start what the other starts next."""
    everyone = whole_world(HYBRID, sampled(HYBRID, (0, 1, 4, 7)))
    blocked = [Replay(everyone, places=1, in_host_order=False, seed=seed).run() for seed in range(3)]
    assert all(set(found.values()) == {"read"} for found in blocked)
    checked("collective order: seeded faults", faults=1, found=1)


def test_one_order_of_two_rendezvous_is_enough_and_two_orders_are_not() -> None:
    members = {WORLD: (0, 1), "group 1": (0, 1), "group 2": (0, 1)}
    first, second = Deed("destroy", group="group 1"), Deed("destroy", group="group 2")
    for deeds, blocked in (([first, second], {}), ([second, first], {0: "destroy group 1", 1: "destroy group 2"})):
        scripts = [Script([first, second], members), Script(deeds, members)]
        assert Replay(scripts, places=1, in_host_order=True).run() == blocked


def test_the_error_of_a_collective_without_memory_is_the_ranks_own() -> None:
    with lone_rank(1, 8, failing_at=1), pytest.raises(torch.OutOfMemoryError) as raised:
        ZeroRuntime(
            TinyTransformer(TinySpec()),
            ZeroPlan.from_stage(3),
            MixedPrecision(),
            AdamWConfig(),
            RuntimeSettings(),
            torch.device("cpu"),
        )
    assert not isinstance(raised.value, RankError)
