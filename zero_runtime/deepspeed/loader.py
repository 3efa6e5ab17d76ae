"""The loader that initialize makes for training_data: this rank's micro-batches, in another order in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zero_runtime.world import own_rank, world_size


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that calls set_epoch itself: each iteration has the order of the next epoch.

    After a resume, set_epoch(n) begins at epoch n, as for any DistributedSampler.
    """

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


class TrainingLoader(DataLoader[Any]):
    """A DataLoader whose sampler also has the name that it has in DeepSpeed's."""

    @property
    def data_sampler(self) -> Any:
        """The sampler, for its set_epoch."""
        return self.sampler


def training_loader(
    data: Dataset[Any], collate_fn: Callable[..., Any] | None, micro_batch: int, *, drop_last: bool
) -> TrainingLoader:
    """The loader of this rank's samples; an iterable data set keeps its own order."""
    sampler = None if isinstance(data, IterableDataset) else EpochSampler(data, world_size(), own_rank())
    return TrainingLoader(data, batch_size=micro_batch, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last)
