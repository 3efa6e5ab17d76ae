"""Outer sharding against plain single-process PyTorch: states over all ranks, parameters inside each shard group.

The oracle sums the gradients of a group first and those of the groups then, as the runtime does, so that weights have
its bits. A loss is a sum in fp64 of n = world * micro-batches fp32 numbers, which are the same on both sides: two
orders of summation differ by at most 2 (n-1) 2^-53 of the sum (Higham, Accuracy and Stability, eq. 4.4).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from harness.checkpoints import SAVED_AFTER, Setting, assert_states, load_into, save_after, whole
from harness.checkpoints import train as train_on
from harness.copies import LateCopies
from harness.models import TinySpec, TinyTransformer, batch, token_loss_sum
from harness.oracle import ADAMW, LR, Case, Trace
from harness.ranks import run_alone, run_ranks
from harness.trainee import backwards_of_step, build_runtime, plan_of, train
from test_offload import offload_to
from test_rows import CLIP_NORM, JUMPY_SCALE, assert_same_bits, oracle_trace

from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.census import take_census
from zero_runtime.errors import PlanError
from zero_runtime.ledger import Ledger
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.optim.configs import AdamW8bitConfig, LambConfig, MuonConfig, OptimizerConfig, SgdConfig
from zero_runtime.plan import OuterSharding, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import CollectiveCounts, collective_elements, collective_formula
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.state_bytes import formula
from zero_runtime.wire import Wire

KINDS: tuple[OuterSharding, ...] = ("optim",)
GROUPED = Case(4, steps=3, shard_ranks=2)
FP32, BF16, FP16 = MixedPrecision(), MixedPrecision("bf16"), MixedPrecision("fp16")
PAPER = MixedPrecision("bf16", reduce="bf16", accumulate="bf16")
IN_FP32 = MixedPrecision("bf16", compute="fp32")


def _rows(case: Case, optimizer: OptimizerConfig = ADAMW) -> dict[OuterSharding | None, Trace]:
    """Replicas across the groups, and outer sharding."""
    cases = {kind: replace(case, outer_sharding=kind) for kind in (None, *KINDS)}
    return {kind: train(one, stages=(3,), optimizer=optimizer)[3] for kind, one in cases.items()}


@cache
def rows(case: Case) -> dict[OuterSharding | None, Trace]:
    return run_ranks(_rows, case.world, case)[0]


CASES = [
    replace(GROUPED, precision=BF16, micro_batches=3),
    replace(GROUPED, model=TinySpec(tied=True, frozen=True)),
    *(
        pytest.param(one, marks=pytest.mark.full)
        for one in (
            replace(GROUPED, precision=IN_FP32),
            replace(GROUPED, precision=PAPER, micro_batches=3),
            replace(GROUPED, precision=BF16, micro_batches=3, no_sync=True),
            replace(GROUPED, shard_ranks=1),
            replace(GROUPED, shard_ranks=4, micro_batches=2),
            replace(GROUPED, world=6, shard_ranks=3),
            replace(GROUPED, world=6, shard_ranks=2, micro_batches=2),
        )
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_weights_have_the_bits_of_plain_torch(case: Case) -> None:
    wanted, found = oracle_trace(case, reduces_every_backward=True), rows(case)
    terms = case.world * case.micro_batches
    for kind in KINDS:
        assert_same_bits(replace_losses(found[kind], wanted), wanted)
        for loss, right in zip(found[kind].losses, wanted.losses, strict=True):
            assert abs(loss - right) <= 2 * (terms - 1) * 2.0**-53 * right
        assert found[kind].norms == found[None].norms
        assert found[kind].losses == found[None].losses


def replace_losses(trace: Trace, other: Trace) -> Trace:
    return replace(trace, losses=other.losses)


ALIKE = [
    (replace(GROUPED, clip_norm=CLIP_NORM, micro_batches=2), ADAMW),
    *(
        pytest.param(*one, marks=pytest.mark.full)
        for one in (
            (replace(GROUPED, precision=FP16, loss_scale=JUMPY_SCALE, steps=12), ADAMW),
            (replace(GROUPED, clip_norm=CLIP_NORM, precision=BF16), LambConfig()),
            (replace(GROUPED, precision=BF16), AdamW8bitConfig()),
            (replace(GROUPED, precision=BF16), SgdConfig(momentum=0.9)),
        )
    ),
]


@pytest.mark.parametrize(("case", "optimizer"), ALIKE)
def test_outer_sharding_has_the_bits_of_replicas_across_the_groups(case: Case, optimizer: OptimizerConfig) -> None:
    """Clipping by the norm, a loss scale, and optimizers whose updates depend on several elements."""
    found = run_ranks(_rows, case.world, case, optimizer)[0]
    for kind in KINDS:
        assert_same_bits(found[kind], found[None])
        assert list(map(repr, found[kind].norms)) == list(map(repr, found[None].norms))  # nan where a step overflows
        assert found[kind].scales == found[None].scales
    assert case.clip_norm is None or min(found[None].norms) > CLIP_NORM
    assert case.precision != FP16 or len(set(found[None].skipped)) == 2, (
        "some steps must overflow, or it proves nothing"
    )


# ---- what is sent ----------------------------------------------------------------------------------------------------


def _calls(ledger: Ledger) -> dict[str, tuple[int, int]]:
    return {kind: (volume.calls, volume.elements) for kind, volume in ledger.data.items()}


def closed_forms(case: Case, world: int, group: int, units: int, padded: int) -> dict[str, tuple[int, int]]:
    """Calls and elements by kind of a steady step, for `padded` elements in as many units."""
    micro, groups = case.micro_batches, world // group
    inside, across = (group - 1) * padded // group, (groups - 1) * padded // world
    return {
        "all_gather": (2 * micro * units, 2 * micro * inside),
        "reduce_scatter": (micro * units, micro * inside),
        "outer_all_gather": (units, across),
        "outer_reduce_scatter": (micro * units, micro * across),
    }


def _sent(case: Case) -> dict[OuterSharding, tuple[list[dict[str, tuple[int, int]]], int, int, tuple[int, ...]]]:
    found = {}
    for kind in KINDS:
        runtime = build_runtime(replace(case, outer_sharding=kind), 3)
        runtime.reset_ledger()
        steps = []
        for step in range(3):
            backwards_of_step(runtime, case, step)
            if step == 2:
                census, predicted = take_census(runtime), predicted_state_bytes(runtime)
            runtime.step(LR)
            steps.append(_calls(runtime.reset_ledger()))
        counted = (census.params, census.grads, census.optimizer)
        assert counted == (predicted.params, predicted.grads, predicted.optimizer), kind
        padded = sum(unit.layout.padded_numel for unit in runtime.units)
        found[kind] = (steps, len(runtime.units), padded, counted)
        runtime.close()
    return found


def test_sent_messages_and_held_bytes_are_the_closed_forms() -> None:
    case = replace(GROUPED, micro_batches=2, precision=BF16)
    for by_kind in run_ranks(_sent, case.world, case):
        for kind, (steps, units, padded, counted) in by_kind.items():
            own = replace(case, outer_sharding=kind)
            plan = plan_of(own, 3)
            wanted = closed_forms(own, 4, 2, units, padded)
            assert steps[1:] == [wanted] * 2, kind
            counts = CollectiveCounts.of(plan, 2)
            assert sum(numel for _, numel in wanted.values()) == collective_elements(
                counts, padded, world=4, shard_count=plan.group_ranks(4)
            )
            # bf16 parameters in groups of 2; fp32 gradients, and fp32 masters and two moments, over 4 ranks.
            assert counted == (2 * padded // 2, 4 * padded // 4, 12 * padded // 4)
            assert formula(plan, BF16) == "2Ψ/G + 16Ψ/N"


def test_the_formula_of_the_messages_counts_what_crosses_the_groups_once() -> None:
    def told(kind: OuterSharding | None, micro: int) -> str:
        plan = ZeroPlan.from_stage(3, shard_ranks=8, outer_sharding=kind)
        return collective_formula(CollectiveCounts.of(plan, micro), world=64, shard_count=plan.group_ranks(64))

    assert told(None, 4) == "12Ψ·(G-1)/G + 8Ψ/G·(N/G-1)/(N/G)"
    assert told("optim", 4) == "12Ψ·(G-1)/G + 5Ψ/G·(N/G-1)/(N/G)"


def _dry_steps(case: Case) -> dict[OuterSharding, tuple[dict[str, tuple[int, int]], int, int, int]]:
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=case.world)
    found = {}
    for kind in KINDS:
        with FakeTensorMode():
            settings = RuntimeSettings(clip_norm=1.0, read_host=lambda numbers: [1.0] * numbers.numel())
            plan = plan_of(replace(case, outer_sharding=kind), 3)
            model = TinyTransformer(case.model)
            runtime = ZeroRuntime(model, plan, case.precision, ADAMW, settings, torch.device("cpu"))
            ids = torch.zeros((2, 16), dtype=torch.int64)
            for _ in range(2):
                runtime.reset_ledger()
                runtime.backward(token_loss_sum(model, ids, ids) / runtime.sum_over_ranks(32))
                runtime.step(1e-3)
            padded = sum(unit.layout.padded_numel for unit in runtime.units)
            found[kind] = (_calls(runtime.reset_ledger()), len(runtime.units), padded, runtime.collectives.shard_rank)
    return found


def test_a_dry_run_at_world_64_sends_the_closed_forms() -> None:
    case = Case(64, shard_ranks=8, precision=BF16, model=TinySpec(vocab=32_000, width=1024, blocks=4))
    for kind, (sent, units, padded, shard) in run_alone(_dry_steps, case).items():
        assert sent == closed_forms(replace(case, outer_sharding=kind), 64, 8, units, padded)
        assert shard == 5 * 8 + 1  # rank 13 is at place 5 of group 1


# ---- offload, and reads and writes between steps ---------------------------------------------------------------------


def _trained(runtime: ZeroRuntime, case: Case) -> list[float]:
    losses = []
    for step in range(3):
        backwards_of_step(runtime, case, step)
        losses.append(runtime.step(LR).loss)
    return losses


def _offloaded(case: Case, plans: list[OffloadPlan]) -> None:
    plain = build_runtime(case, 3)
    losses, states = _trained(plain, case), whole(plain)
    plain.close()
    for offload in plans:
        settings = RuntimeSettings(micro_batches=case.micro_batches, clip_norm=case.clip_norm, offload=offload)
        runtime = ZeroRuntime(
            TinyTransformer(case.model), plan_of(case, 3), case.precision, ADAMW, settings, torch.device("cpu")
        )
        assert _trained(runtime, case) == losses, offload
        assert_states(whole(runtime), states)
        runtime.close()


OFFLOADED = replace(GROUPED, outer_sharding="optim", precision=BF16)
ON_HOST = OffloadPlan(optimizer=Tier.HOST, copies=LateCopies)


def test_an_optimizer_offloaded_to_the_host_gives_the_same_bits() -> None:
    run_ranks(_offloaded, 4, replace(OFFLOADED, clip_norm=CLIP_NORM), [ON_HOST])


@pytest.mark.full
@pytest.mark.parametrize("clip_norm", [None, CLIP_NORM])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tier_of_the_optimizer_gives_the_same_bits(
    kind: OuterSharding, clip_norm: float | None, tmp_path: Path
) -> None:
    file = offload_to(tmp_path, params=False)
    plans = [replace(ON_HOST, ratio=0.5), file, ON_HOST]
    run_ranks(_offloaded, 4, replace(OFFLOADED, outer_sharding=kind, micro_batches=2, clip_norm=clip_norm), plans)


def _read_and_written(case: Case) -> list[float]:
    """Losses of forwards without backwards: after a write, after the next step, and of ranks that call unequally."""
    runtime = build_runtime(case, 3)
    train_on(runtime, case, 0, 1)
    with runtime.full_params(["blocks.0.mix.weight"], write=True) as values:
        values["blocks.0.mix.weight"].fill_(0.25)

    def loss() -> float:
        with torch.no_grad():
            return float(token_loss_sum(runtime.model, *batch(case.model, 7, 0, 0)))

    found = [loss()]
    train_on(runtime, case, 1, 1)
    found += [loss(), loss()]
    with runtime.uneven_forwards():
        calls = 1 + runtime.collectives.rank % 3
        found += {loss() for _ in range(calls)}
    return found


def test_reads_and_writes_between_steps_see_current_parameters() -> None:
    by_kind = {}
    for kind in (None, *KINDS):
        first, *others = run_ranks(_read_and_written, 4, replace(GROUPED, outer_sharding=kind))
        assert all(one == first for one in others)
        by_kind[kind] = first
    assert by_kind["optim"] == by_kind[None]
    assert len(set(by_kind[None])) == 2, "the step must change the loss"


# ---- checkpoints -----------------------------------------------------------------------------------------------------

OUTER = [Setting(3, 4, BF16, shard_ranks=2, outer_sharding=kind) for kind in KINDS]
LAYOUTS = [Setting(2, 2, BF16), Setting(3, 4, BF16, shard_ranks=2), Setting(3, 3, BF16, unit_numel=500), Setting(0, 1)]


def _saved(root: Path, setting: Setting) -> tuple[Path, dict[str, torch.Tensor]]:
    path, states = save_after(root, setting)
    return path, states if torch.distributed.get_rank() == 0 else {}


def _loaded(path: Path, setting: Setting) -> tuple[dict[str, torch.Tensor], list[float]]:
    runtime, _ = load_into(path, setting)
    return whole(runtime), train_on(runtime, setting.case(), SAVED_AFTER, 2)


def _unbroken(setting: Setting) -> list[float]:
    return train_on(setting.runtime(), setting.case(), 0, SAVED_AFTER + 2)


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (OUTER[0], LAYOUTS[0]),
        pytest.param(LAYOUTS[0], OUTER[0], marks=pytest.mark.full),
        *(pytest.param(OUTER[0], one, marks=pytest.mark.full) for one in LAYOUTS[1:]),
        *(pytest.param(one, OUTER[0], marks=pytest.mark.full) for one in LAYOUTS[1:]),
        pytest.param(OUTER[0], replace(OUTER[0], world=6, shard_ranks=3), marks=pytest.mark.full),
    ],
)
def test_checkpoints_are_loaded_into_and_from_other_layouts(saved: Setting, target: Setting, tmp_path: Path) -> None:
    path, states = run_ranks(_saved, saved.world, tmp_path, saved)[0]
    for found, _ in run_ranks(_loaded, target.world, path, target):
        assert_states(found, states)


@pytest.mark.full
def test_a_resumed_run_has_the_losses_of_the_unbroken_one(tmp_path: Path) -> None:
    path, _ = run_ranks(_saved, 4, tmp_path, OUTER[0])[0]
    unbroken = run_ranks(_unbroken, 4, OUTER[0])[0]
    assert run_ranks(_loaded, 4, path, OUTER[0])[0][1] == unbroken[SAVED_AFTER:]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"stage": 2, "shard_ranks": 2, "outer_sharding": "optim"}, "zero.outer_sharding needs zero.stage=3"),
        ({"stage": 3, "outer_sharding": "optim"}, "zero.outer_sharding needs zero.shard_ranks"),
        ({"stage": 3, "shard_ranks": 2, "outer_sharding": "all"}, "zero.outer_sharding must be optim or null"),
    ],
)
def test_a_plan_without_groups_or_sharded_parameters_is_refused(arguments: dict, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        ZeroPlan.from_stage(**arguments)


def _refusals(case: Case) -> list[str]:
    told = []
    for optimizer, settings in (
        (ADAMW, RuntimeSettings(wire=Wire("int8"))),
        (ADAMW, RuntimeSettings(offload=OffloadPlan(Tier.HOST, Tier.HOST, copies=LateCopies))),
        (MuonConfig(), RuntimeSettings()),
        (None, RuntimeSettings()),
    ):
        model = TinyTransformer(case.model)
        with pytest.raises(PlanError) as error:
            ZeroRuntime(model, plan_of(case, 3), case.precision, optimizer, settings, torch.device("cpu"))
        told.append(str(error.value))
    return told


def test_settings_that_outer_sharding_cannot_have_are_refused_by_name() -> None:
    wire, offload, muon, inference = run_ranks(_refusals, 2, replace(GROUPED, shard_ranks=1, outer_sharding="optim"))[0]
    assert "zero.outer_sharding sends exact messages" in wire
    assert "offload.params=cpu: expected a plan without outer sharding" in offload
    assert "optimizer.kind=muon sends parts of matrices inside a shard group" in muon
    assert "zero.outer_sharding shards gradients and optimizer states, which inference does not have" in inference
