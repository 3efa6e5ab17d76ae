"""Sets weights of DeepSpeed's engine, and takes it back to its beginning, with what its package offers for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]


def set_masters(deepspeed: Any, trained: Sequence[tuple[str, Any]], masters: Mapping[str, torch.Tensor]) -> None:
    """Gives the fp32 masters of the trained parameters these values; at stage 3 they are this rank's parts."""
    utils = deepspeed.utils
    for name, param in trained:
        setter = utils.safe_set_local_fp32_param if hasattr(param, "ds_tensor") else utils.safe_set_full_fp32_param
        setter(param, masters[name])


def restorer(
    deepspeed: Any, engine: Any, optimizer: torch.optim.Optimizer, trained: Sequence[tuple[str, Any]]
) -> Callable[[Iterable[Named]], None]:
    """The `begin_again` of an engine that has made no step."""
    scaler: dict[str, Any] = vars(vars(engine.optimizer).get("loss_scaler", SimpleNamespace()))
    own, first_scale = dict(trained), dict(scaler)

    def begin_again(values: Iterable[Named]) -> None:
        for name, value in values:
            with deepspeed.zero.GatheredParameters([own[name]], modifier_rank=0):  # which gathers at stage 3 alone
                own[name].data.copy_(value)
            deepspeed.utils.safe_set_full_fp32_param(own[name], value)
        optimizer.state.clear()
        scaler.update(first_scale)

    return begin_again
