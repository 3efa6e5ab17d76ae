"""Batches reach a GPU without making the host wait, and on a CPU they are the arrays themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.worker.micro_batches import MicroBatches
from orchestrator.workloads.data import IGNORED_LABEL


def batches_on(device: str, **parts: Any) -> MicroBatches:
    batches = object.__new__(MicroBatches)
    batches._runtime = SimpleNamespace(device=torch.device(device), **parts)  # type: ignore[assignment]
    return batches


def test_on_a_gpu_batches_are_copied_from_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(("pin_memory", tensor.tolist()))
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        asked.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batches_on("cuda").on_device(np.array([[1, 2]]))
    assert asked == [("pin_memory", [[1, 2]]), ("cuda", True)]


def test_on_a_cpu_a_batch_is_not_copied() -> None:
    array = np.array([[1, 2]])
    assert batches_on("cpu").on_device(array).data_ptr() == array.ctypes.data


@pytest.mark.parametrize(("degree", "rank", "count"), [(1, 0, 3), (2, 0, 1), (2, 1, 2)])
def test_tokens_with_a_label_are_counted_from_this_ranks_part_of_the_hosts_array(
    degree: int, rank: int, count: int
) -> None:
    batches = batches_on("cpu", sequence=SimpleNamespace(degree=degree, rank=rank))
    row = [1, IGNORED_LABEL, 2, 3]
    assert batches.count(np.array([row, [IGNORED_LABEL] * 4])) == count
