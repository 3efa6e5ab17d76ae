"""On a GPU, the model of the caching allocator reserves what torch reserves, and has each block where torch has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.allocator_comparison import Segments, first_difference
from harness.patience import HANG_S

from zero_runtime.predict.memory.caching_allocator import MIB, AllocatorSettings

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
EVENTS = 4000
SEEDS = range(3)
LIMIT = 301 * MIB  # less than the sequences need; between two multiples of a segment's 2 MiB, so that rounding is safe
# PYTORCH_CUDA_ALLOC_CONF, the same for the model, and whether the process gets no more than LIMIT: torch compares that
# limit with the size of a segment also where it would map fewer pages, which the model does not.
CASES = {
    "plain": ("", AllocatorSettings(), None),
    "limited": ("", AllocatorSettings(), LIMIT),
    "expandable": ("expandable_segments:True", AllocatorSettings(expandable=True), None),
    "max_split": ("max_split_size_mb:24", AllocatorSettings(max_split=24 * MIB), LIMIT),
    "rounded": ("roundup_power2_divisions:4", AllocatorSettings(roundup_divisions=4), None),
}


class TorchAllocator:
    """torch's allocator of one GPU, with allocations that are no tensors."""

    def __init__(self) -> None:
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
        self.addresses: dict[int, int] = {}

    def allocate(self, key: int, nbytes: int, stream: int) -> int | None:
        try:
            address: int = torch.cuda.caching_allocator_alloc(nbytes, stream=self.streams[stream])
        except torch.OutOfMemoryError:
            return None
        self.addresses[key] = address
        return address

    def free(self, key: int) -> None:
        torch.cuda.caching_allocator_delete(self.addresses.pop(key))

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def totals(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def segments(self) -> Segments:
        numbers = {stream.cuda_stream: number for number, stream in enumerate(self.streams)}
        return [
            (
                one["address"],
                numbers[one["stream"]],
                tuple((block["size"], block["state"] == "active_allocated") for block in one["blocks"]),
            )
            for one in sorted(torch.cuda.memory_snapshot(), key=lambda one: int(one["address"]))
        ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case)
def test_the_model_of_the_caching_allocator_reserves_what_torch_reserves(case: str) -> None:
    """In a process of its own: the setting is read at torch's start, and nothing else may allocate."""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    if CASES[case][0]:
        variables["PYTORCH_CUDA_ALLOC_CONF"] = CASES[case][0]
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), variables.get("PYTHONPATH", "")])
    words = [sys.executable, __file__, case]
    done = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr


def main(case: str) -> int:
    """0: no difference; 1: the first one is printed."""
    _, settings, limit = CASES[case]
    if limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
    for seed in SEEDS:
        device = TorchAllocator()
        difference = first_difference(device, settings, limit, seed, EVENTS)
        if difference is not None:
            print(f"{case}, seed {seed}, torch {torch.__version__}: {difference}")
            return 1
        for key in list(device.addresses):
            device.free(key)
        device.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
