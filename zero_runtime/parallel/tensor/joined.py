"""Cuts slices out of full tensors and joins them again, by the arithmetic of slices.py."""

from __future__ import annotations

import torch

from zero_runtime.parallel.tensor.slices import Split


def slice_of(full: torch.Tensor, split: Split, rank: int) -> torch.Tensor:
    """This rank's slice of a full tensor, of `split.local_shape`; a copy that the caller owns. Padding is zero."""
    found = full.new_zeros(split.local_shape)
    start = local = 0
    for part, (size, own) in enumerate(zip(split.parts, split.local_parts, strict=True)):
        valid = split.valid(rank, part)
        source = full.narrow(split.dim, start + min(rank * own, size), valid)
        found.narrow(split.dim, local, valid).copy_(source)
        start, local = start + size, local + own
    return found


def join_slices(slices: torch.Tensor, split: Split) -> torch.Tensor:
    """The full tensor, of `split.shape`, from the flattened slices of all ranks, [degree, local_numel]; a copy."""
    full = slices.new_empty(split.shape)
    for rank, flat in enumerate(slices):
        own_slice = flat.view(split.local_shape)
        start = local = 0
        for part, (size, own) in enumerate(zip(split.parts, split.local_parts, strict=True)):
            valid = split.valid(rank, part)
            target = full.narrow(split.dim, start + min(rank * own, size), valid)
            target.copy_(own_slice.narrow(split.dim, local, valid))
            start, local = start + size, local + own
    return full
