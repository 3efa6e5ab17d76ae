"""Makes a rank's GPU the current one.

CUDA has one current device per thread, GPU 0 at first. Triton launches its kernels there, whatever device their tensors
are on, and every call without a device takes memory there.
"""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> torch.device:
    """Make a GPU the current device of the calling thread; "cuda" without an index is the one that is current already.

    Returns the device with its index. Any other device is returned unchanged.
    """
    if device.type != "cuda":
        return device
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device
