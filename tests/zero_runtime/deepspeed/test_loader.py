"""The loader of training_data has another order in each epoch, that of torch's DistributedSampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from harness.seed_loop import initialize_quietly
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset

CONFIG = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0}


def loader_of(data: Any, **more: Any) -> Any:
    engine, _, loader, _ = initialize_quietly(model=nn.Linear(1, 1), config=CONFIG | more, training_data=data)
    engine.destroy()
    return loader


def epochs() -> None:
    """DeepSpeed 0.19.8 has the order of epoch 0 in each, because nothing calls set_epoch for the script."""
    data = torch.arange(17)
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, dist.get_rank())
    expected = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        expected.append(data[list(sampler)].tolist())
    assert len({tuple(order) for order in expected}) == 4
    loader = loader_of(data)
    assert [torch.cat(list(loader)).tolist() for _ in range(3)] == expected[:3]
    resumed = loader_of(data, dataloader_drop_last=True)
    assert len(resumed) == 3
    resumed.data_sampler.set_epoch(2)
    assert [torch.cat(list(resumed)).tolist() for _ in range(2)] == [order[:9] for order in expected[2:]]
    for epoch in (1, 0, 1):  # a script that says the epoch itself
        loader.data_sampler.set_epoch(epoch)
        assert torch.cat(list(loader)).tolist() == expected[epoch]
    stream = loader_of(Stream())
    assert [torch.cat(list(stream)).tolist() for _ in range(2)] == [[0, 1, 2, 3]] * 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_each_epoch_has_an_order_of_its_own_that_is_the_same_in_each_run() -> None:
    run_ranks(epochs, 2)
