"""The rules of FSDP2, DDP and plain PyTorch: which points they refuse, and what a point means to them."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from harness.engine_trainee import RANKS, Row, Work

from orchestrator.config.engine import EngineChoice, EngineKind
from orchestrator.config.schema import RunConfig
from orchestrator.config.state_groups import Offload, Precision, Zero
from orchestrator.wings.engines import ddp, fsdp2, plain
from orchestrator.wings.engines.contract import Task
from orchestrator.wings.engines.torch_optimizer import Update
from zero_runtime.offload_plan import Tier
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.precision import MixedPrecision

MODULES = {"ddp": ddp, "fsdp2": fsdp2, "plain": plain}
HOST = Offload(params=Tier.HOST, optimizer=Tier.HOST)


def point(kind: str, stage: int = 3, ranks: int = RANKS, accumulation: int = 1, **groups: object) -> RunConfig:
    config = Row(kind, stage, Work(accumulation=accumulation)).config(min(ranks, RANKS))
    resources = replace(config.resources, ranks=ranks)
    return replace(config, resources=resources, **groups)  # type: ignore[arg-type]


def precision(**dtypes: str) -> Precision:
    return Precision(MixedPrecision("bf16", **dtypes), compute="bf16")  # type: ignore[arg-type]


def native(engine: str, **keys: object) -> EngineChoice:
    return EngineChoice(EngineKind(engine), **{engine: keys})  # type: ignore[arg-type]


REFUSED = {
    "fsdp2 stage 0": (point("fsdp2", 0), "FSDP2 shards, found zero=stage0      fix: engine=ddp   or   zero=stage1"),
    "fsdp2 no fp32 master": (
        point("fsdp2", precision=precision(master="bf16")),
        "FSDP2 in these runs has fp32 masters, found precision.master=bf16      fix: precision=bf16",
    ),
    "fsdp2 sums in bf16": (
        point("fsdp2", 1, accumulation=2, precision=precision(reduce="bf16")),
        "FSDP2 sums micro-batches in precision.reduce where it reduces once a step, found bf16      "
        "fix: precision.reduce=fp32   or   batch.accumulation=1",
    ),
    "fsdp2 accumulates in bf16": (
        point("fsdp2", accumulation=2, precision=precision(accumulate="bf16")),
        "FSDP2 in these runs sums micro-batches in fp32, found precision.accumulate=bf16      "
        "fix: precision.accumulate=fp32",
    ),
    "fsdp2 some offloaded": (
        point("fsdp2", offload=replace(HOST, ratio=0.5)),
        "offload.ratio must be 1 with FSDP2, found 0.5      fix: offload.ratio=1.0",
    ),
    "fsdp2 reshard number": (
        point("fsdp2", engine=native("fsdp2", reshard_after_forward=3)),
        "engine.fsdp2.reshard_after_forward must be true, false or a divisor of 2 ranks between 1 and it, found 3      "
        "fix: engine.fsdp2.reshard_after_forward=true",
    ),
    "fsdp2 misspelt": (
        point("fsdp2", engine=native("fsdp2", reshard_forward=True)),
        "engine.fsdp2 has the settings reshard_after_forward, reshard_after_backward, requires_gradient_sync, "
        "param_dtype, reduce_dtype, cast_forward_inputs, offload, pin_memory, found reshard_forward      "
        "fix: engine.fsdp2.reshard_after_forward=true",
    ),
    "fsdp2 dtype": (
        point("fsdp2", engine=native("fsdp2", param_dtype="bf16")),
        "engine.fsdp2.param_dtype must be one of float32, bfloat16, float16, found bf16      "
        "fix: engine.fsdp2.param_dtype=bfloat16",
    ),
    "ddp hook": (
        point("ddp", engine=native("ddp", comm_hook="bf16")),
        "engine.ddp.comm_hook must be one of null, bf16_compress_hook, fp16_compress_hook, found bf16      "
        "fix: engine.ddp.comm_hook=bf16_compress_hook",
    ),
    "ddp kind": (
        point("ddp", engine=native("ddp", static_graph="yes")),
        "engine.ddp.static_graph must be true or false, found yes      fix: engine.ddp.static_graph=false",
    ),
    "ddp number": (
        point("ddp", engine=native("ddp", bucket_cap_mb=True)),
        "engine.ddp.bucket_cap_mb must be a number above 0, found True      fix: engine.ddp.bucket_cap_mb=25",
    ),
    "fsdp2 kind": (
        point("fsdp2", engine=native("fsdp2", offload=1)),
        "engine.fsdp2.offload must be true or false, found 1      fix: engine.fsdp2.offload=false",
    ),
    "ddp offload": (
        point("ddp", offload=HOST),
        "DDP offloads nothing, found group offload      fix: offload=none   or   engine=fsdp2",
    ),
    "plain offload": (
        point("plain", ranks=1, offload=HOST),
        "plain PyTorch offloads nothing, found group offload      fix: offload=none",
    ),
    "plain ranks": (
        point("plain"),
        "engine=plain is one process: resources.ranks must be 1, found 2      fix: resources.ranks=1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_engine_cannot_do_is_refused_with_the_nearest_thing_that_it_can(case: str) -> None:
    config, line = REFUSED[case]
    assert [str(one) for one in MODULES[str(config.engine.kind)].problems_of(config)] == [line]


@pytest.mark.parametrize("engine", ["ddp", "plain"])
def test_all_stages_are_one_point_to_an_engine_that_shards_nothing(engine: str) -> None:
    module, ranks = MODULES[engine], 1 if engine == "plain" else RANKS
    points = [point(engine, stage, ranks) for stage in (0, 1, 2, 3)]
    assert {repr(module.meaning(one)) for one in points} == {repr(points[0])}


def test_fsdp2_has_no_prefetch_of_units_and_no_compute_dtype_of_its_own() -> None:
    ahead = [point("fsdp2", zero=Zero(3, prefetch=prefetch)) for prefetch in (0, 1, 2)]
    assert {repr(fsdp2.meaning(one)) for one in ahead} == {repr(ahead[1])}
    wide = point("fsdp2", precision=replace(precision(), compute="fp32"))
    assert fsdp2.meaning(wide).precision.compute == "bf16"


SETTINGS = {  # of stage and other settings: reshards after forward, after each backward; reduces each micro-batch
    "stage 1": (point("fsdp2", 1), (False, False, False)),
    "stage 2": (point("fsdp2", 2), (False, False, True)),
    "stage 3": (point("fsdp2", 3), (True, True, True)),
    "stage 3 at the boundary": (point("fsdp2", zero=Zero(3, reduce_at_boundary=True)), (True, True, False)),
    "its own words": (point("fsdp2", engine=native("fsdp2", reshard_after_forward=8), ranks=16), (8, True, True)),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_stage_is_three_settings_of_fsdp2(case: str) -> None:
    config, wanted = SETTINGS[case]
    found = fsdp2.settings_of(config)
    keys = ("reshard_after_forward", "reshard_after_backward", "requires_gradient_sync")
    assert tuple(found[key] for key in keys) == wanted
    assert not fsdp2.problems_of(config)


BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("device", "offload", "shard_ranks", "backends"),
    [
        ("cuda", True, None, {"shard": BOTH}),
        ("cuda", True, 4, {"replicate": BOTH, "shard": BOTH}),
        ("cuda", False, 4, None),
        ("cpu", True, 4, None),
    ],
)
def test_groups_of_a_gpu_whose_shards_are_offloaded_send_from_host_memory_too(
    device: str, offload: bool, shard_ranks: int | None, backends: dict[str, str] | None
) -> None:
    """Two GPUs are needed to see it; here, what torch is asked for."""
    engine, config = object.__new__(fsdp2.Fsdp2Engine), point("fsdp2", ranks=8, zero=Zero(3, shard_ranks=shard_ranks))
    engine._keys = {"offload": offload}
    task = Task(config, torch.nn.Module(), lambda name, param: param, torch.device(device))
    with mock.patch("torch.distributed.device_mesh.init_device_mesh") as made:
        _, placements = engine._mesh(task)
    assert made.call_args.args == (device, (8,) if shard_ranks is None else (2, 4))
    assert made.call_args.kwargs["backend_override"] == backends
    assert len(placements) == len(made.call_args.kwargs["mesh_dim_names"])


def test_fp16_skips_an_update_that_overflows_and_lowers_the_scale() -> None:
    rule = LossScaleRule(initial_power=4, hysteresis=1)
    config = point("plain", precision=Precision(MixedPrecision("fp16"), compute="fp16", scale=rule))
    weight = torch.nn.Parameter(torch.ones(3, 2))
    update = Update(config, [("weight", weight)])
    assert update.scaled(torch.ones(())).item() == 16
    weight.grad = torch.tensor([[1.0, 2.0], [float("inf"), 3.0], [4.0, 5.0]])
    skipped = update.step(Rates(0.5))
    assert (skipped.skipped, skipped.loss_scale) == (True, 16)
    assert torch.equal(weight, torch.ones(3, 2))
    weight.grad = torch.full((3, 2), 8.0)
    updated = update.step(Rates(0.5))
    # The gradients are eight times too large with the lower scale, so the norm is that of ones.
    assert (updated.skipped, updated.loss_scale) == (False, 8)
    assert updated.norm == pytest.approx(6**0.5, rel=2**-22)
    # AdamW's first update is the rate, after a decay of 0.1 x 0.5.
    assert torch.allclose(weight, torch.full((3, 2), 1 - 0.05 - 0.5), atol=2**-20)
