"""The messages of tensor parallelism and of ZeRO below it equal closed forms, on ranks and in a dry run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from harness.data_messages import FP32_BYTES, Sent, counted, data_messages
from harness.divided import BLOCKS, MICRO, SEQ, VOCABULARY, WIDTH, DividedRun, model_of, one_step
from harness.ranks import run_alone, run_ranks

from zero_runtime.activations.recompute import Recomputation
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.optim.configs import AdamWConfig, MuonConfig
from zero_runtime.parallel.tensor.division import TensorParallel
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import CollectiveCounts, collective_elements
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Axes:
    """The ranks of the two axes, and what the messages depend on. sequences, length: of a micro-batch. repeated: parts
    of a block that a recomputation gathers or sums once more. tiled: the loss is."""

    data_world: int
    degree: int
    micro_batches: int
    sequences: int
    length: int
    width: int
    vocabulary: int
    repeated: tuple[int, int] = (0, 0)
    gathers_logits: bool = True
    tiled: bool = False
    replicated: int = 2 * BLOCKS + 1  # norms and biases of row layers, each of `width` elements


def tensor_messages(axes: Axes) -> Sent:
    """Per micro-batch: one sum of b*s*h for the embedding, one of h for each replicated parameter, and one gather for
    the loss; and of parts of b*s*h/k

    - six gathers a block: two inputs of column layers in forward and again in backward, two gradients of row layers;
      one of the first block's gradient, and two of the head's input, or one with a tiled loss
    - four sums a block, and one of the gradient of the head's input.
    """
    degree, hidden, micros = axes.degree, axes.sequences * axes.length * axes.width, axes.micro_batches
    part = axes.sequences * -(-axes.length // degree) * axes.width
    numbers = -(-axes.vocabulary // degree) if axes.gathers_logits else 3  # of a token, that each rank sends
    gathered, summed = axes.repeated
    counts = {
        "tensor_part_gather": (6 + gathered) * BLOCKS + 3 - axes.tiled,
        "tensor_reduce_scatter": (4 + summed) * BLOCKS + 1,
    }
    return {
        "tensor_all_reduce": (
            micros * (1 + axes.replicated),
            micros
            * sum(2 * (degree - 1) * one // degree for one in (hidden, *(axes.width,) * axes.replicated))
            * FP32_BYTES,
        ),
        "tensor_all_gather": (
            micros,
            micros * (degree - 1) * axes.sequences * axes.length * numbers * FP32_BYTES,
        ),
        **{kind: (micros * count, micros * count * (degree - 1) * part * FP32_BYTES) for kind, count in counts.items()},
    }


# ---- on ranks --------------------------------------------------------------------------------------------------------


def sent_by_stage(micro_batches: int, tile: int | None) -> dict[int, tuple[Sent, int, int]]:
    """By stage: what this rank sends in the second step."""
    found = {}
    for stage in STAGES:
        runtime = DividedRun("llama", stage, micro_batches=micro_batches, gathers_logits=False).runtime()
        for step in range(2):
            runtime.reset_ledger()
            one_step(runtime, step, tile)
        found[stage] = counted(runtime)
        runtime.close()
    return found


@pytest.mark.parametrize(
    ("micro_batches", "tile"),
    [(2, None), pytest.param(1, None, marks=pytest.mark.full), pytest.param(2, 5, marks=pytest.mark.full)],
)
def test_four_ranks_send_the_closed_forms_at_every_stage(micro_batches: int, tile: int | None) -> None:
    axes = Axes(2, 2, micro_batches, MICRO, SEQ, WIDTH, VOCABULARY, gathers_logits=False, tiled=tile is not None)
    for by_stage in run_ranks(sent_by_stage, 4, micro_batches, tile):
        for stage, (sent, units, padded) in by_stage.items():
            assert sent == tensor_messages(axes) | data_messages(
                stage, axes.data_world, axes.micro_batches, units, padded
            ), stage


def sent_for_matrices(stages: list[int]) -> list[tuple[int, int]]:
    """By stage: what this rank sends of matrices to the owners of other slices in a step, and the bytes of all whole
    matrices."""
    found = []
    for stage in stages:
        runtime = DividedRun("llama", stage, gathers_logits=False, optimizer=MuonConfig(ns_dtype="fp32")).runtime()
        runtime.reset_ledger()
        one_step(runtime, 0)
        of_layer = 2 * (WIDTH * WIDTH + WIDTH * WIDTH // 2) + 3 * WIDTH * 40  # grouped heads: half of the keys' width
        found.append((counted(runtime)[0].get("matrix_all_gather", (0, 0))[1], BLOCKS * of_layer * FP32_BYTES))
        runtime.close()
    return found


def test_the_owners_of_a_matrix_send_their_slices_once_to_each_other() -> None:
    """Of two slices each owner sends a half, and with replicated states every data rank is an owner."""
    by_rank = run_ranks(sent_for_matrices, 4, [0, 1, 3])
    for place, owners in enumerate((2, 1, 1)):
        whole = by_rank[0][place][1]
        assert sum(found[place][0] for found in by_rank) == owners * whole


def sent_with_recomputation(recompute: str) -> Sent:
    model = model_of("llama")
    Recomputation(model, RecomputeRule(recompute))  # type: ignore[arg-type]
    runtime = DividedRun("llama", gathers_logits=True).runtime(model)
    one_step(runtime, 0)
    return counted(runtime)[0]


def test_recomputation_repeats_two_gathers_and_one_sum_of_a_block() -> None:
    """That of the attention; the sum of the MLP is not needed again: nothing after it is saved, and torch stops."""
    axes = Axes(1, 2, 1, MICRO, SEQ, WIDTH, VOCABULARY, repeated=(2, 1))
    assert run_ranks(sent_with_recomputation, 2, "full") == [tensor_messages(axes)] * 2


# ---- in a dry run ----------------------------------------------------------------------------------------------------

WORLD, DEGREE, DRY_WIDTH, DRY_HEADS, DRY_VOCABULARY = 64, 8, 512, 8, 32_001


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
            clip_norm=1.0, read_host=lambda numbers: [1.0] * numbers.numel(), tensor_parallel=TensorParallel(DEGREE)
        )
        with FakeTensorMode():
            model = model_of("llama", num_key_value_heads=DRY_HEADS, vocab_size=DRY_VOCABULARY, **sizes)
            plan = ZeroPlan.from_stage(stage)
            runtime = ZeroRuntime(model, plan, MixedPrecision(), AdamWConfig(), settings, torch.device("cpu"))
            ids = torch.zeros((MICRO, SEQ), dtype=torch.int64)
            for _ in range(2):
                runtime.reset_ledger()
                runtime.backward(token_losses(runtime.model, ids, ids) / runtime.sum_over_ranks(MICRO * SEQ))
                runtime.step(1e-3)
            found[stage] = counted(runtime)
    return found


def test_a_dry_run_of_64_ranks_sends_the_closed_forms_at_every_stage() -> None:
    """The 12 tokens of a sequence are padded to two for each of 8 ranks."""
    axes = Axes(WORLD // DEGREE, DEGREE, 1, MICRO, SEQ, DRY_WIDTH, DRY_VOCABULARY)
    for stage, (sent, units, padded) in run_alone(dry_steps).items():
        assert sent == tensor_messages(axes) | data_messages(
            stage, axes.data_world, axes.micro_batches, units, padded
        ), stage
        plan = ZeroPlan.from_stage(stage)
        theory = collective_elements(
            CollectiveCounts.of(plan), padded, world=axes.data_world, shard_count=plan.shard_count(axes.data_world)
        )
        of_data = sum(nbytes for kind, (_, nbytes) in sent.items() if not kind.startswith("tensor_"))
        assert of_data == theory * FP32_BYTES
