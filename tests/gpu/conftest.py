"""A fixture that joins a world of one rank on one GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zero_runtime.world import join_world, leave_world


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    cuda = torch.device("cuda", 0)
    torch.cuda.set_device(cuda)
    with join_world(f"file://{tmp_path_factory.mktemp('world')}/rendezvous", 0, 1, cuda):
        yield cuda
    leave_world()
