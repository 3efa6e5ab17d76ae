"""Users' tensors as the memory that operations read and write: flat, contiguous, and apart from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from zero_runtime.errors import PeerError

Span = tuple[int, int]  # the addresses of a tensor's first byte, and of the byte after its last


class Tensors(NamedTuple):
    """The tensors that a collective writes and reads on this rank: one, one for each rank of the group, or none."""

    received: Sequence[torch.Tensor]
    sent: Sequence[torch.Tensor] = ()

    @property
    def any(self) -> torch.Tensor:
        """The single tensor beside those of all ranks: its dtype and size are the collective's."""
        return (self.sent if len(self.sent) == 1 else self.received)[0]


def lay(what: str, asked: Sequence[Tensors], rank: int) -> tuple[list[Tensors], Callable[[], None] | None]:
    """The memory for collectives that begin together, and what each calls when it has succeeded.

    The memory is the users' own where it can be. A tensor is copied if its elements do not lie in memory one after
    another as they are, and a received one also if it shares bytes with another tensor that others read or this rank
    writes; the last collective then fills the users' tensors, in their order.
    """
    for one in asked:
        _check(what, one)
    written = [_span(tensor) for one in asked for tensor in one.received]
    are_copied = iter(_are_shared(written, [span for one in asked for span in _read(one, rank)]))
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def flat(tensor: torch.Tensor, is_copied: bool) -> torch.Tensor:
        own = tensor.detach()
        if own.is_contiguous() and not (is_copied or own.is_neg() or own.is_conj()):
            return own.view(-1)
        copies.append((own, torch.empty(own.shape, dtype=own.dtype, device=own.device).copy_(own)))
        return copies[-1][1].view(-1)

    sent = [[flat(tensor, False) for tensor in one.sent] for one in asked]
    copies.clear()  # those of what is sent
    received = [[flat(tensor, next(are_copied)) for tensor in one.received] for one in asked]
    running = len(asked)

    def end() -> None:
        nonlocal running
        running -= 1
        if not running:
            for own, copy in copies:
                own.copy_(copy)

    return [Tensors(*pair) for pair in zip(received, sent, strict=True)], end if copies else None


def _check(what: str, found: Tensors) -> None:
    """Refuse tensors that do not fit: others' memory is read by their sizes."""
    own = found.any
    for side in found:
        for rank, one in enumerate(side):
            if one.layout is not torch.strided:
                raise PeerError(f"{what}: expected a dense tensor, found {one.layout}; use gloo for it")
            if what != "all_to_all" and (one.numel(), one.dtype) != (own.numel(), own.dtype):
                expected, other = (f"{one.numel()} {str(one.dtype).removeprefix('torch.')}" for one in (own, one))
                raise PeerError(
                    f"{what}: expected parts of {expected}, as this rank's own, found {other} for rank {rank}"
                )
    if any(
        size > 1 and not stride for one in found.received for size, stride in zip(one.shape, one.stride(), strict=True)
    ):
        raise PeerError(
            f"{what}: expected memory for each element that is received, found an expanded tensor; clone it"
        )


def _span(tensor: torch.Tensor) -> Span:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _read(found: Tensors, rank: int) -> list[Span]:
    """Tensors read while this rank writes. No other rank reads this one's own slot, so it may be written in place."""
    spans = [_span(one) for one in found.sent]
    received, sent = (rank if len(side) > 1 else 0 for side in found)
    if found.received and spans and spans[sent] == _span(found.received[received]):
        del spans[sent]
    return spans


def _are_shared(written: Sequence[Span], read: Sequence[Span]) -> list[bool]:
    """For each of the written spans, whether it shares bytes with another, or with one that is read."""
    every = [*written, *read]
    if all(one[1] <= after[0] for one, after in pairwise(sorted(every))):
        return [False] * len(written)
    return [
        any(number != other and start < one[1] and one[0] < end for other, one in enumerate(every))
        for number, (start, end) in enumerate(written)
    ]
