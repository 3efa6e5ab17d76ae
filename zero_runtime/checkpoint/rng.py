"""The states of a process's random generators as plain data, and back."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """torch's on the CPU and, on CUDA, on the device; numpy's and Python's."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, next_gauss = random.getstate()
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(words), next_gauss],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from `rng_state`; a CUDA generator only where both have one."""
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words), next_gauss))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
