"""The messages of sequence parallelism and of ZeRO over all ranks equal closed forms, on ranks and in a dry run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from harness.data_messages import FP32_BYTES, Sent, counted, data_messages
from harness.divided import BLOCKS, HEADS, MICRO, SEQ, WIDTH, DividedRun, model_of, one_step
from harness.ranks import run_alone, run_ranks

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.parallel.sequence.division import SequenceParallel
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

STAGES = (0, 1, 2, 3)
GROUPED = 2  # key and value heads of the model


@dataclass(frozen=True)
class Parts:
    """What the messages of a rank depend on. tokens: of a micro-batch of whole sequences."""

    degree: int
    micro_batches: int
    tokens: int
    heads: int
    grouped: int
    head_dim: int
    forwards: int = 1  # of each block in a micro-batch, with those that a recomputation repeats


def part_messages(parts: Parts) -> Sent:
    """A block sends (k-1)/k of its rank's queries, keys and values, and of its attention's result, in each forward and
    in backward. Of fewer key and value heads than ranks, one for each rank."""
    k = parts.degree
    numel = parts.tokens // k * (2 * parts.heads + 2 * max(parts.grouped, k)) * parts.head_dim
    times = parts.micro_batches * BLOCKS * (parts.forwards + 1)
    return {"sequence_all_to_all": (2 * times, times * numel * (k - 1) // k * FP32_BYTES)}


def sent_by_stage(run: DividedRun) -> dict[int, tuple[Sent, int, int]]:
    """By stage: what this rank sends in the second step."""
    found = {}
    for stage in STAGES:
        runtime = DividedRun("llama", stage, 1, run.parts, micro_batches=run.micro_batches).runtime()
        for step in range(2):
            runtime.reset_ledger()
            one_step(runtime, step)
        found[stage] = counted(runtime)
        runtime.close()
    return found


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.full)])
def test_four_ranks_send_the_closed_forms_at_every_stage(degree: int) -> None:
    parts = Parts(degree, 2, MICRO * SEQ, HEADS, GROUPED, WIDTH // HEADS)
    run = DividedRun("llama", 0, 1, degree, micro_batches=2)
    for by_stage in run_ranks(sent_by_stage, 4, run):
        for stage, (sent, units, padded) in by_stage.items():
            assert sent == part_messages(parts) | data_messages(stage, 4, 2, units, padded), stage


def sent_with_recomputation(kinds: list[str]) -> list[Sent]:
    found = []
    for kind in kinds:
        rule = RecomputeRule(kind)  # type: ignore[arg-type]
        runtime = DividedRun("llama", 0, 1, 2, recompute=rule).runtime()
        one_step(runtime, 0)
        found.append(counted(runtime)[0])
        runtime.close()
    return found


def test_recomputation_repeats_both_messages_of_a_block() -> None:
    """Also where products are kept: what comes out of a message is needed again, by the backward of what follows."""
    wanted = part_messages(Parts(2, 1, MICRO * SEQ, HEADS, GROUPED, WIDTH // HEADS, forwards=2))
    for found in run_ranks(sent_with_recomputation, 2, ["full", "by_operation"]):
        for sent in found:
            assert sent["sequence_all_to_all"] == wanted["sequence_all_to_all"]


# ---- in a dry run ----------------------------------------------------------------------------------------------------

WORLD, DEGREE, DRY_WIDTH, DRY_HEADS, DRY_GROUPED, DRY_SEQ = 64, 8, 512, 16, 4, 64


def dry_steps() -> dict[int, tuple[Sent, int, int]]:
    """By stage: what a rank among 64 sends in the second step, on fake tensors with a fake process group."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from orchestrator.workloads.models import token_losses

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=WORLD)
    sizes = {"hidden_size": DRY_WIDTH, "intermediate_size": 4 * DRY_WIDTH, "num_attention_heads": DRY_HEADS}
    found = {}
    for stage in STAGES:
        settings = RuntimeSettings(
            clip_norm=1.0, read_host=lambda numbers: [1.0] * numbers.numel(), sequence_parallel=SequenceParallel(DEGREE)
        )
        with FakeTensorMode():
            model = model_of("llama", num_key_value_heads=DRY_GROUPED, **sizes)
            plan = ZeroPlan.from_stage(stage)
            runtime = ZeroRuntime(model, plan, MixedPrecision(), AdamWConfig(), settings, torch.device("cpu"))
            ids = torch.zeros((MICRO, DRY_SEQ), dtype=torch.int64)
            for _ in range(2):
                runtime.reset_ledger()
                loss = token_losses(runtime.model, ids, ids, sequence=runtime.sequence)
                runtime.backward(loss / runtime.sum_over_ranks(MICRO * DRY_SEQ // DEGREE))
                runtime.step(1e-3)
            found[stage] = counted(runtime)
            runtime.close()
    return found


def test_a_dry_run_of_64_ranks_sends_the_closed_forms_at_every_stage() -> None:
    parts = Parts(DEGREE, 1, MICRO * DRY_SEQ, DRY_HEADS, DRY_GROUPED, DRY_WIDTH // DRY_HEADS)
    for stage, (sent, units, padded) in run_alone(dry_steps).items():
        assert sent == part_messages(parts) | data_messages(stage, WORLD, 1, units, padded), stage
