"""The full state dict of a module whose parameters a runtime owns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.runtime import ZeroRuntime


def full_state(runtime: ZeroRuntime, *, kept: bool, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's state dict with full CPU tensors, in `dtype` or the one that it computes in; empty unless `kept`.

    Every rank calls it, outside of backwards. One unit is unsharded at a time; a rank with `kept` then has all of it.
    """
    runtime.check_weights("full_state")
    dtype = dtype or TORCH_DTYPE[runtime.precision.param]
    full: dict[str, torch.Tensor] = {}
    for unit in runtime.units:
        with runtime.full_params(unit.names) as values:
            full |= {name: value.to("cpu", dtype) for name, value in values.items()} if kept else {}
    return dict(_by_state_name(runtime.model, full)) if kept else {}


def _by_state_name(module: nn.Module, full: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries of the state dict: a tied parameter has several names for one tensor, and buffers are their own."""
    names = {id(param): name for name, param in module.named_parameters()}
    for name, found in module.state_dict(keep_vars=True).items():
        yield name, full[names[id(found)]] if id(found) in names else found.detach().cpu().clone()
