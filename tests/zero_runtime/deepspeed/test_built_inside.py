"""zero.Init gives a model the values of plain PyTorch, and GatheredParameters changes them or says that it does not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import full_values, initialize_quietly, unequal
from torch import nn
from zero_runtime.zero import GatheredParameters, Init, ZeroParamStatus

from zero_runtime.errors import ParameterReadError, PlanError
from zero_runtime.recorded_values import RecordedTensor

WIDTH = 6
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}


def at_level(number: int) -> dict[str, Any]:
    return {**CONFIG, "zero_optimization": {"stage": number}}


def mean_loss(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return model(torch.randn(4, WIDTH, generator=generator)).square().mean()


class Written(nn.Module):
    """Its constructor gives values in the ways that models in the wild do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drawn, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH + 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, WIDTH))  # built from values
        nn.init.orthogonal_(self.first.weight)  # of a child
        self.drawn.weight.data.normal_(0, 0.02)
        self.drawn.bias.data = torch.arange(WIDTH) / 4
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight)
            self.second.weight.mul_(0.5)
            self.second.weight[0] += self.first.weight.norm()
        self.apply(self._write_biases)

    def _write_biases(self, module: nn.Module) -> None:
        if module is self.last:
            nn.init.normal_(module.bias)
        elif isinstance(module, nn.Linear):
            module.bias.data.div_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.scale * self.drawn(self.second(self.first(x)).tanh()))


def written(*, seed: int, inside: bool) -> Written:
    """The model as rank 0 has it, or as this rank has it: each draws from a seed of its own, as set_seed may give."""
    torch.manual_seed(seed)
    with Init(enabled=inside):
        model = Written()
    nn.init.normal_(model.last.weight)  # after the context
    return model


def built_inside() -> None:
    """The values and the random numbers afterwards are those of plain PyTorch on rank 0, at each stage."""
    rank = dist.get_rank()
    expected = dict(written(seed=0, inside=False).named_parameters())
    written(seed=rank, inside=False)
    state = torch.get_rng_state()
    for number in (0, 1, 2, 3):
        model = written(seed=rank, inside=True)
        assert torch.equal(torch.get_rng_state(), state)
        assert {name for name, param in model.named_parameters() if type(param) is nn.Parameter} == {
            "scale",
            "drawn.bias",
        }  # the others take no memory
        params = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine, *_ = initialize_quietly(model=model, optimizer=optimizer, config=at_level(number))
        assert unequal(full_values(engine), expected) == []
        assert all(param is params[name] for name, param in model.named_parameters())
        engine.backward(mean_loss(engine))
        engine.step()
        assert len(unequal(full_values(engine), expected)) == len(expected)  # all are trained
        engine.destroy()
    with Init(enabled=False):
        assert type(nn.Linear(2, 2).weight) is nn.Parameter
    with pytest.raises(PlanError, match="found one with weights; initialize shards it"):
        Init(module=nn.Linear(2, 2))


def gathered_before() -> None:
    """GatheredParameters between zero.Init and initialize: what rank 0 writes is what the engine has on all ranks."""
    rank = dist.get_rank()
    for number in (0, 1, 2, 3):
        expected = {name: param.detach().clone() for name, param in written(seed=0, inside=False).named_parameters()}
        model = written(seed=0, inside=True)
        with GatheredParameters(model.parameters()):
            inside = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert unequal(inside, expected) == []
        with (
            pytest.raises(
                ParameterReadError, match=r"without modifier_rank, found one of Linear\.weight of shape \[6, 6\]"
            ),
            GatheredParameters(model.first.weight),
        ):
            model.first.weight.data.zero_()
        with GatheredParameters([model.second.weight, model.scale], modifier_rank=0):
            if rank == 0:
                nn.init.ones_(model.second.weight)
                model.scale.data[0] = 7
        written_by_rank_1 = [model.last.weight, model.scale, model.drawn.bias]
        with GatheredParameters([*written_by_rank_1, model.first.bias], modifier_rank=1):
            assert {param.ds_status for param in written_by_rank_1} == {ZeroParamStatus.AVAILABLE}
            for param in written_by_rank_1 if rank == 1 else ():
                param.data[1] = 9
        assert {param.ds_status for param in model.parameters()} == {ZeroParamStatus.NOT_AVAILABLE}
        with GatheredParameters(model.second.weight):
            assert torch.equal(model.second.weight, torch.ones(WIDTH, WIDTH))  # on every rank
        assert isinstance(model.first.bias, RecordedTensor)  # an unchanged one takes no memory
        expected["second.weight"].fill_(1)
        expected["scale"][0] = 7
        for name in ("last.weight", "scale", "drawn.bias"):
            expected[name][1] = 9
        engine, *_ = initialize_quietly(model=model, config=at_level(number))
        assert unequal(full_values(engine), expected) == []
        with GatheredParameters(engine.module.parameters(), modifier_rank=1):
            if rank == 1:
                engine.module.first.weight.data[0] = 5
        expected["first.weight"][0] = 5
        assert unequal(full_values(engine), expected) == []
        engine.destroy()
    for nobody in (2, -1):
        with pytest.raises(PlanError, match=f"None or one of 2 ranks, found {nobody}"):
            GatheredParameters([], modifier_rank=nobody)
    with torch.device("meta"):
        nowhere = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="has no values yet; initialize"), GatheredParameters(nowhere.parameters()):
        pass


def changed_without_a_modifier() -> None:
    """A change that would be dropped raises, at each stage; where ranks gathered together, on all of them.

    DeepSpeed 0.19.8 drops it at stage 3.
    """
    for number in (0, 1, 2, 3):
        engine, *_ = initialize_quietly(model=written(seed=0, inside=False), config=at_level(number))
        before = full_values(engine)
        for attempt in range(2):
            with (
                pytest.raises(
                    ParameterReadError, match=r"no change without modifier_rank, found one of last\.bias, which"
                ),
                GatheredParameters(engine.module.parameters()),
            ):
                engine.module.last.bias.data[attempt] *= 1 + (dist.get_rank() or number == 0)  # on rank 1 alone
        assert unequal(full_values(engine), before) == []
        engine.destroy()


def refused() -> None:
    """What DeepSpeed 0.19.8 unties in silence, and what ends in an error of torch's at its first backward."""
    for number in (0, 1, 2, 3):
        model = written(seed=0, inside=False)
        model.second.weight.data = model.first.weight.data
        with pytest.raises(PlanError, match=r"`model\.second\.weight = model\.first\.weight`"):
            initialize_quietly(model=model, config=at_level(number))
        model.second.weight = model.first.weight
        engine, *_ = initialize_quietly(model=model, config=at_level(number))
        engine.backward(mean_loss(engine))
        engine.step()
        assert "second.weight" not in full_values(engine)
        engine.destroy()
        with pytest.raises(PlanError, match="found sparse=True"):
            initialize_quietly(model=nn.Sequential(nn.Embedding(3, 2, sparse=True)), config=at_level(number))


def joined_inside() -> None:
    with Init():
        assert not dist.is_initialized()  # a model is built without ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Init(enabled=False):
        assert not dist.is_initialized()
    with Init():
        assert dist.is_initialized()


def test_a_process_that_is_told_its_rank_joins_its_group_inside() -> None:
    run_alone(joined_inside)


CHECKS = (refused, built_inside, gathered_before, changed_without_a_modifier)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_model_that_is_built_or_changed_piece_by_piece(check: Callable[[], None]) -> None:
    run_ranks(check, 2)
