"""Two parameters on one memory are refused by name; parts of a buffer that do not overlap are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.parameter_memory import check_parameters
from zero_runtime.recorded_values import recording
from zero_runtime.unit_planner import plan_units


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def tied_by_data(model: Pair) -> None:
    model.b.weight.data = model.a.weight.data


def tied_by_a_view(model: Pair) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data)


def tied_by_detach(model: Pair) -> None:
    model.b.weight = nn.Parameter(model.a.weight.detach())


def tied_transposed(model: Pair) -> None:
    model.b.weight = nn.Parameter(model.a.weight.detach().t())


def tied_in_a_row(model: Pair) -> None:
    model.b.bias = nn.Parameter(model.a.weight.detach()[2])


def tied(model: Pair) -> None:
    model.b.weight = model.a.weight


def columns(model: Pair) -> None:
    whole = torch.randn(4, 8)
    model.a.weight, model.b.weight = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])


def one_buffer(model: Pair) -> None:
    whole = torch.randn(32)
    model.a.weight, model.b.weight = nn.Parameter(whole[:16].view(4, 4)), nn.Parameter(whole[16:].view(4, 4))


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "zero.Init"])
@pytest.mark.parametrize("share", [tied_by_data, tied_by_a_view, tied_by_detach, tied_transposed, tied_in_a_row])
def test_two_parameters_on_one_memory_are_refused_by_name(share: Callable[[Pair], None], recorded: bool) -> None:
    model = built(share, recorded=recorded)
    second = "b.bias" if share is tied_in_a_row else "b.weight"
    with pytest.raises(PlanError) as caught:
        check_parameters(model)
    told = str(caught.value)
    assert told.startswith(f"parameters 'a.weight' and '{second}': expected memory of their own, found two Parameters")
    assert ("`model.b.weight = model.a.weight`" in told) == (share is not tied_in_a_row)


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "zero.Init"])
@pytest.mark.parametrize("share", [tied, columns, one_buffer])
def test_one_parameter_under_two_names_and_parts_of_one_buffer_are_planned(
    share: Callable[[Pair], None], recorded: bool
) -> None:
    model = built(share, recorded=recorded)
    check_parameters(model)
    assert sum(spec.numel for spec in plan_units(model)) == sum(param.numel() for param in model.parameters())


def built(share: Callable[[Pair], None], *, recorded: bool) -> Pair:
    if not recorded:
        model = Pair()
        share(model)
        return model
    with recording():
        model = Pair()
        share(model)
    return model


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_is_refused_by_name_unless_it_is_frozen(kind: type[nn.Embedding]) -> None:
    model = nn.Sequential(kind(3, 2, sparse=True))
    with pytest.raises(
        PlanError, match=r"module '0': expected an Embedding.* with sparse=False, found sparse=True: .*"
    ):
        check_parameters(model)
    model.requires_grad_(False)
    check_parameters(model)
