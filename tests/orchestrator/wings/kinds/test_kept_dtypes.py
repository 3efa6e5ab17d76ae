"""precision.keep_dtype: a module computes in the dtype of its parameters, whatever the modules around it compute in."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from typing import Any, cast

import pytest
import torch
from torch import nn

from orchestrator.config.state_groups import Precision
from orchestrator.wings.kinds.kept_dtypes import cast_around
from orchestrator.workloads.models import build_model, token_losses
from zero_runtime.precision import MixedPrecision

LAYERS = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "gpt2": {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 16},  # its head is its embedding
}
IDS = torch.arange(24).reshape(2, 12) % 61


class InFp32(nn.Module):
    """A module in fp32 between modules in bf16, written out."""

    def __init__(self, inner: nn.Module, *, is_head: bool) -> None:
        super().__init__()
        self.inner, self.is_head = inner, is_head
        self.weight = inner.weight  # which models read

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(given.float() if given.is_floating_point() else given)
        return found if self.is_head else found.bfloat16()


def model_of(kind: str, patterns: list[str]) -> nn.Module:
    """In bf16, but for the parameters that match a pattern."""
    model = build_model(kind, MODELS[kind], seed=3)
    for name, param in model.named_parameters():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            param.data = param.data.bfloat16()
    return model


def written_out(model: nn.Module) -> nn.Module:
    """A copy with InFp32 around each module that has a parameter in fp32."""
    model = copy.deepcopy(model)
    head = cast(Any, model).get_output_embeddings()
    for path, module in list(model.named_modules()):
        if any(param.dtype == torch.float32 for param in module.parameters(recurse=False)):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, InFp32(module, is_head=module is head))
    return model


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize(
    ("kind", "patterns"),
    [
        ("llama", ["*norm*"]),
        ("llama", ["lm_head*", "*.1.mlp.*"]),
        ("llama", ["*"]),
        ("gpt2", ["*ln_*", "*wpe*"]),
        ("gpt2", ["*wte*"]),
    ],
)
def test_a_kept_module_is_one_in_fp32_between_casts(kind: str, patterns: list[str], tile: int | None) -> None:
    model = model_of(kind, patterns)
    expected = written_out(model)
    cast_around(model, Precision(MixedPrecision("bf16"), compute="bf16", keep_dtype=patterns))
    wanted = token_losses(expected, IDS, IDS)
    wanted.backward()
    found = token_losses(model, IDS, IDS, tile)
    found.backward()
    if tile is None:
        assert torch.equal(found, wanted)
    else:  # sums in another order
        torch.testing.assert_close(found, wanted, rtol=2**-20, atol=0.0)
    gradients = {name.replace("inner.", ""): param.grad for name, param in expected.named_parameters()}
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert param.grad.dtype == param.dtype
        if tile is None:
            assert torch.equal(param.grad, gradients[name]), name
