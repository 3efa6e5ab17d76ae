"""Models of every shape match plain torch in one process, at every stage and unit size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.hidden_outputs import HIDDEN
from harness.plain_optimizers import AdamW
from harness.ranks import run_ranks
from harness.shapes import SHAPES, Adapters, Base, Borrowed, Fp32Norms, FrozenMiddle, build_shape, ids_of
from harness.unsharded import unsharded_peak
from torch import nn

from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.census import take_census
from zero_runtime.errors import ParameterReadError, PlanError
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

STAGES = (0, 1, 2, 3)
STEPS = 3
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
# In elements. 1: the smallest units possible, since parameters are never split; 500: two or three modules per unit;
# 10**6: all blocks in one unit. A block has 612 elements, the embedding 204.
UNIT_SIZES = (1, 500, 10**6)
SHAPES_AND_MIXED = {**SHAPES, **HIDDEN, "Fp32Norms": Fp32Norms}
MIXED = MixedPrecision("bf16")
UNIT_ROUNDOFF = 2.0**-24


@dataclass
class Run:
    """Losses by step, final weights and, for the rounding bound, the first step's gradients and their absolute sums."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    first_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    abs_grad_sum: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    stage: int
    unit_numel: int | None = None
    prefetch: int = 1


ROWS = [Row(stage) for stage in STAGES] + [Row(stage, size) for stage in (2, 3) for size in UNIT_SIZES]
ROWS += [Row(3, prefetch=2)]
STAGE_ROWS = [*ROWS[: len(STAGES)], Row(3, 500)]  # also units that are smaller than a block
ROWS_AT_WORLD_3 = [Row(stage) for stage in STAGES] + [Row(3, 500)]


@cache
def plain(name: str, world: int) -> Run:
    """The expected run: gradients summed in rank order, AdamW on fp32 masters; unused parameters get zero gradients."""
    torch.set_num_threads(1)
    model = build_shape(SHAPES_AND_MIXED[name])
    trained = {key: param for key, param in model.named_parameters() if param.requires_grad}
    masters = {key: param.detach().float().clone() for key, param in trained.items()}
    optimizer = AdamW(list(masters.values()), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    run = Run()
    for step in range(STEPS):
        parts, loss = [], 0.0
        for rank in range(world):
            part = model.loss_of(model(ids_of(step, rank))) / world
            part.backward()  # not autograd.grad, which refuses reentrant checkpoints
            parts.append([torch.zeros_like(p) if p.grad is None else p.grad for p in trained.values()])
            model.zero_grad()
            loss += float(part.detach())
        run.losses.append(loss)
        for index, (key, master) in enumerate(masters.items()):
            master.grad = parts[0][index].float()
            for part in parts[1:]:
                master.grad = master.grad + part[index].float()
            if step == 0:
                run.first_grads[key] = master.grad.clone()
                run.abs_grad_sum[key] = torch.stack([one[index].double().abs() for one in parts]).sum(0)
        optimizer.step()
        with torch.no_grad():
            for key, param in trained.items():
                param.copy_(masters[key])
    run.weights = {key: param.detach().float().clone() for key, param in model.named_parameters()} | masters
    return run


def make_runtime(name: str, row: Row) -> ZeroRuntime:
    mixed = name == "Fp32Norms"
    return ZeroRuntime(
        build_shape(SHAPES_AND_MIXED[name]),
        ZeroPlan.from_stage(row.stage),
        MIXED if mixed else MixedPrecision(),
        AdamWConfig(BETAS[0], BETAS[1], EPS, DECAY, no_decay=False),
        RuntimeSettings(unit_numel=row.unit_numel, prefetch=row.prefetch, keep_dtype=("*norm*",) if mixed else ()),
        torch.device("cpu"),
    )


def train_rows(names: list[str], rows: list[Row]) -> dict[tuple[str, Row], Run]:
    """Train each shape in each row. The model is evaluated before each step, which must change nothing. Results on
    rank 0 only."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name in names:
        for row in rows:
            runtime, run = make_runtime(name, row), Run()
            for step in range(STEPS):
                with torch.no_grad():
                    runtime.model.loss_of(runtime(ids_of(step + 1, rank)))
                runtime.backward(runtime.model.loss_of(runtime(ids_of(step, rank))) / world)
                if step == 0:
                    trained = [key for key, param in runtime.model.named_parameters() if param.requires_grad]
                    run.first_grads = {key: runtime.full_grad(key) for key in trained}
                run.losses.append(runtime.step(LR).loss)
            with runtime.full_params() as weights:
                run.weights = {key: value.float() for key, value in weights.items()}
            runtime.close()
            found[name, row] = run
    return found if rank == 0 else {}


@cache
def all_rows(world: int, rows: tuple[Row, ...]) -> dict[tuple[str, Row], Run]:
    return run_ranks(train_rows, world, list(SHAPES_AND_MIXED), list(rows))[0]


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: object) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), f"{where}: {key}"


@pytest.mark.parametrize("name", SHAPES_AND_MIXED)
def test_stages_1_and_3_have_the_bits_of_plain_torch(name: str) -> None:
    check_rows(name, 2, [Row(1), Row(3)])


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", SHAPES_AND_MIXED)
def test_every_stage_has_the_bits_of_plain_torch(name: str, world: int) -> None:
    check_rows(name, world, STAGE_ROWS)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", SHAPES_AND_MIXED)
def test_every_unit_size_has_the_bits_of_plain_torch(name: str, world: int) -> None:
    check_rows(name, world, [row for row in ROWS if row not in STAGE_ROWS])


def check_rows(name: str, world: int, rows: list[Row]) -> None:
    wanted = plain(name, world)
    for row in rows:
        found = all_rows(world, tuple(rows))[name, row]
        assert_same(found.first_grads, wanted.first_grads, row)
        assert_same(found.weights, wanted.weights, row)
        assert found.losses == wanted.losses, row


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES_AND_MIXED)
def test_at_world_3_gradients_are_within_the_bound_of_any_order_of_sums(name: str) -> None:
    """|fl(sum) - sum| <= (n-1) u sum|g| for n terms in any order (see test_rows.py); two orders
    differ by at most twice that.

    The unit size determines where the backend splits a sum, and so the order: the bound holds for each size, but equal
    bits are not claimed.
    """
    wanted = plain(name, 3)
    for row in ROWS_AT_WORLD_3:
        for key, grad in all_rows(3, tuple(ROWS_AT_WORLD_3))[name, row].first_grads.items():
            bound = 2 * 2 * UNIT_ROUNDOFF * wanted.abs_grad_sum[key]
            excess = (grad.double() - wanted.first_grads[key].double()).abs() - bound
            assert excess.numel() == 0 or excess.max() <= 0, f"{row}: {key}"


def test_frozen_parameters_do_not_change_and_have_no_states() -> None:
    for row, states in run_ranks(_frozen_states, 2)[0].items():
        assert states == {"frozen": {(False, False, False)}, "unchanged": True}, row


def _frozen_states() -> dict[Row, dict[str, Any]]:
    found = {}
    for row in ROWS:
        runtime = make_runtime("Adapters", row)
        runtime.backward(runtime.model.loss_of(runtime(ids_of(0, 0))))
        frozen = [unit for unit in runtime.units if not unit.trainable]
        census, predicted = take_census(runtime), predicted_state_bytes(runtime)
        assert (census.params, census.grads, census.optimizer) == (
            predicted.params,
            predicted.grads,
            predicted.optimizer,
        )
        runtime.step(LR)
        with runtime.full_params() as now:
            same = all(
                torch.equal(now[key], value) == (not value.requires_grad)
                for key, value in build_shape(Adapters).named_parameters()
            )
        found[row] = {
            "frozen": {
                (unit.master_shard is not None, unit.grad_shard is not None, bool(runtime.optimizer.states_of(unit)))
                for unit in frozen
            },
            "unchanged": same,
        }
        runtime.close()
    return found


# ---- units that are unsharded together -------------------------------------------------------------------------------


def _peaks(names: list[str], prefetches: tuple[int, ...]) -> dict[tuple[str, int], tuple[tuple[str, ...], list[int]]]:
    """By shape and prefetch: the units unsharded at the peak of the third step, and their number at each gather."""
    found = {}
    for name in names:
        for prefetch in prefetches:
            runtime = ZeroRuntime(
                SHAPES_DEEP[name](),
                ZeroPlan.from_stage(3),
                MixedPrecision(),
                AdamWConfig(),
                RuntimeSettings(prefetch=prefetch),
                torch.device("cpu"),
            )
            for step in range(3):
                with unsharded_peak(runtime.units) as peak:
                    runtime.backward(runtime.model.loss_of(runtime(ids_of(step, dist.get_rank()))))
                runtime.step(LR)
            whole = [unit.name for unit in runtime.units if unit.parameters.unsharded_param.untyped_storage().size()]
            assert whole == []
            found[name, prefetch] = (peak.units, peak.counts)
            runtime.close()
    return found


class DeepFrozen(Base):
    """Eight blocks of which the six in the middle are frozen; gradients pass through those to the first block."""

    def __init__(self) -> None:
        super().__init__(blocks=8)
        for block in self.blocks[1:7]:
            block.requires_grad_(False)


class DeepAdapters(Adapters):
    def __init__(self) -> None:
        Base.__init__(self, blocks=8)
        for part in (self.embed, self.norm, self.head):
            part.requires_grad_(False)


SHAPES_DEEP: dict[str, Callable[[], Base]] = {
    "Base": lambda: Base(blocks=8),
    "DeepFrozen": DeepFrozen,
    "DeepAdapters": DeepAdapters,
}


@pytest.mark.full
def test_frozen_and_trained_units_are_released_in_forward_and_in_backward() -> None:
    """A block with adapters is two units, a frozen one and a trained one, that are unsharded together."""
    for found in run_ranks(_peaks, 2, list(SHAPES_DEEP), (0, 1, 2)):
        for (name, prefetch), (units, _) in found.items():
            beside_root = [unit for unit in units if not unit.startswith("root")]
            at_once = 2 * (1 + prefetch) if name == "DeepAdapters" else 1 + prefetch
            assert len(beside_root) <= at_once, (name, prefetch, units)


# ---- undeclared reads and small details ------------------------------------------------------------------------------


def _load_outside(stage: int) -> None:
    runtime = make_runtime("Borrowed", Row(stage))
    with pytest.raises(ParameterReadError, match=r"load_state_dict of Embedding at 'embed\.'.*full_params"):
        runtime.model.load_state_dict(build_shape(Borrowed).state_dict())


def test_load_state_dict_is_refused_because_its_values_would_be_lost() -> None:
    run_ranks(_load_outside, 1, 3)


def _runtime_of(model: nn.Module, **settings: Any) -> ZeroRuntime:
    return ZeroRuntime(
        model,
        ZeroPlan.from_stage(3),
        MixedPrecision("bf16"),
        AdamWConfig(),
        RuntimeSettings(**settings),
        torch.device("cpu"),
    )


def _small_things() -> None:
    runtime = make_runtime("Outputs", Row(3))
    # The runtime has its own attributes only, not the model's; inputs by keyword, outputs of every kind.
    with pytest.raises(AttributeError, match="'ZeroRuntime' object has no attribute 'blocks'"):
        runtime.blocks  # noqa: B018
    output = runtime(ids_of(0, 0), offset=torch.ones(12))
    assert set(output) == {"logits", "side"}
    runtime.backward(runtime.model.loss_of(output))
    runtime.step(LR)
    # A failed forward leaves nothing behind: the next one works, and a read outside a call is still refused.
    with pytest.raises(TypeError):
        runtime(ids_of(0, 0), offset="not a tensor")
    with pytest.raises(ParameterReadError):
        runtime.model.embed.weight.sum()
    runtime.backward(runtime.model.loss_of(runtime(ids_of(1, 0))))
    runtime.step(LR)
    # After closing, the modules have plain dictionaries of parameters again.
    model = runtime.model
    runtime.close()
    assert {type(module._parameters) for module in model.modules()} == {dict}
    # Mixed dtypes: buffers and parameters that match a pattern keep theirs; a pattern without a match is refused.
    model = build_shape(Fp32Norms)
    runtime = _runtime_of(model, keep_dtype=("*norm*",))
    assert {unit.precision.param for unit in runtime.units} == {"bf16", "fp32"}
    assert model.table.dtype is torch.float64
    assert {param.dtype for name, param in model.named_parameters() if "norm" in name} == {torch.float32}
    with pytest.raises(PlanError, match=r"keep_dtype.*'\*nrom\*'.*matches none"):
        _runtime_of(build_shape(Fp32Norms), keep_dtype=("*nrom*",))


def test_attributes_keyword_inputs_failed_forwards_and_kept_dtypes_are_handled() -> None:
    run_ranks(_small_things, 1)


def _warning_of_mixed_dtypes() -> str:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_runtime.unit_planner").addHandler(handler)
    _runtime_of(build_shape(Fp32Norms))
    _runtime_of(build_shape(FrozenMiddle))
    assert len(messages) == 1
    return messages[0]


def test_a_model_of_several_dtypes_gets_one_warning_that_it_loses_them() -> None:
    message = run_ranks(_warning_of_mixed_dtypes, 1)[0]
    assert "torch.bfloat16 (embed.weight)" in message
    assert "keep_dtype" in message
