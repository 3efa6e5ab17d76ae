"""Tensor parallelism with ZeRO equals one process of plain PyTorch; its messages equal closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.exact import LION, RATES, STEPS, Curve, ExactModel, Row, inputs, loss_of, plain, same
from harness.ranks import run_ranks
from torch import nn

from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import SgdConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.tensor_parallel.cross_entropy import vocabulary_cross_entropy
from zero_runtime.tensor_parallel.division import TensorParallel, head_of
from zero_runtime.tensor_parallel.plan import plan_split

CPU = torch.device("cpu")
VOCABULARY, WIDTH, BLOCKS, HEADS = 37, 24, 2, 4  # no degree above 1 divides the vocabulary
MICRO, SEQ, LR, TRAINED_STEPS = 2, 12, 0.1, 3
KINDS = ("gpt2", "llama", "qwen2", "qwen3", "neox", "t5")


def model_of(kind: str) -> nn.Module:
    """A small model with values, the same in each call."""
    import transformers as library

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": BLOCKS}
    sizes |= {"intermediate_size": 40, "num_attention_heads": HEADS}
    configs: dict[str, Any] = {
        "gpt2": lambda: library.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=BLOCKS, n_head=HEADS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
        "llama": lambda: library.LlamaConfig(**sizes, num_key_value_heads=2),
        "qwen2": lambda: library.Qwen2Config(**sizes, num_key_value_heads=2, tie_word_embeddings=True),
        "qwen3": lambda: library.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8),
        "neox": lambda: library.GPTNeoXConfig(**sizes),
        "t5": lambda: library.T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=6, d_ff=40, num_layers=2, num_heads=HEADS, dropout_rate=0.0
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "t5":
            return library.T5ForConditionalGeneration(configs[kind]())
        return library.AutoModelForCausalLM.from_config(configs[kind](), attn_implementation="sdpa")


def batch_of(step: int, data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randint(VOCABULARY, (MICRO, SEQ), generator=generator)


def loss_sum(model: nn.Module, kind: str, ids: torch.Tensor) -> torch.Tensor:
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "t5" else {})
    logits, labels = model(**given).logits, ids.roll(-1, 1)
    head = head_of(model)
    if head is not None:
        return vocabulary_cross_entropy(logits, labels, head.axis, vocabulary=head.vocabulary)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


Result = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]  # (loss, norm) by step, and the weights by name


def plain_run(kind: str, data_world: int, dtype: torch.dtype) -> Result:
    model = model_of(kind).to(dtype)
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=LR), []
    for step in range(TRAINED_STEPS):
        total = 0.0
        for rank in range(data_world):
            loss = loss_sum(model, kind, batch_of(step, rank)) / (MICRO * SEQ * data_world)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        steps.append((total, float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return steps, {name: param.detach() for name, param in model.named_parameters()}


def divided_runtime(model: nn.Module, stage: int, degree: int, **settings: Any) -> ZeroRuntime:
    tensor = TensorParallel(degree, gathers_logits=settings.pop("gathers_logits", True))
    given = RuntimeSettings(tensor_parallel=tensor, **settings)
    return ZeroRuntime(model, ZeroPlan.from_stage(stage), MixedPrecision(), SgdConfig(), given, CPU)


def divided_run(kind: str, stage: int, degree: int, gathers_logits: bool) -> Result:
    runtime, steps = divided_runtime(model_of(kind), stage, degree, gathers_logits=gathers_logits), []
    for step in range(TRAINED_STEPS):
        tokens = runtime.sum_over_ranks(MICRO * SEQ)
        runtime.backward(loss_sum(runtime.model, kind, batch_of(step, runtime.collectives.data_rank)) / tokens)
        report = runtime.step(LR)
        steps.append((report.loss, report.grad_norm))
    with runtime.full_params() as values:
        weights = {name: value.clone() for name, value in values.items()}
    runtime.close()
    return steps, weights


def divided_runs(kinds: tuple[str, ...], stage: int, degree: int) -> list[Result]:
    return [divided_run(kind, stage, degree, gathers) for kind in kinds for gathers in (True, False)]


def check_against_plain(kinds: tuple[str, ...], world: int, stage: int, degree: int) -> None:
    """Both a divided and a plain run in fp32 differ from a plain one in fp64 by rounding alone.

    The bound is eight times the distance of the plain fp32 run, over all weights, and at least 64 roundings of a loss
    of at most 4: a divided sum has as many roundings as a plain one, in another order, and a head has 3 more. A lost or
    doubled term changes a gradient by a part of itself, which is 10**4 times as much.
    """
    by_rank = run_ranks(divided_runs, world, kinds, stage, degree)
    for results in by_rank:
        assert [steps for steps, _ in results] == [steps for steps, _ in by_rank[0]]
    rounding = 64 * 4 * 2.0**-24
    for place, (steps, weights) in enumerate(by_rank[0]):
        kind = kinds[place // 2]
        (exact, exact_weights) = plain_run(kind, world // degree, torch.float64)
        (_, fp32_weights) = plain_run(kind, world // degree, torch.float32)
        for (loss, norm), (exact_loss, exact_norm) in zip(steps, exact, strict=True):
            assert abs(loss - exact_loss) <= rounding, (kind, place)
            assert abs(norm - exact_norm) <= rounding, (kind, place)
        allowed = 8 * max(float((fp32_weights[name] - one).abs().max()) for name, one in exact_weights.items())
        for name, one in exact_weights.items():
            assert float((weights[name] - one).abs().max()) <= allowed, (kind, name)


def test_two_slices_of_every_model_equal_plain_torch() -> None:
    check_against_plain(KINDS, 2, 0, 2)


def test_two_slices_on_two_data_ranks_equal_plain_torch_at_stage_3() -> None:
    check_against_plain(KINDS, 4, 3, 2)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "degree"), [(1, 2), (2, 2), (1, 4)])
def test_other_stages_and_degrees_equal_plain_torch(stage: int, degree: int) -> None:
    check_against_plain(("gpt2", "neox", "t5") if degree == 4 else KINDS, 4, stage, degree)


# ---- exact arithmetic ------------------------------------------------------------------------------------------------


def exact_curves(stages: tuple[int, ...], micro_batches: int) -> list[Curve]:
    curves = []
    for stage in stages:
        settings = RuntimeSettings(micro_batches=micro_batches, tensor_parallel=TensorParallel(2))
        runtime = ZeroRuntime(ExactModel(), ZeroPlan.from_stage(stage), MixedPrecision(), LION, settings, CPU)
        losses = []
        for step in range(STEPS[LION]):
            for micro in range(micro_batches):
                runtime.backward(loss_of(runtime.model, *inputs(step, runtime.collectives.data_rank, micro)))
            losses.append(runtime.step(RATES[LION]).loss)
        with runtime.full_params() as values:
            curves.append(Curve(losses, {name: value.clone() for name, value in values.items()}))
        runtime.close()
    return curves


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (4, 2)])
def test_exact_arithmetic_has_the_bits_of_plain_torch_at_every_stage(world: int, micro_batches: int) -> None:
    wanted = plain(Row(0, LION, micro_batches=micro_batches), world // 2)
    for curves in run_ranks(exact_curves, world, (0, 1, 2, 3), micro_batches):
        assert all(same(curve, wanted) for curve in curves)


# ---- messages --------------------------------------------------------------------------------------------------------


def sent_in_a_step(recompute: str) -> dict[str, tuple[int, int]]:
    """(calls, bytes) of each kind of message over the tensor axis in one step of a Llama-like model."""
    from zero_runtime.activations.recompute import Recomputation
    from zero_runtime.activations.rule import RecomputeRule

    model = model_of("llama")
    Recomputation(model, RecomputeRule(recompute))  # type: ignore[arg-type]
    runtime = divided_runtime(model, 1, 2, gathers_logits=False)
    runtime.reset_ledger()
    runtime.backward(loss_sum(runtime.model, "llama", batch_of(0, 0)))
    runtime.step(LR)
    data = runtime.reset_ledger().data
    return {kind: (one.calls, one.bytes) for kind, one in data.items() if kind.startswith("tensor_")}


@pytest.mark.parametrize(("recompute", "per_block"), [("none", 4), ("full", 5)])
def test_messages_over_the_tensor_axis_equal_closed_forms(recompute: str, per_block: int) -> None:
    """Four sums of b*s*h a block; with recomputation the attention's sum again, while that of the MLP is not needed:
    nothing after it is saved, and torch stops there. One sum for the embedding, one for the head's input; three numbers
    of a token for the loss."""
    calls = per_block * BLOCKS + 2
    hidden_bytes = MICRO * SEQ * WIDTH * 4
    expected = {
        "tensor_all_reduce": (calls, calls * hidden_bytes),  # 2 (k-1)/k = 1 for two ranks
        "tensor_all_gather": (1, 3 * MICRO * SEQ * 4),
    }
    assert run_ranks(sent_in_a_step, 2, recompute) == [expected] * 2


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_grouped_heads_that_do_not_divide_are_refused_with_the_nearest_degrees() -> None:
    with pytest.raises(PlanError, match=r"2 heads of .*k_proj.*use parallel.tp=1 or parallel.tp=2"):
        plan_split(model_of("llama"), 4)


def test_patterns_can_replicate_a_layer_and_unknown_ones_are_refused() -> None:
    patterns = ("*.mlp.*=replicated",)
    assert not [name for name in plan_split(model_of("llama"), 2, patterns).splits if ".mlp." in name]
    with pytest.raises(PlanError, match="expected 'nothing' to match a linear layer"):
        plan_split(model_of("llama"), 2, ("nothing=column",))


def different_batches() -> str:
    runtime = divided_runtime(model_of("llama"), 1, 2)
    runtime.backward(loss_sum(runtime.model, "llama", batch_of(0, runtime.collectives.rank)))
    with pytest.raises(PlanError) as error:
        runtime.step(LR)
    return str(error.value)


def test_different_batches_in_a_group_are_refused_on_every_rank() -> None:
    for message in run_ranks(different_batches, 2):
        assert "the same batch, found different tokens or labels on ranks [0, 1]" in message


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(root: Path, stage: int, degree: int) -> dict[str, torch.Tensor]:
    runtime = divided_runtime(model_of("gpt2"), stage, degree)
    runtime.backward(loss_sum(runtime.model, "gpt2", batch_of(0, 0)))
    runtime.step(LR)
    save_checkpoint(runtime, root, step=1, trainer={})
    with runtime.full_params() as values:
        return {name: value.clone() for name, value in values.items()}


def loaded(root: Path, stage: int, degree: int) -> dict[str, torch.Tensor]:
    runtime = divided_runtime(model_of("gpt2"), stage, degree)
    with CheckpointReader.open(root / "step-00000001", verify=False) as checkpoint:
        load_checkpoint(runtime, checkpoint)
    with runtime.full_params() as values:
        return {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize(("degree", "other"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_a_checkpoint_of_one_degree_is_loaded_at_another(tmp_path: Path, degree: int, other: int) -> None:
    wanted = run_ranks(saved, 4, tmp_path, 2, degree)[0]
    for found in run_ranks(loaded, 4, tmp_path, 1, other):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
