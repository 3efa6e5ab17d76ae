"""Runs everything that needs a GPU, in one command for a borrowed machine: the GPU tests, then benchmarks on CUDA.

Needs only torch, numpy, safetensors and pytest. Writes results, with date and versions, to benchmarks/results/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    if not torch.cuda.is_available():
        print("make gpu: expected a CUDA device, found none; nothing was run", file=sys.stderr)
        return 2
    stages = [sys.executable, "benchmarks/stages.py", "--precision"]
    large = ["--layers", "24", "--width", "1024", "--heads", "16", "--vocab", "50304", "--seq", "1024", "--micro", "8"]
    commands = [
        [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu"],
        [sys.executable, "benchmarks/kernels_gpu.py"],
        [*stages, "bf16", *large],
        [*stages, "fp32", *large],
        [sys.executable, "benchmarks/host_offload.py"],
    ]
    return max(subprocess.run(command, cwd=ROOT).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
