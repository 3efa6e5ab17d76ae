"""Checks that the ranks of a tensor- or sequence-parallel group are given the same batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from zero_runtime.errors import PlanError

_MIX, _BITS = 1_000_003, 31  # a multiplier, and the bits of a fingerprint: sums of 2**20 of them are exact in fp64


class GroupBatch:
    """A fingerprint of what this rank of a group was given since the last step.

    setting: the key of the group's size, such as `parallel.tp`. rank, degree: this rank's place among the consecutive
    ranks of its group, and their number.
    """

    def __init__(self, setting: str, rank: int, degree: int) -> None:
        self._setting, self._rank, self._degree = setting, rank, degree
        self._seen: torch.Tensor | None = None
        self._fingerprint: torch.Tensor | None = None

    def note(self, values: torch.Tensor) -> None:
        """Add token ids, labels or other inputs of a training forward to the fingerprint. Does not wait for the device.

        Of floating-point numbers the bits count.
        """
        if not torch.is_grad_enabled() or isinstance(values, FakeTensor) or values.is_meta:
            return
        flat = values.detach().reshape(-1)
        flat = (flat.contiguous().view(torch.uint8) if flat.is_floating_point() else flat).to(torch.int64)
        places = torch.arange(1, 2 * flat.numel(), 2, device=flat.device)  # places change the sum
        found = ((flat + _MIX) * places * _MIX).sum()  # wraps around, on every device in the same way
        self._seen = found if self._seen is None else self._seen * _MIX + found

    def note_all(self, given: object) -> None:
        """Note every tensor in lists, tuples and dicts."""
        for value in tree_leaves(given):
            if isinstance(value, torch.Tensor):
                self.note(value)

    def check_group(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Raise PlanError on every rank of this group unless they noted the same since the last call of `difference`.

        gather: the tensors of the group's ranks. False, without a message, if nothing was noted.
        """
        if self._seen is None:
            return False
        if len(set(gather(self._seen.reshape(1)).flatten().tolist())) > 1:
            self._refuse("different inputs of the model")
        return True

    def difference(self, device: torch.device) -> torch.Tensor:
        """This rank's term, 0-dim fp64, of a sum over all ranks that is zero if the ranks of each group noted the same
        since the last call."""
        seen, self._seen = self._seen, None  # the fingerprint is an integer below 2**31, equal where the same was noted
        bits = torch.zeros((), device=device) if seen is None else (seen ^ (seen >> 32)) & (2**_BITS - 1)
        self._fingerprint = bits.to(torch.float64)
        return self._fingerprint * (self._degree - 1) if self._rank == 0 else -self._fingerprint

    def check(self, difference: float, gather_objects: Callable[[Any], list[Any]]) -> None:
        """Raise PlanError on every rank unless `difference`, summed over all ranks, is zero; then a collective.

        A no-op in a dry run, which has no values.
        """
        if difference == 0 or isinstance(self._fingerprint, FakeTensor):
            return
        assert self._fingerprint is not None, "`difference` comes first"
        found: list[float] = gather_objects(float(self._fingerprint))
        degree = self._degree
        groups = [range(start, start + degree) for start in range(0, len(found), degree)]
        wrong = [list(group) for group in groups if len({found[rank] for rank in group}) > 1]
        self._refuse(f"different tokens or labels on ranks {' and '.join(map(str, wrong))}")

    def _refuse(self, found: str) -> NoReturn:
        degree = self._degree
        raise PlanError(
            f"{self._setting}={degree}: expected the {degree} ranks of each group to be given the same batch, found "
            f"{found}; slice the data by rank // {degree} of world // {degree}, as runtime.collectives.batch_rank and "
            "batch_world count"
        )
