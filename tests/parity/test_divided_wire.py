"""Quantised messages of a model that a tensor-parallel group divides: replicas stay equal, and what is rounded is what
a single process rounds that knows the slices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.data_messages import Sent, counted
from harness.divided import (
    BLOCKS,
    LR,
    MICRO,
    SEQ,
    VOCABULARY,
    WIDTH,
    DividedRun,
    batch_of,
    loss_sum,
    model_of,
    one_step,
    weights_of,
)
from harness.exact import LION, RATES, STEPS, Curve, ExactModel, inputs, loss_of, same
from harness.ranks import run_ranks
from test_tensor_parallel_messages import Axes, tensor_messages
from test_wire import read_back
from torch import nn

from zero_runtime.parallel.tensor.division import TensorParallel
from zero_runtime.parallel.tensor.plan import SplitPlan
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import CollectiveCounts, gathered, reduced
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.wire import BLOCK_NUMEL, Wire

DEGREE, DATA_WORLD = 2, 2
BOTH = Wire("int8", "int4", error_feedback=True)


def slices_of(full: torch.Tensor, name: str, plan: SplitPlan) -> list[torch.Tensor]:
    """What the ranks of a group hold of a parameter, flattened; one tensor for a replicated one."""
    split = plan.splits.get(name)
    return [full.reshape(-1)] if split is None else [split.cut(full, rank).view(-1) for rank in range(DEGREE)]


def joined(slices: list[torch.Tensor], name: str, plan: SplitPlan, like: torch.Tensor) -> torch.Tensor:
    split = plan.splits.get(name)
    return slices[0].view(like.shape) if split is None else split.join(torch.stack(slices))


def rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """What is read back from the codes of a parameter's elements, whose blocks begin with it."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK_NUMEL))
    return read_back(padded, dtype)[: len(values)]


# ---- reductions, in exact arithmetic ---------------------------------------------------------------------------------


def exact_curves(rows: list[tuple[int, str]]) -> list[tuple[Curve, dict[str, int]]]:
    """By stage and dtype: the curve, and the data rank that owns each parameter."""
    found = []
    for stage, dtype in rows:
        settings = RuntimeSettings(tensor_parallel=TensorParallel(DEGREE), wire=Wire(None, dtype))  # type: ignore[arg-type]
        plan = ZeroPlan.from_stage(stage)
        runtime = ZeroRuntime(ExactModel(), plan, MixedPrecision(), LION, settings, torch.device("cpu"))
        losses = []
        for step in range(STEPS[LION]):
            runtime.backward(loss_of(runtime.model, *inputs(step, runtime.collectives.data_rank, 0)))
            losses.append(runtime.step(RATES[LION]).loss)
        owners = {
            segment.name: segment.offset // unit.layout.shard_numel
            for unit in runtime.units
            for segment in unit.layout.segments
        }
        found.append((Curve(losses, weights_of(runtime)), owners))
        runtime.close()
    return found


def plain_curve(dtype: str, owners: dict[str, int]) -> Curve:
    """One process that rounds what each data rank sends of the slices that the other owns."""
    model = ExactModel()
    plan = TensorParallel(DEGREE).plan(model)
    momenta = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    losses = []
    for step in range(STEPS[LION]):
        loss, by_rank = 0.0, []
        for rank in range(DATA_WORLD):
            part = loss_of(model, *inputs(step, rank, 0))
            part.backward()
            loss += float(part.detach())
            by_rank.append({name: param.grad for name, param in model.named_parameters()})
            model.zero_grad()
        losses.append(loss)
        for name, param in model.named_parameters():
            terms = [slices_of(grads[name], name, plan) for grads in by_rank]
            sent = [
                [values if rank == owners[name] else rounded(values, dtype) for values in slices]
                for rank, slices in enumerate(terms)
            ]
            total = joined([sum(values) for values in zip(*sent, strict=True)], name, plan, param)  # type: ignore[misc]
            momenta[name] = (momenta[name] + total) / 2  # both betas are 1/2
            param.data -= RATES[LION] * momenta[name].sign()
    return Curve(losses, {name: param.detach() for name, param in model.named_parameters()})


def test_reductions_have_the_bits_of_a_process_that_rounds_the_slices() -> None:
    """Each parameter of the exact model is one block."""
    rows = [(1, "int8"), (2, "int4"), (3, "int4")]
    for found in run_ranks(exact_curves, DEGREE * DATA_WORLD, rows):
        for (stage, dtype), (curve, owners) in zip(rows, found, strict=True):
            assert len(set(owners.values())) == DATA_WORLD, "both ranks own something, or nothing is rounded"
            wanted = plain_curve(dtype, owners)
            assert same(curve, wanted), (stage, dtype)
            assert not same(curve, plain_curve("int8" if dtype == "int4" else "int4", owners))


# ---- gathers ---------------------------------------------------------------------------------------------------------

Step = tuple[float, float, dict[str, torch.Tensor]]  # loss, norm, and the weights after it


def first_step(run: DividedRun) -> Step:
    runtime = run.runtime()
    loss, norm = one_step(runtime, 0)
    return loss, norm, weights_of(runtime)


def plain_step(dtype: torch.dtype, *, exact: bool) -> Step:
    """One process that computes with the values of the codes, and updates the exact weights."""
    model = model_of("llama")
    plan = TensorParallel(DEGREE).plan(model)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        read = [rounded(values, "int8") for values in slices_of(before[name], name, plan)]
        param.data = (before[name] if exact else joined(read, name, plan, param)).to(dtype)
    loss = _mean_loss(model)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    norm = torch.stack([grad.pow(2).sum() for grad in grads.values() if grad is not None]).sum().sqrt()
    return float(loss), float(norm), {name: before[name].to(dtype) - LR * grads[name] for name in before}


def _mean_loss(model: nn.Module) -> torch.Tensor:
    losses = [loss_sum(model, batch_of(model, 0, rank)) for rank in range(DATA_WORLD)]
    return torch.stack(losses).sum() / (DATA_WORLD * MICRO * SEQ)


def test_every_rank_computes_with_the_values_of_its_slices_codes() -> None:
    """The bound is that of `check_against_plain`: eight times the distance of plain fp32 from fp64."""
    exact, own, unrounded = (
        plain_step(torch.float64, exact=False),
        plain_step(torch.float32, exact=False),
        plain_step(torch.float64, exact=True),
    )
    least = 64 * 4 * 2.0**-24
    run = DividedRun("llama", 3, DEGREE, gathers_logits=False, wire=Wire("int8"))
    for found in run_ranks(first_step, DEGREE * DATA_WORLD, run):
        for place in (0, 1):
            allowed = max(8 * abs(own[place] - exact[place]), least)
            assert abs(found[place] - exact[place]) <= allowed
            assert abs(unrounded[place] - exact[place]) > allowed, "the rounding must show"
        allowed = 8 * max(float((own[2][name] - value).abs().max()) for name, value in exact[2].items())
        for name, value in exact[2].items():
            assert float((found[2][name] - value).abs().max()) <= allowed, name


# ---- replicas, and bytes ---------------------------------------------------------------------------------------------


def trained(runs: list[DividedRun]) -> list[tuple[dict[str, torch.Tensor], Sent, int]]:
    """By run: the weights as this rank's group has them; what the last step sent; and ZeRO's bytes in closed form."""
    found = []
    for run in runs:
        runtime = run.runtime()
        for step in range(4):
            runtime.reset_ledger()
            one_step(runtime, step)
        sent = counted(runtime)[0]
        found.append((weights_of(runtime), sent, closed_bytes(runtime, run)))
        runtime.close()
    return found


def closed_bytes(runtime: ZeroRuntime, run: DividedRun) -> int:
    counts, total = CollectiveCounts.of(runtime.plan, run.micro_batches), 0
    for unit in runtime.units:
        shard, itemsize = unit.layout.shard_numel, unit.parameters.param_dtype.itemsize
        total += counts.gathers * gathered(run.wire, runtime.plan, shard, DATA_WORLD, itemsize, trainable=True).nbytes
        total += counts.reductions * reduced(run.wire, shard, DATA_WORLD, 1, 4).nbytes
    return total


STAGE_3 = DividedRun("llama_biased", 3, DEGREE, gathers_logits=False, micro_batches=2, wire=BOTH)
RUNS = [STAGE_3, replace(STAGE_3, stage=1, precision=MixedPrecision("bf16"), wire=Wire("int8", "int8"))]


def test_replicas_stay_equal_and_the_bytes_are_the_closed_form() -> None:
    """Small parameters of this model would share blocks with slices, if blocks did not begin with a parameter."""
    by_rank = run_ranks(trained, DEGREE * DATA_WORLD, RUNS)
    replicated = 4 * BLOCKS + 1  # with the biases of row layers
    axes = Axes(DATA_WORLD, DEGREE, 2, MICRO, SEQ, WIDTH, VOCABULARY, gathers_logits=False, replicated=replicated)
    for found in by_rank:
        for place, (weights, sent, closed) in enumerate(found):
            of_data = sum(nbytes for kind, (_, nbytes) in sent.items() if not kind.startswith("tensor_"))
            assert of_data == closed, RUNS[place]
            assert all(torch.equal(value, by_rank[0][place][0][name]) for name, value in weights.items()), RUNS[place]
        of_layers = {kind: one for kind, one in found[0][1].items() if kind.startswith("tensor_")}
        assert of_layers == tensor_messages(axes)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "neox_tied", "qwen2"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_every_kind_stay_equal(kind: str, stage: int) -> None:
    precision = MixedPrecision("bf16")
    runs = [replace(STAGE_3, kind=kind, stage=stage, precision=precision, wire=wire) for wire in (BOTH, Wire("int8"))]
    by_rank = run_ranks(trained, DEGREE * DATA_WORLD, runs)
    for found in by_rank:
        for place, (weights, _, _) in enumerate(found):
            assert all(torch.equal(value, by_rank[0][place][0][name]) for name, value in weights.items()), runs[place]
