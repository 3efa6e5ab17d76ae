"""Ranks that issue different collectives, or tensors that do not fit: every rank that waits says what both issued, at
once, and nobody gets wrong numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks

from zero_runtime.errors import PeerError
from zero_runtime.gloo import messages_over

# torch 2.13 renamed these two; 2.12 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LIMIT = timedelta(seconds=120)  # of the groups here: an error that comes long before it was not caused by it
SOON_S = 60.0  # what a busy machine may need for an error that is issued at once

Issue = Callable[[torch.Tensor], object]


def _of_messages(place: int) -> Issue:
    def gather(tensor: torch.Tensor) -> None:
        full = torch.empty(tensor.numel() * dist.get_world_size(), dtype=tensor.dtype)
        messages_over(dist.group.WORLD).all_gather(full, tensor, place)()

    return gather


def _gather(tensor: torch.Tensor) -> None:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.gather(tensor, parts if dist.get_rank() == 0 else None, dst=0)


def _scatter(tensor: torch.Tensor) -> None:
    parts = [tensor] * dist.get_world_size()
    dist.scatter(torch.empty_like(tensor), parts if dist.get_rank() == 0 else None, src=0)


def _all_to_all(tensor: torch.Tensor) -> None:
    world = dist.get_world_size()
    dist.all_to_all([torch.empty_like(tensor) for _ in range(world)], [tensor] * world)


KINDS: dict[str, Issue] = {
    "all_reduce": dist.all_reduce,
    "all_gather": lambda one: dist.all_gather([torch.empty_like(one) for _ in range(dist.get_world_size())], one),
    "reduce_scatter": lambda one: dist.reduce_scatter(torch.empty_like(one), [one] * dist.get_world_size()),
    "all_to_all": _all_to_all,
    "broadcast": lambda one: dist.broadcast(one, 0),
    "reduce": lambda one: dist.reduce(one, 0),
    "gather": _gather,
    "scatter": _scatter,
    "barrier": lambda one: dist.barrier(),
}
USUAL, LONGER, OTHER = torch.ones(8), torch.ones(9), torch.ones(8, dtype=torch.int32)


def _issued(issue: Issue, tensor: torch.Tensor, in_world_of: list[int]) -> str:
    """The error of a collective in a new world, whose first it is; "" if there was none, and "late" after the limit."""
    group = dist.new_group(in_world_of, timeout=LIMIT)
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    begun = time.monotonic()
    try:
        issue(tensor.clone())
    except PeerError as error:
        return str(error) if time.monotonic() - begun < SOON_S else "late"
    finally:
        dist.distributed_c10d._update_default_pg(before)
    return ""


def _every_pair() -> list[str]:
    """Two kinds of which the last rank issues the second, and the others the first: what went wrong."""
    world, wrong = dist.get_world_size(), []
    is_other = dist.get_rank() == world - 1
    cases = [
        *((f"{a}, {b}", KINDS[b if is_other else a], USUAL, (a, b)) for a in KINDS for b in KINDS if a != b),
        *((f"{a}: size", KINDS[a], LONGER if is_other else USUAL, ("8", "9")) for a in _SIZED),
        *((f"{a}: dtype", KINDS[a], OTHER if is_other else USUAL, ("float32", "int32")) for a in _SIZED),
        ("unit", _of_messages(7 if is_other else 6), USUAL, ("units", "6", "7")),
        ("root", lambda one: dist.broadcast(one, world - 1 if is_other else 0), USUAL, ("roots", "0", str(world - 1))),
        ("root", lambda one: dist.reduce(one, world - 1 if is_other else 0), USUAL, ("roots", "0", str(world - 1))),
    ]
    for name, issue, tensor, words in cases:
        text = _issued(issue, tensor, list(range(world)))
        # Of a collective with a root a third rank needs the root alone, and may have what it needs.
        excused = text == "" and 0 < dist.get_rank() < world - 1
        if not excused and not all(word in text for word in words):
            wrong.append(f"rank {dist.get_rank()}, {name}: {text!r}")
    return wrong


_SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter")


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_issue_different_collectives_name_both(world: int) -> None:
    assert run_ranks(_every_pair, world) == [[]] * world


def _unequal_parts() -> list[str]:
    """Errors of tensors that do not fit on this rank, or to what the other sends."""
    rank = dist.get_rank()
    three, four, ints = torch.ones(3), torch.ones(4), torch.ones(3, dtype=torch.int32)

    def parts(to_other: torch.Tensor) -> None:
        others = [three.clone(), three.clone()]
        sent = [to_other, three] if rank == 1 else [three, three]
        dist.all_to_all(others, sent)

    def message(sent: torch.Tensor) -> None:
        if rank == 0:
            dist.send(sent, group_dst=1)
        else:
            dist.recv(three.clone(), group_src=0)

    cases: list[Issue] = [
        lambda one: parts(four),
        lambda one: message(four),
        lambda one: message(ints),
        lambda one: dist.all_gather([three.clone(), four.clone()], one),
        lambda one: all_gather_single(torch.empty(7), one),
        lambda one: all_gather_single(torch.empty(6, dtype=torch.bfloat16), one),
        lambda one: reduce_scatter_single(torch.empty(4), torch.empty(6)),
    ]
    return [_issued(issue, three, [0, 1]) for issue in cases]


def test_tensors_that_do_not_fit_are_refused_on_both_ranks() -> None:
    expected = (
        ("failed in all_to_all", "12 bytes from rank 1, which sends 16"),
        ("message of 4 float32", "message of 3 float32"),
        ("message of 3 int32", "message of 3 float32"),
        ("3 float32", "4 float32"),
        ("divisible by 2", "found 7"),
        ("3 float32", "3 bfloat16"),
        ("4 float32", "3 float32"),
    )
    of_0, of_1 = run_ranks(_unequal_parts, 2)
    for words, *texts in zip(expected, of_0, of_1, strict=True):
        assert all(any(word in text for text in texts) for word in words), (words, texts)
        assert all(texts), (words, texts)
