"""Counts the messages of a step where torch's dispatcher sees them: in one way for every engine, ours included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zero_runtime.dtypes import short_name
from zero_runtime.ledger import Ledger

FEW = 16  # numbers, such as losses and counts: messages of so many elements are control messages
NAMESPACES = ("c10d", "_c10d_functional")
# The collectives by the first words of their operators' names; others go by their own. A rank of a group of n sends so
# many elements for each of the larger side's, times (n-1)/n, in a ring (see zero_runtime/ledger.py).
KINDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "reduce": 1, "broadcast": 1, "all_to_all": 1}
SEND = "send"  # from rank to rank: all of it is sent
UNSENT = ("recv", "wait_tensor", "barrier", "monitored_barrier")  # a receive is the send of another rank


class MessageCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """A context in which the messages of this thread, and of the backwards that it starts, are counted in `ledger`.

    parameters: of the model, by number. Messages of no more elements are control messages, such as a norm of each.
    """

    def __init__(self, parameters: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._few = Ledger(), max(FEW, parameters)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A distributed tensor's operation comes again as the messages and local operations that it is made of.
        if any(_divides_itself(one) for one in types):
            return NotImplemented
        if func.namespace in NAMESPACES:
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        tensors = list(_tensors(args))
        if not tensors or name.startswith(UNSENT):
            return
        # c10d joins some words: allreduce_, _allgather_base_, alltoall_.
        words = re.sub("^_?all(?=reduce|gather)", "all_", name).replace("alltoall", "all_to_all").lstrip("_")
        kind = max((kind for kind in KINDS if words.startswith(kind)), key=len, default=name)
        ranks = _ranks(args)
        larger, dtype = _larger(kind, args, ranks), tensors[0].dtype
        sent = larger if name == SEND else KINDS.get(kind, 1) * (ranks - 1) * larger // ranks
        # Objects are gathered as bytes in lists of tensors, as no engine sends its weights or gradients.
        if larger <= self._few or (name == "allgather_" and dtype == torch.uint8):
            self.ledger.control.add(sent, dtype.itemsize)
        else:
            self.ledger.record(kind, "", sent, dtype)


def messages(ledger: Ledger) -> dict[str, dict[str, dict[str, int]]]:
    """The counted volumes by kind and dtype."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (kind, _, dtype), volume in ledger.sent.items():
        found.setdefault(kind, {})[short_name(dtype)] = asdict(volume)
    return found


def _larger(kind: str, args: tuple[Any, ...], ranks: int) -> int:
    """The elements of the larger side of a collective: of what is gathered, or of what is scattered."""
    sides = [sum(one.numel() for one in _tensors(side)) for side in args[:2]]
    is_input_alone = kind == "all_gather" and not sides[1]  # as torch's functional collectives are called
    return sides[0] * ranks if is_input_alone else max(sides)


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


def _ranks(args: tuple[Any, ...]) -> int:
    """The ranks of the group: the first object among an operator's arguments. torch's functional collectives name it
    instead; here only norms of distributed tensors use them, over all ranks."""
    group = next((one for one in args if isinstance(one, torch.ScriptObject)), None)
    return dist.get_world_size() if group is None else int(dist.ProcessGroup.unbox(group).size())


def _divides_itself(kind: type) -> bool:
    """Whether it is torch's DTensor, which is not imported before an engine does."""
    return hasattr(kind, "redistribute")
