"""Counts the messages of a step, in one way for every engine, ours included.

Over gloo and NCCL torch's dispatcher sees them. It does not see those of a SharedGroup, which tells of each itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zero_runtime.dtypes import short_name
from zero_runtime.ledger import Ledger
from zero_runtime.same_host.group import SharedGroup

FEW = 16  # numbers, such as losses and counts: messages of so many elements are control messages
NAMESPACES = ("c10d", "_c10d_functional")
# The collectives, by the first words of their operators' names; others go by their own.
KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("reduce", "broadcast", "gather", "scatter"),  # after reduce_scatter, which begins like reduce
)
# A rank of a group of n sends so many elements for each of the larger side's, times (n-1)/n, in a ring (see
# zero_runtime/ledger.py).
TIMES = {"all_reduce": 2}
SEND = "send"  # from rank to rank: all of it is sent
# A receive is the send of another rank; the others move no data.
UNSENT = ("recv", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier")


class MessageCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """A context in which the messages of this thread, and of the backwards that it starts, are counted in `ledger`.

    parameters: of the model, by number. Messages of no more elements are control messages, such as a norm of each.
    """

    def __init__(self, parameters: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._few = Ledger(), max(FEW, parameters)

    def __enter__(self) -> Any:
        SharedGroup.observer = self._observe
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        SharedGroup.observer = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A distributed tensor's operation comes again as the messages and local operations that it is made of.
        if any(_divides_itself(one) for one in types):
            return NotImplemented
        if func.namespace in NAMESPACES:
            self._dispatched(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _dispatched(self, name: str, args: tuple[Any, ...]) -> None:
        if name.startswith(UNSENT) or next(_tensors(args), None) is None:
            return
        group = _group(args)
        if isinstance(group, SharedGroup):  # it is told of torch's functional collectives too, and observed then
            return
        ranks = group.size()
        words = name.replace("_", "")  # it is allreduce_ in one namespace, and all_reduce in another
        kind = next((one for one in KINDS if words.startswith(one.replace("_", ""))), name)
        sides = [list(_tensors(side)) for side in args[:2]]
        if kind == "all_gather" and not sides[1]:  # as torch's functional collectives are called: the input alone
            sides[0] *= ranks
        self._count(kind, sides, ranks, of_objects=name == "allgather_")

    def _observe(self, what: str, received: Any, sent: Any, ranks: int) -> None:
        sides = [list(_tensors(side)) for side in (received, sent)]
        self._count(what, sides, ranks, of_objects=what == "all_gather" and isinstance(received, list))

    def _count(self, kind: str, sides: Sequence[Sequence[torch.Tensor]], ranks: int, *, of_objects: bool) -> None:
        """sides: what this rank receives and sends. of_objects: whether torch gathers pickled objects in this way."""
        larger, dtype = max(sum(one.numel() for one in side) for side in sides), next(chain(*sides)).dtype
        sent = larger if kind == SEND else TIMES.get(kind, 1) * (ranks - 1) * larger // ranks
        # Objects are gathered as bytes in lists of tensors, as no engine sends its weights or gradients.
        if larger <= self._few or (of_objects and dtype == torch.uint8):
            self.ledger.control.add(sent, dtype.itemsize)
        else:
            self.ledger.record(kind, "", sent, dtype)


def messages(ledger: Ledger) -> dict[str, dict[str, dict[str, int]]]:
    """The counted volumes by kind and dtype."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (kind, _, dtype), volume in ledger.sent.items():
        found.setdefault(kind, {})[short_name(dtype)] = asdict(volume)
    return found


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


def _group(args: tuple[Any, ...]) -> Any:
    """The group of an operator: the first object among its arguments. torch's functional collectives name it instead;
    here only norms of distributed tensors use them, over all ranks."""
    group = next((one for one in args if isinstance(one, torch.ScriptObject)), None)
    return dist.group.WORLD if group is None else dist.ProcessGroup.unbox(group)


def _divides_itself(kind: type) -> bool:
    """Whether it is torch's DTensor, which is not imported before an engine does."""
    return hasattr(kind, "redistribute")
