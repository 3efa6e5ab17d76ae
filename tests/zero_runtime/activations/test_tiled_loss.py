"""The tiled loss equals the plain loss up to the order of summation, and holds one tile of logits at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness.ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from zero_runtime.activations.tiled_loss import tiled_cross_entropy
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

TOKENS, WIDTH, VOCAB = 23, 16, 41
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[::5] = -100
    return hidden, weight, bias, labels


def _plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [1, 7, 23, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_loss_and_gradients_equal_those_of_the_plain_loss(tile: int, dtype: torch.dtype, with_bias: bool) -> None:
    hidden, weight, bias, labels = _inputs(dtype)
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    factor = 8.0  # a loss scale
    wanted_loss = _plain(hidden, weight, bias if with_bias else None, labels)
    wanted = torch.autograd.grad(wanted_loss * factor, inputs)
    loss = tiled_cross_entropy(hidden, weight, bias if with_bias else None, labels, tile=tile)
    found = torch.autograd.grad(loss * factor, inputs)
    # Sums of TOKENS terms in fp32, in any two orders; each loss is below log V + 2 max|logit|.
    most = math.log(VOCAB) + 2 * float(F.linear(hidden, weight, bias).detach().abs().max())
    assert abs(float(loss.detach()) - float(wanted_loss.detach())) <= 2 * TOKENS**2 * 2.0**-24 * most
    for one, other, tensor in zip(found, wanted, inputs, strict=True):
        assert one.dtype == tensor.dtype
        # |d logits| <= factor, so each term is below factor * max|other operand|. The terms are summed in fp32 and
        # rounded once; the plain path also rounds 16-bit d logits, and its sums. The difference is a few units in the
        # last place of the sum of absolute terms, of which there are TOKENS or VOCAB.
        terms = max(TOKENS, VOCAB)
        operand = max(float(hidden.abs().max()), float(weight.abs().max()), 1.0)
        bound = 4 * terms * UNIT[dtype] * factor * operand
        assert float((one.float() - other.float()).abs().max()) <= bound


def test_without_labels_the_loss_and_its_gradients_are_zero() -> None:
    hidden, weight, _, labels = _inputs(torch.float32)
    loss = tiled_cross_entropy(hidden, weight, None, torch.full_like(labels, -100), tile=5)
    assert float(loss) == 0
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert not bool(grad.any())


class _Largest(TorchDispatchMode):
    """Records the largest number of elements of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_only_one_tile_of_logits_exists_at_a_time() -> None:
    tokens, vocabulary, tile = 64, 400, 8
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    with _Largest() as plain:
        _plain(hidden, weight, None, labels).backward()
    with _Largest() as tiled:
        tiled_cross_entropy(hidden, weight, None, labels, tile=tile).backward()
    assert plain.numel == tokens * vocabulary
    assert tiled.numel == tile * vocabulary


# ---- the heads of real architectures, sharded ------------------------------------------------------------------------

MODELS = {
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},  # its head is tied
    "llama": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    },
}


def _losses(tile: int | None) -> dict[tuple[str, int], list[float]]:
    from orchestrator.workloads.models import build_deferred_model, token_losses

    found = {}
    ids = torch.arange(48).view(4, 12)
    for kind, config in MODELS.items():
        for stage in (0, 2, 3):
            model = build_deferred_model(kind, config)
            runtime = ZeroRuntime(
                model,
                ZeroPlan.from_stage(stage),
                MixedPrecision(),
                AdamWConfig(),
                RuntimeSettings(clip_norm=1.0),
                torch.device("cpu"),
            )
            losses = []
            for _ in range(3):
                runtime.backward(token_losses(runtime.model, ids, ids, tile) / ids.numel() / 2)
                losses.append(runtime.step(1e-3).loss)
            with torch.no_grad():
                losses.append(float(token_losses(runtime.model, ids, ids, tile)) / ids.numel())
            found[kind, stage] = losses
            runtime.close()
    return found


def test_models_train_the_same_with_the_tiled_loss_at_every_stage() -> None:
    wanted, found = run_ranks(_losses, 2, None)[0], run_ranks(_losses, 2, 7)[0]
    for key, losses in found.items():
        # 48 token losses in fp32, summed in a different order. After Adam's update, gradients that differ in their last
        # bits have no useful bound; that they differ by no more is what the first test in this file checks.
        assert losses[0] == pytest.approx(wanted[key][0], rel=48 * 2.0**-23), key
        assert losses[0] > losses[-1]
        assert losses == found[key[0], 0], "the plan changes no bits"


def _refused() -> None:
    from orchestrator.workloads.models import build_model, token_losses

    model = build_model("llama", MODELS["llama"], seed=0)
    scaled = model.forward
    model.forward = lambda **inputs: _scale(scaled(**inputs))  # type: ignore[method-assign]
    ids = torch.arange(12).view(1, 12)
    with pytest.raises(ValueError, match="found a changed one; use loss=full"):
        token_losses(model, ids, ids, 4)


def _scale(output):
    output.logits = output.logits * 2
    return output


def test_an_architecture_that_changes_its_logits_is_refused() -> None:
    run_ranks(_refused, 1)
