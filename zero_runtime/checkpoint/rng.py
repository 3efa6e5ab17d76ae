"""Converts a rank's random states (torch's for CPU and device, numpy's, Python's) to plain JSON values and back."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def random_states(device: torch.device) -> dict[str, Any]:
    """The current states; long ones are base64 of little-endian bytes."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "device": _text(torch.cuda.get_rng_state(device).numpy().tobytes()) if device.type == "cuda" else None,
        "numpy": {
            "kind": kind,
            "keys": _text(np.asarray(keys, "<u4").tobytes()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "python": {"version": version, "words": _text(np.asarray(words, "<u4").tobytes()), "gauss": gauss},
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore `states`. The device's state is not changed if either run has no CUDA device."""
    torch.set_rng_state(_tensor(states["torch"]))
    if device.type == "cuda" and states["device"] is not None:
        torch.cuda.set_rng_state(_tensor(states["device"]), device)
    found = states["numpy"]
    keys = np.frombuffer(base64.b64decode(found["keys"]), "<u4")
    np.random.set_state((found["kind"], keys, found["position"], found["has_gauss"], found["cached"]))
    python = states["python"]
    words = np.frombuffer(base64.b64decode(python["words"]), "<u4")
    random.setstate((python["version"], tuple(int(word) for word in words), python["gauss"]))
