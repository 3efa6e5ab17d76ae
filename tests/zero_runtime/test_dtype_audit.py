"""The audit of dtypes: tensors and messages in a wrong dtype end the run, and no correct row of the runtime does."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import dtype_faults as faults
from harness.models import TinySpec, TinyTransformer
from harness.oracle import ADAMW, LR
from harness.ranks import run_ranks
from harness.shapes import SHAPES, Fp32Norms, build_shape, ids_of
from torch import nn

from zero_runtime.dtype_audit import DTypeAudit, refuse
from zero_runtime.dtype_rules import MESSAGES, AskedDTypes
from zero_runtime.dtypes import short_name
from zero_runtime.errors import DTypeError
from zero_runtime.offload.copy_streams import Copies
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings, Tier
from zero_runtime.optim.configs import AdamW8bitConfig, OptimizerConfig, SgdConfig, TorchConfig
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.plan import OuterSharding, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

FP32, BF16 = MixedPrecision(), MixedPrecision("bf16")
FP16 = MixedPrecision("fp16")
PAPER = MixedPrecision("bf16", reduce="bf16", accumulate="bf16")
PURE = MixedPrecision("bf16", reduce="bf16", accumulate="bf16", master="bf16")
CAST = MixedPrecision("bf16", compute="fp32")
PRECISIONS = (FP32, BF16, FP16, PAPER, PURE, CAST, MixedPrecision("fp32", reduce="bf16"))
HOST = OffloadPlan(optimizer=Tier.HOST, copies=Copies)
SCRATCH = OffloadPlan(optimizer=Tier.NVME, scratch=ScratchSettings(Path(), block_bytes=8192, requests=2))
TINY = TinySpec(width=8, blocks=2)


@dataclass(frozen=True)
class Row:
    """A runtime and how its steps are made."""

    stage: int = 2
    precision: MixedPrecision = BF16
    micro_batches: int = 1
    no_sync: bool = False
    model: str = "tiny"
    optimizer: OptimizerConfig = ADAMW
    offload: OffloadPlan = field(default_factory=OffloadPlan)
    keep_dtype: tuple[str, ...] = ()
    shard_ranks: int | None = None
    outer_sharding: OuterSharding | None = None

    def build(self, folder: Path) -> ZeroRuntime:
        offload = self.offload
        if offload.scratch is not None:
            offload = replace(offload, scratch=replace(offload.scratch, folder=folder))
        return ZeroRuntime(
            model_of(self.model),
            ZeroPlan.from_stage(
                self.stage, shard_ranks=self.shard_ranks if self.stage else None, outer_sharding=self.outer_sharding
            ),
            self.precision,
            self.optimizer,
            RuntimeSettings(
                micro_batches=self.micro_batches,
                offload=offload,
                keep_dtype=self.keep_dtype,
                loss_scale=LossScaleRule() if self.precision.param == "fp16" else UNSCALED,
            ),
            torch.device("cpu"),
        )

    def asked(self, given: dict[str, torch.dtype]) -> AskedDTypes:
        names = {name: short_name(dtype) for name, dtype in given.items()}
        return AskedDTypes(self.precision, self.micro_batches, self.optimizer.held_states, self.keep_dtype, names)


def model_of(kind: str) -> nn.Module:
    if kind == "tiny":
        return TinyTransformer(TINY)
    return build_shape(Fp32Norms if kind == "Fp32Norms" else SHAPES[kind])


def backwards(runtime: ZeroRuntime, row: Row, step: int) -> None:
    for micro in range(row.micro_batches):
        with runtime.no_sync() if row.no_sync and micro < row.micro_batches - 1 else nullcontext():
            output = runtime.model(ids_of(step + micro, dist.get_rank()))
            runtime.backward(output.float().logsumexp(-1).mean())


# ---- correct rows ----------------------------------------------------------------------------------------------------


VARIANTS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 3},
    {"micro_batches": 2, "no_sync": True},
    {"optimizer": AdamW8bitConfig()},
    {"optimizer": SgdConfig()},
    {"offload": SCRATCH},
    {"offload": SCRATCH, "micro_batches": 2},
    {"offload": HOST},
    {"offload": replace(HOST, ratio=0.5)},
    {"offload": replace(SCRATCH, copies=Copies)},
    {"offload": replace(SCRATCH, copies=Copies), "optimizer": AdamW8bitConfig()},
    {"model": "Adapters"},
    {"model": "FrozenMiddle", "offload": HOST},
    {"model": "Tied", "micro_batches": 2},
    {"shard_ranks": 1},
]
KEPT: list[dict[str, Any]] = [
    {"model": "Fp32Norms", "keep_dtype": ("*norm*",), **one} for one in (VARIANTS[0], VARIANTS[2], *VARIANTS[5:8])
]
WITH_PARAMS = [replace(plan, params=plan.optimizer) for plan in (HOST, SCRATCH, replace(SCRATCH, copies=Copies))]
WITH_PARAMS += [replace(HOST, optimizer=Tier.DEVICE, params=Tier.HOST)]
# Rows that differ in stage and precision alone, in groups.
GROUPS = [
    *([Row(stage, precision, **one) for precision in PRECISIONS for stage in range(4)] for one in VARIANTS),
    *([Row(stage, precision, **one) for precision in (BF16, PAPER, PURE) for stage in range(4)] for one in KEPT),
    *([Row(3, precision, offload=plan) for precision in PRECISIONS] for plan in WITH_PARAMS),
    [Row(stage, BF16, optimizer=TorchConfig(class_name="Adam")) for stage in range(4)],
]
ROWS = [row for group in GROUPS for row in group]
SHORT_ROWS = [group[5 * index % len(group)] for index, group in enumerate(GROUPS)]
HYBRID = [Row(stage, precision, shard_ranks=2) for stage in (1, 2, 3) for precision in (BF16, PAPER)]
HYBRID += [replace(HYBRID[-1], outer_sharding="optim"), Row(3, BF16, shard_ranks=1, outer_sharding="optim")]


def _audit_rows(folder: Path, rows: list[Row]) -> list[dict[str, dict[str, int]]]:
    found = []
    for row in rows:
        runtime = row.build(folder)
        backwards(runtime, row, 0)
        runtime.step(LR)
        runtime.reset_ledger()
        audit = DTypeAudit(runtime, row.asked(runtime.given_dtypes))
        with audit:
            backwards(runtime, row, 1)
        runtime.step(LR)
        try:
            found.append(audit.conclude(runtime.reset_ledger()))
        except DTypeError as error:
            raise AssertionError(f"{row}: {error}") from error
        runtime.close()
    return found


@pytest.mark.parametrize(
    ("world", "rows"),
    [
        (1, SHORT_ROWS[::4]),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, ROWS), (1, ROWS), (4, HYBRID))),
    ],
    ids=["1-some", "2-every", "1-every", "4-hybrid"],
)
def test_no_correct_row_is_refused(world: int, rows: list[Row], tmp_path: Path) -> None:
    for by_row in run_ranks(_audit_rows, world, tmp_path, rows):
        for row, found in zip(rows, by_row, strict=True):
            assert {"params", "gathered", "master", "grads", "reduced"} <= found.keys(), row
            assert {state.name for state in row.optimizer.held_states} <= found.keys(), row
            assert ("accumulated" in found) == (row.micro_batches > 1), row
            assert bool(found.keys() & set(MESSAGES)) == (world > 1), row


def test_the_short_rows_contain_every_stage_and_every_precision() -> None:
    assert {row.stage for row in SHORT_ROWS} == {0, 1, 2, 3}
    assert {row.precision for row in SHORT_ROWS} == set(PRECISIONS)


# ---- seeded seeded ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seeded:
    """A fault, the row that it is in, and for each component that it must be told of, what is said. `worlds`: where it
    changes anything."""

    fault: Callable[[], faults.Patch]
    row: Row
    says: dict[str, str]
    worlds: tuple[int, ...] = (1, 2)

    @property
    def id(self) -> str:
        return f"{self.fault.__name__}-stage{self.row.stage}"


FP32_TO_BF16 = r"expected fp32 \([\d,]+ bytes\) \(%s\), found bf16 \([\d,]+ bytes\)"
REDUCED = FP32_TO_BF16 % r"precision\.reduce"
SEEDED = [
    *(
        Seeded(faults.master_in_bf16, Row(stage), {"master": FP32_TO_BF16 % r"precision\.master"})
        for stage in (0, 1, 2, 3)
    ),
    Seeded(faults.master_of_one_unit_in_bf16, Row(3), {"master of unit blocks.1": FP32_TO_BF16 % r"precision\.master"}),
    Seeded(faults.master_in_bf16, Row(2, offload=HOST), {"master": FP32_TO_BF16 % r"precision\.master"}),
    *(Seeded(faults.exp_avg_in_bf16, Row(stage, FP32), {"exp_avg": FP32_TO_BF16 % "optimizer"}) for stage in (0, 3)),
    Seeded(faults.reduced_in_bf16, Row(0), {"reduced": REDUCED}),
    Seeded(faults.reduced_in_bf16, Row(2, micro_batches=2), {"reduced": REDUCED}),
    Seeded(faults.reduced_in_bf16, Row(3), {"reduced": REDUCED, "reduce_scatter": REDUCED}, worlds=(2,)),
    Seeded(faults.reduced_in_bf16_messages, Row(2), {"reduce_scatter": REDUCED}, worlds=(2,)),
    Seeded(faults.reduced_in_bf16_messages, Row(0), {"all_reduce": REDUCED}, worlds=(2,)),
    Seeded(
        faults.reduced_in_fp32,
        Row(2, PAPER),
        {"reduce_scatter": r"expected bf16 \([\d,]+ bytes\) \(precision\.reduce\), found fp32"},
        worlds=(2,),
    ),
    Seeded(
        faults.gathered_in_fp32_messages,
        Row(3),
        {"all_gather": r"expected bf16 \([\d,]+ bytes\) \(precision\.param\), found fp32"},
        worlds=(2,),
    ),
    *(
        Seeded(faults.computed_in_bf16, Row(stage, FP32), {"gathered": FP32_TO_BF16 % r"precision\.compute"})
        for stage in (1, 3)
    ),
    *(
        Seeded(
            faults.accumulated_in_bf16,
            Row(stage, micro_batches=2),
            dict.fromkeys(("grads", "accumulated"), FP32_TO_BF16 % r"precision\.accumulate"),
        )
        for stage in (1, 2)
    ),
    Seeded(
        faults.local_sums_in_bf16,
        Row(2, micro_batches=2, no_sync=True),
        {"accumulated": FP32_TO_BF16 % r"precision\.accumulate"},
    ),
    *(
        Seeded(
            faults.codes_left_in_fp32,
            Row(2, optimizer=AdamW8bitConfig(), offload=offload),
            dict.fromkeys(("exp_avg", "exp_avg_sq"), r"expected uint8 \([\d,]+ bytes\) \(optimizer\), found fp32"),
        )
        for offload in (OffloadPlan(), SCRATCH)
    ),
    Seeded(faults.host_states_in_bf16, Row(2, offload=HOST), {"exp_avg_sq": FP32_TO_BF16 % "optimizer"}),
    Seeded(faults.scratch_states_in_bf16, Row(2, offload=SCRATCH), {"exp_avg": FP32_TO_BF16 % "optimizer"}),
    Seeded(
        faults.frozen_shards_in_bf16,
        Row(3, FP32, model="FrozenMiddle"),
        {r"params of unit blocks.1 \(frozen\)": FP32_TO_BF16 % r"precision\.param"},
    ),
    Seeded(
        faults.norms_of_one_block_not_kept,
        Row(2, model="Fp32Norms", keep_dtype=("*norm*",)),
        {"gathered of unit blocks.1": r"expected fp32 \([\d,]+ bytes\) and bf16 \([\d,]+ bytes\)"},
    ),
    Seeded(faults.autocast_left_on, Row(1, FP32), {"autocast": FP32_TO_BF16 % r"precision\.compute"}),
    Seeded(faults.autocast_inside_the_model, Row(3, FP32), {"autocast": FP32_TO_BF16 % r"precision\.compute"}),
    Seeded(
        faults.exp_avg_of_rank_1_in_bf16, Row(2), {"dtypes on rank 1: exp_avg": FP32_TO_BF16 % "optimizer"}, worlds=(2,)
    ),
]


def _seeded(folder: Path, seeded: list[Seeded]) -> list[str]:
    """What is said of each fault. The step's update is left out: it may refuse the fault's dtype itself."""
    told = []
    for one in seeded:
        with ExitStack() as stack:
            stack.enter_context(one.fault())
            runtime = one.row.build(folder)
            audit = DTypeAudit(runtime, one.row.asked(runtime.given_dtypes))
            with audit:
                backwards(runtime, one.row, 0)
            try:
                told.append(str(audit.conclude(runtime.reset_ledger())))
            except DTypeError as error:
                told.append(str(error))
            runtime.close()
    return told


@pytest.fixture(scope="module", params=[1, 2])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[list[str]]]:
    seeded = [one for one in SEEDED if request.param in one.worlds]
    return request.param, run_ranks(_seeded, request.param, tmp_path_factory.mktemp("scratch"), seeded)


def test_every_seeded_fault_is_refused_on_every_rank_with_its_component_and_dtypes(
    told: tuple[int, list[list[str]]],
) -> None:
    world, by_rank = told
    seeded = [one for one in SEEDED if world in one.worlds]
    assert len(seeded) >= 20
    for texts in by_rank:
        for one, text in zip(seeded, texts, strict=True):
            for component, says in one.says.items():
                assert re.search(rf"\b{component}(?![a-z_])[^;]*: {says}", text), f"{one.id}: {text}"
            assert "ends without a result" in text, one.id


def test_the_refusal_names_the_ranks_and_quotes_the_first() -> None:
    refuse([[], []])
    with pytest.raises(DTypeError, match=r"dtypes on rank 1, 2: what rank 1 found; and more\. The numbers"):
        refuse([[], ["what rank 1 found", "and more"], ["another"]])
