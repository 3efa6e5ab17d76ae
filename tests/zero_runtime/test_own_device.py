"""A rank takes one of the GPUs that it sees, and no GPU serves two ranks of one world."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from zero_runtime.errors import PlanError
from zero_runtime.own_device import claim_device, device_index

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("local_rank", "count", "index"),
    [(0, 1, 0), (3, 1, 0), (0, 8, 0), (3, 8, 3), (7, 8, 7)],
    ids=["one", "a-gpu-for-each-task", "first", "fourth", "last"],
)
def test_a_rank_takes_the_only_gpu_or_the_one_of_its_local_rank(local_rank: int, count: int, index: int) -> None:
    assert device_index(local_rank, count) == index


def test_a_rank_without_a_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="found none that it can see; look at CUDA_VISIBLE_DEVICES"):
        device_index(0, 0)
    with pytest.raises(PlanError, match="LOCAL_RANK=8: expected a GPU for every rank, found 8; start fewer ranks"):
        device_index(8, 8)


def seeing(monkeypatch: pytest.MonkeyPatch, uuid: str, name: str = "NVIDIA H100 80GB HBM3") -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name, uuid=uuid))


def test_a_gpu_that_another_rank_uses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank, uuid in enumerate("ab"):
        seeing(monkeypatch, uuid)
        claim_device(store, rank, 3, GPU)
        claim_device(store, rank, 3, GPU)  # a second world in the same processes
    with pytest.raises(
        PlanError, match=r"rank 2: expected a GPU that no other rank uses, found .* b, which rank 1 uses"
    ):
        claim_device(store, 2, 3, GPU)


def test_ranks_on_parts_of_a_gpu_are_refused_and_a_single_rank_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seeing(monkeypatch, "a", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    with pytest.raises(PlanError, match=r"an entire GPU for each of 2 ranks, found .*MIG 1g.5gb, a part of one"):
        claim_device(dist.HashStore(), 0, 2, GPU)
    claim_device(dist.HashStore(), 0, 1, GPU)


def test_ranks_on_cpus_claim_nothing() -> None:
    store = dist.HashStore()
    claim_device(store, 0, 2, torch.device("cpu"))
    assert store.num_keys() == 0
