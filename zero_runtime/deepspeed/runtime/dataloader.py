"""DeepSpeed's `runtime.dataloader`: a loader that begins again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class RepeatingLoader:
    """An iterator over the batches of `loader` that never ends: after the last batch it begins again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
