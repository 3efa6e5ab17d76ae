"""Prints the GPUs of this machine and the versions beneath them, after a multiplication on each GPU.

`python benchmarks/gpu_facts.py`; exit code 1 if a product is wrong or two devices are one GPU, 2 without a GPU.
"""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

import torch


def facts() -> dict[str, Any]:
    """Versions, and the name, memory in bytes and identity of each GPU."""
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpus": [{"name": one.name, "bytes": one.total_memory, "uuid": str(one.uuid)} for one in devices],
    }


def main() -> int:
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none; nothing was run", file=sys.stderr)
        return 2
    found = facts()
    print(json.dumps(found))
    for index in range(len(found["gpus"])):
        ones = torch.ones(256, 256, device=torch.device("cuda", index))
        if not torch.equal((ones @ ones).cpu(), torch.full((256, 256), 256.0)):
            print(f"cuda:{index}: the product of two matrices of ones is wrong", file=sys.stderr)
            return 1
    return 0 if len({one["uuid"] for one in found["gpus"]}) == len(found["gpus"]) else 1


if __name__ == "__main__":
    sys.exit(main())
