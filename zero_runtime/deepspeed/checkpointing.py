"""DeepSpeed's `checkpointing`: recomputation of activations, by torch.utils.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_runtime.deepspeed.absent import missing

__all__ = ["checkpoint", "configure", "is_configured", "reset"]


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`; its activations are computed again in backward instead of kept."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def configure(mpu_: Any = None, deepspeed_config: Any = None, **switches: Any) -> None:
    """Accepted as DeepSpeed's. A warning names the switches that are on: none of them has an effect."""
    on = [name for name, value in switches.items() if value]
    if on:
        warnings.warn(f"zero_runtime.checkpointing.configure: without effect here: {', '.join(on)}", stacklevel=2)


def is_configured() -> bool:
    """Always True: nothing needs to be configured."""
    return True


def reset() -> None:
    """Does nothing: no state is kept between calls."""


def __getattr__(name: str) -> NoReturn:
    raise missing(__name__, name)
