"""DeepSpeed's OnDevice: building a model on a device and in a dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch


class OnDevice(AbstractContextManager["OnDevice"]):
    """New tensors inside are on `device`, floating-point ones in `dtype` unless their constructor names another.

    On the meta device buffers have no values either; zero.Init builds a model that keeps them.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            self._stack.enter_context(torch.device(self.device))
            torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
