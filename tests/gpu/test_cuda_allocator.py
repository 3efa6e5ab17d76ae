"""On a GPU, the model of the caching allocator reserves what torch reserves, and has each block where torch has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.allocator_comparison import Blocks, first_difference
from harness.patience import HANG_S

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
EVENTS = 4000
SEEDS = range(3)


class TorchAllocator:
    """torch's allocator of one GPU, with allocations that are no tensors."""

    def __init__(self) -> None:
        self.addresses: dict[int, int] = {}

    def allocate(self, key: int, nbytes: int) -> None:
        self.addresses[key] = torch.cuda.caching_allocator_alloc(nbytes)

    def free(self, key: int) -> None:
        torch.cuda.caching_allocator_delete(self.addresses.pop(key))

    def totals(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def segments(self) -> list[Blocks]:
        return [
            tuple((block["size"], block["state"] == "active_allocated") for block in one["blocks"])
            for one in torch.cuda.memory_snapshot()
        ]


def test_the_model_of_the_caching_allocator_reserves_what_torch_reserves() -> None:
    """In processes of their own: the setting is read at torch's start, nothing else may allocate, and the cache is
    empty at first."""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), variables.get("PYTHONPATH", "")])
    for seed in SEEDS:
        words = [sys.executable, __file__, str(seed)]
        done = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr


def main(seed: int) -> int:
    """0: no difference; 1: the first one is printed."""
    difference = first_difference(TorchAllocator(), seed, EVENTS)
    if difference is not None:
        print(f"seed {seed}, torch {torch.__version__}: {difference}")
    return int(difference is not None)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
