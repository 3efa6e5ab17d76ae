"""The loader that initialize makes for training_data: this rank's micro-batches, in another order in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zero_runtime.deepspeed.config import DropinConfig
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


def training_loader(data: Dataset[Any], collate_fn: Callable[..., Any] | None, config: DropinConfig) -> TrainingLoader:
    """The loader of this rank's micro-batches, which the ranks of a tensor-parallel group share; an iterable data set
    keeps its own order."""
    sampler, degree = None, config.degrees.tensor
    if not isinstance(data, IterableDataset):
        sampler = EpochSampler(data, world_size() // degree, own_rank() // degree)
    return TrainingLoader(
        data, batch_size=config.batch.micro, sampler=sampler, collate_fn=collate_fn, drop_last=config.drop_last
    )
