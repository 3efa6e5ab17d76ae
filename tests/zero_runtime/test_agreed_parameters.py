"""A parameter that was frozen, unfrozen, added or replaced after its units were built is named by the next step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zero_runtime.agreed_parameters import AgreedParameters
from zero_runtime.errors import PlanError


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.first.again = self.inner  # a module with two names


def frozen_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2), requires_grad=False)


REFUSED: list[tuple[str, Callable[[Small], object], str]] = [
    (
        "frozen",
        lambda m: m.first.bias.requires_grad_(False),
        r"'first\.bias': expected requires_grad=True .* found Fal",
    ),
    ("unfrozen", lambda m: m.frozen.requires_grad_(), r"'frozen': expected requires_grad=False .* found True"),
    ("added", lambda m: m.register_parameter("x", nn.Parameter(torch.ones(1))), r"'x': expected none .* a new one"),
    (
        "in place of none",
        lambda m: setattr(m.inner[0], "bias", nn.Parameter(torch.ones(2))),
        r"0\.bias': expected none",
    ),
    ("an adapter", lambda m: m.inner.append(nn.Linear(2, 1)), r"'first\.again\.2\.weight': expected none"),
    ("a new head", lambda m: setattr(m, "first", nn.Linear(2, 2)), r"'first\.weight': expected none"),
    ("replaced", lambda m: setattr(m.first, "bias", nn.Parameter(torch.ones(2))), r"'first\.bias': expected the same"),
    ("by a frozen one", lambda m: setattr(m.first, "bias", frozen_parameter()), r"'first\.bias': expected the same"),
    ("tied late", lambda m: setattr(m.inner[0], "weight", m.first.weight), r"0\.weight': expected the same one"),
    (
        "a frozen one by a trained",
        lambda m: setattr(m, "frozen", nn.Parameter(torch.ones(2))),
        "'frozen': expected the",
    ),
]
ALLOWED: list[tuple[str, Callable[[Small], object]]] = [
    ("nothing", lambda m: None),
    ("to and fro", lambda m: (m.requires_grad_(False), m.first.requires_grad_(), m.inner.requires_grad_())),
    ("removed", lambda m: setattr(m, "first", nn.Identity())),
    ("a frozen one rebuilt", lambda m: setattr(m, "frozen", frozen_parameter())),
    ("a frozen part", lambda m: setattr(m, "teacher", nn.Linear(2, 2).requires_grad_(False))),
    ("other values", lambda m: setattr(m.first.weight, "data", torch.ones(2, 2))),
    ("moved", lambda m: setattr(m, "inner", nn.Sequential(m.inner))),
]


@pytest.mark.parametrize(("edit", "told"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_change_that_training_would_ignore_is_refused_by_name(edit: Callable[[Small], object], told: str) -> None:
    model = Small()
    agreed = AgreedParameters(model)
    edit(model)
    with pytest.raises(PlanError, match=told):
        agreed.check()


@pytest.mark.parametrize("edit", [row[1] for row in ALLOWED], ids=[row[0] for row in ALLOWED])
def test_other_changes_are_allowed(edit: Callable[[Small], object]) -> None:
    model = Small()
    agreed = AgreedParameters(model)
    edit(model)
    agreed.check()
