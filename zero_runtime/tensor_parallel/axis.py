"""The tensor-parallel group of a rank, as the divided layers use it: sums and gathers, and the batch that they saw."""

from __future__ import annotations

from typing import Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MIX, _BITS = 1_000_003, 31  # a multiplier, and the bits of a fingerprint: sums of 2**20 of them are exact in fp64


class SliceCollectives(Protocol):
    """The interface of `Collectives` that an axis uses."""

    tensor_degree: int
    tensor_rank: int

    def sum_over_slices_(self, values: torch.Tensor) -> torch.Tensor: ...

    def gather_slices(self, values: torch.Tensor) -> torch.Tensor: ...


class TensorAxis:
    """The ranks that hold the slices of one model. They compute on the same batch, which `fingerprint` lets them check.

    All of them must run the same layers in the same order, since each sum and gather is a collective.
    """

    def __init__(self, collectives: SliceCollectives) -> None:
        self.rank = collectives.tensor_rank
        self.degree = collectives.tensor_degree
        self._collectives = collectives
        self._seen: torch.Tensor | None = None

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over the group, in place; equal bits on every rank."""
        return self._collectives.sum_over_slices_(values)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, [degree, *shape]."""
        return self._collectives.gather_slices(values)

    # ---- the batch -------------------------------------------------------------------------------------------------

    def note(self, ids: torch.Tensor) -> None:
        """Add token ids or labels of a training forward to the fingerprint. Does not wait for the device."""
        if not torch.is_grad_enabled() or isinstance(ids, FakeTensor) or ids.is_meta:
            return
        flat = ids.detach().reshape(-1).to(torch.int64)
        places = torch.arange(1, 2 * flat.numel(), 2, device=flat.device)  # places change the sum
        found = ((flat + _MIX) * places * _MIX).sum()  # wraps around, on every device in the same way
        self._seen = found if self._seen is None else self._seen * _MIX + found

    def fingerprint(self, device: torch.device) -> torch.Tensor:
        """0-dim fp64: an integer below 2**31 that is equal on ranks that noted the same since the last call."""
        seen, self._seen = self._seen, None
        if seen is None:
            return torch.zeros((), dtype=torch.float64, device=device)
        return ((seen ^ (seen >> 32)) & (2**_BITS - 1)).to(torch.float64)

    def difference(self, fingerprint: torch.Tensor) -> torch.Tensor:
        """This rank's term of a sum over all ranks that is zero if the fingerprints agree in every group."""
        return fingerprint * (self.degree - 1) if self.rank == 0 else -fingerprint


class AloneOnAxis:
    """Stands in for the collectives where no ranks are: in a trace on fake tensors, which only needs shapes."""

    def __init__(self, degree: int) -> None:
        self.tensor_degree, self.tensor_rank = degree, 0

    def sum_over_slices_(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather_slices(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_empty((self.tensor_degree, *values.shape))
