"""A census looks at tensors and keeps none of them."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from zero_runtime.census import ActivationCensus, HeldStates


def test_a_census_of_activations_keeps_no_gradient_alive_after_its_forward() -> None:
    model, gradient = nn.Linear(4, 4), torch.zeros(16)
    seen = weakref.ref(gradient)
    gc.disable()  # a cycle would be collected at some later time, after many steps of a run
    try:
        with ActivationCensus(HeldStates(model, torch.device("cpu"), {"grads": [gradient]})) as census:
            loss = model(torch.ones(2, 4)).sum()
        assert census.bytes == 2 * 4 * 4  # the input, which is saved for the weight's gradient
        del census, gradient
        assert seen() is None
        loss.backward()
    finally:
        gc.enable()
