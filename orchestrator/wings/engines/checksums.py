"""Checksums of tensors that are computed on their device, without waiting for it: equal bits at equal positions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

AT_ONCE = 1 << 18  # elements: the temporary tensors take 6 MiB, so that counting does not show in peaks of memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of splitmix64, as signed 64-bit numbers. Products of int64 tensors wrap around.
_STEP, _MIX = -7046029254386353131, -4658895280553007687


def checksum(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A 0-dim int64 tensor on the tensor's device: the sum, modulo 2^64, of a mixed term of each element's bits and
    position. offset: the position of the first element.

    Sums of parts with their own offsets add up to that of the whole, however it is cut.
    """
    flat = tensor.detach().contiguous().view(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), AT_ONCE):
        part = flat[start : start + AT_ONCE].to(torch.int64) * _MIX  # a copy
        first = offset + start
        terms = torch.arange(first + 1, first + 1 + part.numel(), device=part.device).mul_(_STEP)
        # Exclusive or, not a sum, in which two values that change places would cancel out.
        terms = terms.bitwise_xor_(part)
        terms = terms.bitwise_xor_(terms >> 29).mul_(_MIX)
        total += terms.bitwise_xor_(terms >> 32).sum()
    return total


def hexadecimal(checksums: Iterable[int]) -> str:
    """The sum of checksums of parts, modulo 2^64."""
    return f"{sum(checksums) % 2**64:016x}"


def hex_of(texts: Iterable[str]) -> str:
    """One hash of texts, in any order."""
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]
