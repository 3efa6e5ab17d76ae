"""Recorded parameters have the bits of plain PyTorch, whatever wrote them, and no memory."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from zero_runtime.deferred_values import values_of
from zero_runtime.errors import PlanError
from zero_runtime.initial_values import parameters_on_meta
from zero_runtime.recorded_values import RecordedTensor, recording

Fill = Callable[[nn.Linear, nn.Linear], object]


def from_file(layer: nn.Linear, other: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.ones(6, 6), "bias": other.bias.detach()})


def saved_and_loaded(layer: nn.Linear, other: nn.Linear) -> None:
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    layer.load_state_dict(torch.load(file))


def orthogonal_columns(layer: nn.Linear, _other: nn.Linear) -> None:
    nn.init.orthogonal_(layer.weight)
    layer.weight.data[:, 1:3].t().mul_(2)


@torch.no_grad()
def from_others(layer: nn.Linear, other: nn.Linear) -> None:
    layer.weight.copy_(other.weight)
    other.weight.zero_()  # later than it was read
    layer.weight[0] = layer.weight[1]
    layer.weight += layer.weight.t().clone()
    layer.bias.fill_(layer.weight.std())
    if layer.bias.sum() > 0:
        layer.bias.neg_()


def of_its_own_generator(layer: nn.Linear, _other: nn.Linear) -> None:
    nn.init.uniform_(layer.weight, generator=torch.Generator().manual_seed(3))


def set_to_others(layer: nn.Linear, other: nn.Linear) -> None:
    layer.weight.data = other.weight.data.clone()
    layer.bias = nn.Parameter(other.bias.detach() * 2)


def together(layer: nn.Linear, other: nn.Linear) -> None:
    torch._foreach_mul_([layer.weight.data, other.weight.data], 2.0)
    torch._foreach_add_([layer.weight.data], [other.weight.data])


def out_of_a_sum(layer: nn.Linear, other: nn.Linear) -> None:
    torch.add(other.bias.data, 1, out=layer.bias.data)


def of_another_dtype(layer: nn.Linear, _other: nn.Linear) -> None:
    layer.bfloat16().double()


FILLS: dict[str, Fill] = {
    "torch's own": lambda layer, other: None,
    "constant": lambda layer, other: nn.init.constant_(layer.weight, 0.5),
    "truncated": lambda layer, other: nn.init.trunc_normal_(layer.weight, a=-0.5, b=0.5),
    "sparse": lambda layer, other: nn.init.sparse_(layer.weight, 0.5),
    "orthogonal": orthogonal_columns,
    "eye": lambda layer, other: nn.init.eye_(layer.weight),
    "data": lambda layer, other: layer.weight.data.normal_(0, 0.02),
    "generator": of_its_own_generator,
    "others": from_others,
    "assigned": set_to_others,
    "together": together,
    "out": out_of_a_sum,
    "dtypes": of_another_dtype,
    "state dict": from_file,
    "file": saved_and_loaded,
    "weight norm": lambda layer, other: parametrizations.weight_norm(layer),
    "spectral norm": lambda layer, other: parametrizations.spectral_norm(layer),
}


class Made(nn.Module):
    """Two layers that `fill` writes, and parts of torch that copy, tie and draw."""

    def __init__(self, fill: Fill) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=1)
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        fill(self.layer, self.other)
        self.copied = copy.deepcopy(self.layer)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
        self.recurrent = nn.LSTM(4, 3)
        self.skipped = nn.utils.skip_init(nn.Linear, 3, 3)
        nn.init.ones_(self.skipped.weight)
        nn.init.zeros_(self.skipped.bias)
        self.tied = nn.Linear(4, 7)
        self.tied.weight = self.embed.weight
        shared = nn.Parameter(torch.empty(3))  # registered twice, and written through the first reference
        self.ends = nn.ParameterList([shared])
        self.end = shared
        nn.init.normal_(shared)
        buffer = torch.empty(3)  # written through another tensor on its memory
        self.aside = nn.Parameter(buffer)
        nn.init.normal_(buffer)
        self.register_buffer("found", self.layer.bias > 0)
        self.apply(lambda module: nn.init.normal_(module.bias) if module is self.other else None)


def made(fill: Fill, *, recorded: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not recorded:
            return Made(fill), torch.get_rng_state()
        with recording():
            return Made(fill), torch.get_rng_state()


@pytest.mark.parametrize("fill", FILLS)
def test_values_and_random_numbers_are_those_of_plain_pytorch(fill: str) -> None:
    (plain, state), (model, found_state) = (made(FILLS[fill], recorded=recorded) for recorded in (False, True))
    assert torch.equal(found_state, state)
    for kept in (model, copy.deepcopy(model)):
        found = dict(kept.named_parameters())
        assert found.keys() == dict(plain.named_parameters()).keys()
        for name, param in plain.named_parameters():
            values = values_of(found[name], name)
            assert type(values) is torch.Tensor
            assert torch.equal(values, param.detach()), name
            assert values.dtype is param.dtype
            assert str(found[name]) == str(param)
            assert found[name].requires_grad
        for name, buffer in plain.named_buffers():
            assert torch.equal(dict(kept.named_buffers())[name], buffer), name
        assert type(kept.aside) is nn.Parameter
        assert kept.tied.weight is kept.embed.weight
        assert kept.end is kept.ends[0]
    assert isinstance(model.embed.weight, RecordedTensor)


def test_recorded_parameters_have_no_memory() -> None:
    """Of eight matrices of 4 MiB none is there: no tensor of this size is alive that was not there before."""
    others = [id(one) for one in large()]
    with recording():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        assert len(large()) <= len(others) + 1
    assert {id(one) for one in large()} <= {*others}
    assert sum(param.numel() for param in model.parameters()) == 8 << 20


def large() -> list[torch.Tensor]:
    plain = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    return [one for one in plain if one.untyped_storage().nbytes() >= 4 << 20]


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    with recording():
        layer = nn.Linear(2, 2)
        with pytest.raises(PlanError, match=r"Linear\.weight: found set_, .* assign to its `data`"):
            layer.weight.data.set_(torch.ones(2, 2))
        with pytest.raises(PlanError, match=r"Linear\.weight: expected views of its dtype, found torch\.int32"):
            layer.weight.data.view(torch.int32)
        layer.bias = nn.Parameter(torch.empty(2))
    with pytest.raises(
        PlanError, match=r"parameter 'head\.bias' \(Linear\.bias\) was built inside zero\.Init\(\) and not all"
    ):
        values_of(layer.bias, "head.bias")


def test_a_model_whose_weights_come_from_files_has_no_recorded_parameters() -> None:
    with recording(), parameters_on_meta():
        layer = nn.Linear(2, 2)
    assert (layer.weight.is_meta, type(layer.weight)) == (True, nn.Parameter)
