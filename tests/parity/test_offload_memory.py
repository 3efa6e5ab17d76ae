"""A model whose states do not fit into memory trains with them in a scratch file, with the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import resource, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from zero_runtime.initial_values import parameters_on_meta
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.offload_plan import ScratchSettings
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

WIDTH, BLOCKS = 1024, 16
folder, how, limited = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "limited"
NVME = OffloadPlan(Tier.NVME, Tier.NVME, scratch=ScratchSettings(folder, requests=2))

class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

def train(blocks, offload, steps):
    with parameters_on_meta():
        model = Net(blocks)
    runtime = ZeroRuntime(
        model, ZeroPlan.from_stage(3), MixedPrecision(param="bf16", reduce="fp32", master="fp32", compute="fp32"),
        AdamWConfig(), RuntimeSettings(clip_norm=1.0, offload=offload), torch.device("cpu"),
    )
    losses = []
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    for _ in range(steps):
        runtime.backward((runtime(x) - x).square().mean())
        losses.append(runtime.step(1e-3).loss)
    runtime.close()
    return losses

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train(2, NVME, 1)  # what the libraries allocate once is allocated
states = BLOCKS * WIDTH * WIDTH * (2 + 4 + 12)
(used,) = (int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
if limited:
    allowed = int(0.6 * states)
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, used + allowed))
print(train(BLOCKS, NVME if how == "nvme" else OffloadPlan(), 3))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's size from /proc")
def test_a_model_larger_than_the_allowed_memory_trains_only_with_offload(tmp_path: Path) -> None:
    """16.8 M parameters, 18 bytes each. RLIMIT_DATA bounds all private writable pages, thread stacks included, to
    60 % of that above the process's size at the start. Without offload (`none`) the limited process dies, and the
    unlimited one has the same losses."""
    runs = [("nvme", "limited"), ("none", "free"), ("none", "limited")]
    resting, free, dead = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), how, limit],
            cwd=REPOSITORY,
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        for how, limit in runs
    )
    assert resting.returncode == 0, resting.stderr
    assert free.returncode == 0, free.stderr
    assert resting.stdout == free.stdout
    assert len(eval(free.stdout)) == 3
    assert dead.returncode != 0
    assert "allocate memory" in dead.stderr, dead.stderr
