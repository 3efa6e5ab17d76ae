"""Tensor parallelism with ZeRO equals one process of plain PyTorch, with every setting that it allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness.divided import (
    HOST,
    HOST_PARAMS,
    IGNORED,
    KINDS,
    LR,
    MICRO,
    ODD_KINDS,
    PART_KINDS,
    VOCABULARY,
    DividedRun,
    batch_of,
    check_against_plain,
    divided_results,
    labels_of,
    loss_sum,
    model_of,
    one_step,
    weights_of,
)
from harness.exact import LION, RATES, SGD, STEPS, Curve, ExactModel, Row, inputs, loss_of, plain, same
from harness.ranks import run_ranks
from torch import nn

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.checkpoint.hugging_face.folder import write_weights
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.errors import PlanError
from zero_runtime.offload_plan import OffloadPlan
from zero_runtime.optim.configs import LambConfig, MuonConfig, OptimizerConfig
from zero_runtime.parallel.tensor.division import TensorParallel
from zero_runtime.parallel.tensor.tokens import FINAL_NORMS
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.settings import NO_OFFLOAD

BF16 = MixedPrecision("bf16")
MUON = MuonConfig(ns_dtype="fp32", eps=0.01)
LAMB = LambConfig(eps=0.01, weight_decay=0.0)  # so large that an update hardly depends on the rounding of a gradient


def check(world: int, runs: list[DividedRun]) -> None:
    check_against_plain(run_ranks(divided_results, world, runs), runs)


# Of architectures that differ in what is divided; the slices of all others are checked without training.
SHORT_KINDS = ("gpt2", "llama_biased", "llama_wide_heads", "neox_tied", "t5", "t5_gated_untied")


@pytest.mark.parametrize("kinds", [SHORT_KINDS, pytest.param((*KINDS, *ODD_KINDS), marks=pytest.mark.full)], ids=len)
def test_two_slices_of_a_model_equal_plain_torch(kinds: tuple[str, ...]) -> None:
    check(2, [DividedRun(kind, gathers_logits=place % 2 == 0) for place, kind in enumerate(kinds)])


@pytest.mark.full
def test_two_slices_on_two_data_ranks_equal_plain_torch_with_other_settings() -> None:
    accumulated = DividedRun("llama", 2, micro_batches=2, clip_norm=0.5)
    every = [
        DividedRun("gpt2", 3, gathers_logits=False),
        accumulated,
        replace(accumulated, kind="qwen3", stage=3, offload=HOST_PARAMS),
        DividedRun("llama", 1, precision=BF16, offload=HOST, clip_norm=0.5, micro_batches=2, gathers_logits=False),
        DividedRun("gpt2", 3, precision=BF16),
        DividedRun("neox_tied", 2, gathers_logits=False, tile=5),  # tiles of 5, 5, ... of the 24 tokens
        DividedRun("llama", 3, optimizer=LAMB),  # its ratios need the norms of full parameters
    ]
    check(4, every)


ADAPTERS = DividedRun("llama", 3, gathers_logits=False, adapter_rank=3)
MORE_ADAPTERS = [
    replace(ADAPTERS, kind="gpt2", stage=1, clip_norm=0.05),
    replace(ADAPTERS, kind="neox", stage=2, micro_batches=2, recompute=RecomputeRule("full")),
]


@pytest.mark.parametrize("runs", [[ADAPTERS], pytest.param(MORE_ADAPTERS, marks=pytest.mark.full)], ids=len)
def test_two_slices_with_adapters_on_two_data_ranks_equal_plain_torch(runs: list[DividedRun]) -> None:
    check(4, runs)


WHOLE = DividedRun("llama", 3, gathers_logits=False, optimizer=MUON, micro_batches=2, clip_norm=0.5)
MORE_WHOLE = [
    replace(WHOLE, kind="gpt2", stage=0),
    replace(WHOLE, kind="neox", stage=1, optimizer=replace(MUON, lr_scaling="original", nesterov=False)),
]


@pytest.mark.parametrize("runs", [[WHOLE], pytest.param(MORE_WHOLE, marks=pytest.mark.full)], ids=len)
def test_muon_orthogonalises_whole_matrices_of_slices(runs: list[DividedRun]) -> None:
    check(4, runs)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "degree", "shard_ranks"), [(1, 4, None), (2, 2, 1), (2, 2, None), (3, 2, 1)])
def test_muon_at_other_stages_and_degrees_equals_plain_torch(stage: int, degree: int, shard_ranks: int | None) -> None:
    kinds = ("llama", "gpt2", "neox_tied") if degree == 2 else ("gpt2", "llama_wide_heads")
    check(4, [DividedRun(kind, stage, degree, optimizer=MUON, shard_ranks=shard_ranks) for kind in kinds])


@pytest.mark.full
@pytest.mark.parametrize(("stage", "degree"), [(0, 2), (1, 4), (2, 2), (3, 4)])
def test_adapters_at_other_stages_and_degrees_equal_plain_torch(stage: int, degree: int) -> None:
    kinds = ("gpt2", "llama_wide_heads", "neox_tied") if degree == 4 else ("llama_biased", "qwen3", "neox", "gpt2")
    runs = [DividedRun(kind, stage, degree, micro_batches=2, adapter_rank=3) for kind in kinds]
    check(4, [*runs, replace(runs[0], precision=BF16)])


def test_further_architectures_with_parts_of_tokens_equal_plain_torch() -> None:
    further = [kind for kind in PART_KINDS if kind in FINAL_NORMS]
    assert len(further) == 4
    check(4, [DividedRun(kind, 1, 2, micro_batches=2, gathers_logits=False) for kind in further])


@pytest.mark.full
@pytest.mark.parametrize(("stage", "degree"), [(0, 2), (1, 2), (2, 2), (3, 2), (1, 4), (3, 4)])
def test_other_stages_and_degrees_equal_plain_torch(stage: int, degree: int) -> None:
    kinds = (*KINDS, *ODD_KINDS) if degree == 2 else ("gpt2", "neox", "t5", "llama_wide_heads", "neox_tied")
    runs = [DividedRun(kind, stage, degree, gathers_logits=gathers) for kind in kinds for gathers in (True, False)]
    tiled = [kind for kind in kinds if not kind.startswith("t5")]  # whose model scales what the head returns
    check(4, runs + [DividedRun(kind, stage, degree, gathers_logits=False, tile=7) for kind in tiled])


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_precision_and_offload_equals_plain_torch(stage: int) -> None:
    one = DividedRun("llama", stage, clip_norm=0.5, micro_batches=2)
    offloads = [NO_OFFLOAD, HOST, *([HOST_PARAMS] if stage == 3 else [])]
    if stage == 0:
        offloads = [NO_OFFLOAD]
    precisions = [MixedPrecision(), BF16, MixedPrecision("bf16", reduce="bf16")]
    check(4, [replace(one, offload=offload, precision=each) for offload in offloads for each in precisions])


# ---- sequences that the degree does not divide, and masks ---------------------------------------------------------

LENGTH, PADDING = 9, 3  # tokens of a sequence, and those of the second one that are padding on the left


def padded_loss(model: nn.Module, divisor: torch.Tensor | float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCABULARY, (MICRO, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    labels = labels_of(ids).masked_fill(mask == 0, IGNORED)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum") / divisor


def padded_steps(kinds: list[str]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """By kind: the validation loss, the loss and the norm of one step, and the weights after it."""
    found = []
    for kind in kinds:
        runtime = DividedRun(kind, 2, recompute=RecomputeRule("full")).runtime()
        tokens = runtime.sum_over_ranks(MICRO * LENGTH - PADDING)
        with torch.no_grad():
            validation = padded_loss(runtime.model, MICRO * LENGTH - PADDING)
        with pytest.raises(PlanError, match="each rank has those of a part of the tokens"):
            runtime.model(input_ids=torch.zeros((1, 4), dtype=torch.int64), output_hidden_states=True)
        runtime.backward(padded_loss(runtime.model, tokens))
        report = runtime.step(LR)
        found.append(([float(validation), report.loss, report.grad_norm], weights_of(runtime)))
        runtime.close()
    return found


def plain_padded(kind: str, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = model_of(kind).to(dtype)
    loss = padded_loss(model, MICRO * LENGTH - PADDING)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
    weights = {name: (param - LR * param.grad).detach() for name, param in model.named_parameters()}
    return [float(loss.detach()), float(loss.detach()), float(norm)], weights


def test_parts_of_padded_sequences_with_a_mask_equal_plain_torch() -> None:
    """In training 9 tokens are 10 in two parts; a forward without gradients has none. Bounds: `check_against_plain`."""
    kinds = ["llama", "gpt2", "neox_tied"]
    for found in run_ranks(padded_steps, 4, kinds):
        for kind, (numbers, weights) in zip(kinds, found, strict=True):
            (exact_numbers, exact), (own_numbers, own) = (
                plain_padded(kind, one) for one in (torch.float64, torch.float32)
            )
            for number, wanted, rounded in zip(numbers, exact_numbers, own_numbers, strict=True):
                assert abs(number - wanted) <= max(8 * abs(rounded - wanted), 64 * 4 * 2.0**-24), kind
            allowed = 8 * max(float((own[name] - value).abs().max()) for name, value in exact.items())
            for name, value in exact.items():
                assert float((weights[name] - value).abs().max()) <= allowed, (kind, name)


# ---- exact arithmetic ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExactRow:
    """A row of harness.exact with two slices."""

    stage: int
    optimizer: OptimizerConfig = LION
    micro_batches: int = 1
    shard_ranks: int | None = None
    offload: OffloadPlan = NO_OFFLOAD


def exact_curves(rows: list[ExactRow]) -> list[tuple[Curve, float]]:
    """The curve of each row, and the norm of its first step."""
    found = []
    for row in rows:
        settings = RuntimeSettings(
            micro_batches=row.micro_batches, offload=row.offload, tensor_parallel=TensorParallel(2)
        )
        plan = ZeroPlan.from_stage(row.stage, shard_ranks=row.shard_ranks)
        runtime = ZeroRuntime(ExactModel(), plan, MixedPrecision(), row.optimizer, settings, torch.device("cpu"))
        reports = []
        for step in range(STEPS[row.optimizer]):
            for micro in range(row.micro_batches):
                runtime.backward(loss_of(runtime.model, *inputs(step, runtime.collectives.data_rank, micro)))
            reports.append(runtime.step(RATES[row.optimizer]))
        found.append((Curve([report.loss for report in reports], weights_of(runtime)), reports[0].grad_norm))
        runtime.close()
    return found


def norm_of_plain(micro_batches: int, data_world: int) -> float:
    model = ExactModel().double()
    for rank in range(data_world):
        for micro in range(micro_batches):
            loss_of(model, *(one.double() for one in inputs(0, rank, micro))).backward()
    squares = sum((param.grad**2).sum() for param in model.parameters() if param.grad is not None)
    return float(torch.as_tensor(squares).sqrt())


ROWS = [ExactRow(stage, micro_batches=micro) for stage in (0, 1, 2, 3) for micro in (1, 2)]
ROWS += [ExactRow(stage, offload=HOST, micro_batches=2) for stage in (1, 2, 3)]
ROWS += [ExactRow(3, SGD), ExactRow(3, offload=HOST_PARAMS)]
SHORT_ROWS = [ExactRow(0), ExactRow(1, micro_batches=2), ExactRow(2, micro_batches=2, offload=HOST)]
SHORT_ROWS += [ExactRow(3, SGD), ExactRow(3, micro_batches=2, offload=HOST_PARAMS)]
SHORT_HYBRID = [ExactRow(stage, shard_ranks=2, micro_batches=2) for stage in (1, 3)]
HYBRID = [ExactRow(2, shard_ranks=2, micro_batches=2), ExactRow(3, SGD, shard_ranks=2)]
HYBRID += [ExactRow(stage, shard_ranks=2, offload=HOST) for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    ("world", "rows"),
    [
        pytest.param(4, SHORT_ROWS, id="two data ranks"),
        pytest.param(8, SHORT_HYBRID, id="hybrid"),
        pytest.param(2, ROWS, id="one data rank, all rows", marks=pytest.mark.full),
        pytest.param(4, ROWS, id="two data ranks, all rows", marks=pytest.mark.full),
        pytest.param(8, HYBRID, id="hybrid, all rows", marks=pytest.mark.full),
    ],
)
def test_exact_arithmetic_has_the_bits_of_plain_torch(world: int, rows: list[ExactRow]) -> None:
    """Losses, norms and weights. With 8 ranks: slices of 2, shards over 2 and replicas on 2."""
    for found in run_ranks(exact_curves, world, rows):
        for row, (curve, norm) in zip(rows, found, strict=True):
            wanted = plain(Row(0, row.optimizer, micro_batches=row.micro_batches), world // 2)
            assert same(curve, wanted), row
            assert norm == norm_of_plain(row.micro_batches, world // 2), row


# ---- refusals --------------------------------------------------------------------------------------------------------


def different_batches() -> str:
    runtime = DividedRun("llama", 1).runtime()
    one_step(runtime, 0)  # the first training forward is compared at once: deepspeed/test_auto_tp.py
    runtime.backward(loss_sum(runtime.model, batch_of(runtime.model, 1, runtime.collectives.rank)))
    with pytest.raises(PlanError) as error:
        runtime.step(0.1)
    return str(error.value)


def test_different_batches_in_a_group_are_refused_on_every_rank() -> None:
    for message in run_ranks(different_batches, 2):
        assert "the same batch, found different tokens or labels on ranks [0, 1]" in message


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(root: Path, stage: int, degree: int, adapter_rank: int = 0) -> dict[str, torch.Tensor]:
    runtime = DividedRun("gpt2", stage, degree, adapter_rank=adapter_rank).runtime()
    one_step(runtime, 0)
    save_checkpoint(runtime, root, step=1, trainer={})
    return weights_of(runtime)


def loaded(root: Path, stage: int, degree: int, adapter_rank: int = 0) -> dict[str, torch.Tensor]:
    runtime = DividedRun("gpt2", stage, degree, adapter_rank=adapter_rank).runtime()
    with CheckpointReader.open(root / "step-00000001", verify=False) as checkpoint:
        load_checkpoint(runtime, checkpoint)
    return weights_of(runtime)


@pytest.mark.parametrize(
    ("degree", "other"),
    [(2, 1), (4, 2), pytest.param(1, 2, marks=pytest.mark.full), pytest.param(2, 4, marks=pytest.mark.full)],
)
def test_a_checkpoint_of_one_degree_is_loaded_at_another_and_exported(tmp_path: Path, degree: int, other: int) -> None:
    from safetensors.torch import load_file

    wanted = run_ranks(saved, 4, tmp_path, 2, degree)[0]
    for found in run_ranks(loaded, 4, tmp_path, 1, other):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    with CheckpointReader.open(tmp_path / "step-00000001") as checkpoint:
        write_weights(checkpoint.state("master"), tmp_path / "weights", dtype=torch.float32)
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], value) for name, value in wanted.items())


@pytest.mark.full
@pytest.mark.parametrize(("degree", "other"), [(2, 1), (1, 4)])
def test_a_checkpoint_with_adapters_is_loaded_at_another_degree(tmp_path: Path, degree: int, other: int) -> None:
    wanted = run_ranks(saved, 4, tmp_path, 2, degree, 3)[0]
    for found in run_ranks(loaded, 4, tmp_path, 3, other, 3):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
