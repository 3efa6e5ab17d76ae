"""On a GPU, offloading activations to the host changes no bits and leaves less memory in use after a forward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness.shapes import Base, ids_of

from zero_runtime.activations.recompute import Recomputation, RecomputeRule

pytestmark = pytest.mark.gpu
BUSY_CYCLES = 1_000_000_000  # at 2 GHz half a second; the host issues the forward in some milliseconds


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's backward of an embedding adds with atomics otherwise, in another order in each run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch then asks for
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def active_bytes() -> int:
    """Bytes of blocks in use, and of freed blocks that wait for an event."""
    return int(torch.cuda.memory_stats()["active_bytes.all.current"])


def gradients(rule: RecomputeRule) -> tuple[list[torch.Tensor], int]:
    """Gradients summed over two steps, and the bytes that the second forward left on the device.

    They are read while the device is still busy with work from before the forward: blocks that can be used again only
    after the host has seen an event then count as taken. So they show whether memory is bounded by the order of the
    program or by the speed of the device.
    """
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = Base(blocks=8).to(device)
    recomputation = Recomputation(model, rule, device)
    left = 0
    for step in range(2):
        ids = ids_of(step, 0).repeat(64, 64).to(device)
        torch.cuda.synchronize()
        before = active_bytes()
        torch.cuda._sleep(BUSY_CYCLES)
        loss = model.loss_of(model(ids))
        left = active_bytes() - before
        loss.backward()
    found = [param.grad.clone() for param in model.parameters()]
    torch.cuda.synchronize()
    recomputation.remove()
    return found, left


@pytest.mark.parametrize("kind", ["none", "full", "every_nth", "by_operation"], ids=lambda kind: f"kind-{kind}")
def test_offloaded_activations_give_the_same_bits_and_use_less_device_memory(kind: str) -> None:
    wanted, kept = gradients(RecomputeRule(kind))
    found, left = gradients(RecomputeRule(kind, offload="cpu"))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert left < kept
