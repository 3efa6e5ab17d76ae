"""Collectives over gloo that read their inputs at the latest or the earliest moment that NCCL may, with real numbers.

NCCL reads the input of a collective at some moment between its issue and its `wait`, and writes the output there too. A
program that writes the input, or reads or writes the output, between the two is wrong, yet gloo's messages may hide it.
Until `wait`, the output holds noise here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_runtime import collectives
from zero_runtime.gloo import Messages


def noise_(tensor: torch.Tensor) -> None:
    """Overwrite `tensor` with values that no result survives."""
    with torch.no_grad():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 85)


def noise_around_(full: torch.Tensor, kept: torch.Tensor) -> None:
    """Overwrite `full` [P] except the memory of `kept`, a contiguous part of it or a separate tensor."""
    start = (kept.data_ptr() - full.data_ptr()) // full.element_size()
    if not 0 <= start < full.numel():
        noise_(full)
        return
    noise_(full[:start])
    noise_(full[start + kept.numel() :])


def _is_part(shard: torch.Tensor, full: torch.Tensor) -> bool:
    return 0 <= shard.data_ptr() - full.data_ptr() < full.numel() * full.element_size()


class LateMessages(Messages):
    """Inputs are read in `wait`, so every rank must wait for the collectives of all groups in one order."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, place: int = 0) -> Callable[[], None]:
        noise_around_(full, shard)
        return lambda: super(LateMessages, self).all_gather(full, shard, place)()

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Callable[[], None]:
        if not _is_part(shard, full):
            noise_(shard)

        def wait() -> None:
            super(LateMessages, self).reduce_scatter(shard, full)()
            noise_around_(full, shard)  # what a sum leaves in the rest of its input is not defined

        return wait


class EarlyMessages(Messages):
    """Inputs are read at the issue; the output is written in `wait` and holds noise until then."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, place: int = 0) -> Callable[[], None]:
        result, read = torch.empty_like(full), shard.clone()
        deliver = super().all_gather(result, read, place)
        noise_around_(full, shard)

        def wait() -> None:
            deliver()
            with torch.no_grad():
                full.copy_(result)

        return wait

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Callable[[], None]:
        result, read = torch.empty_like(shard), full.clone()
        deliver = super().reduce_scatter(result, read)
        noise_(shard)

        def wait() -> None:
            deliver()
            with torch.no_grad():
                shard.copy_(result)
            noise_around_(full, shard)

        return wait


FORMS = {"late": LateMessages, "early": EarlyMessages}


def use(form: str) -> None:
    """Let the runtimes of this process that are built from now on communicate in this form."""
    collectives.messages_over = FORMS[form]
