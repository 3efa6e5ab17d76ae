"""torch's DistributedDataParallel: everything is replicated, and gradients are averaged in buckets during backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Broken
from orchestrator.wings.engines.contract import Task, Updated
from orchestrator.wings.engines.limits import common_problems
from zero_runtime.precision import ITEMSIZE_BYTES
from zero_runtime.predict.memory import peers
from zero_runtime.predict.memory.peers import PeerMemory, PeerModel

if TYPE_CHECKING:
    import torch

    from zero_runtime.optim.lr_schedule import Rates

PACKAGES, EXTRA = ("torch",), ""


def problems_of(config: RunConfig) -> list[Broken]:
    found = common_problems(config, "DDP")
    if config.precision.dtypes.param == "fp16":
        found.append(Broken("DDP in these runs has no gradient scaler", "precision=fp16", ("precision=bf16",)))
    return found


def notes_of(config: RunConfig) -> list[str]:
    if config.precision.dtypes.param == "fp32":
        return []
    return [
        "DDP keeps fp32 weights and casts them for each operation (torch.autocast), so its weights, gradients and "
        "messages are fp32, and norms and losses are computed in fp32"
    ]


def settings_of(config: RunConfig) -> dict[str, Any]:
    given = {"gradient_as_bucket_view": True, "bucket_cap_mb": 25}
    return {**given, **config.engine.native}


def memory_of(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    views = bool(settings_of(config)["gradient_as_bucket_view"])
    return peers.ddp(model, weights=ITEMSIZE_BYTES[config.precision.dtypes.param], views=views)


def build(task: Task) -> DdpEngine:
    return DdpEngine(task)


class DdpEngine:
    def __init__(self, task: Task) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from orchestrator.wings.engines import materialise, torch_optimizer

        self._torch, self._tools, self._config = torch, torch_optimizer, task.config
        self._model = materialise.whole(task)
        on_gpu = task.device.type == "cuda"
        self.module = DistributedDataParallel(
            self._model, device_ids=[task.device] if on_gpu else None, **settings_of(task.config)
        )
        param = task.config.precision.dtypes.param
        if param != "fp32":
            materialise.run_in_autocast(self.module, task.device, param)
        self._computes_in_half = param != "fp32"
        self._trained = [param for param in self._model.parameters() if param.requires_grad]
        self._optimizer = torch_optimizer.optimizer_of(
            task.config, ((name, param) for name, param in self._model.named_parameters() if param.requires_grad)
        )
        self._world = torch.distributed.get_world_size()

    def before_micro_batch(self, *, last: bool) -> None:
        self.module.require_backward_grad_sync = last  # what DDP.no_sync() sets

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self._world).backward()  # type: ignore[no-untyped-call]  # DDP averages over the ranks

    def step(self, rates: Rates) -> Updated:
        norm = self._tools.clipped_norm(self._trained, self._config.optimizer.clip_norm)
        self._tools.set_rates(self._optimizer, rates)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return Updated(norm)

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        weights = [param.detach() for param in self._model.parameters()]
        grads = [param.grad for param in self._trained if param.grad is not None]
        name = "master" if self._computes_in_half else "params"
        return {name: weights, "grads": grads, **self._tools.states_of(self._optimizer)}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, param.detach()) for name, param in self._model.named_parameters())

    def close(self) -> None:
        del self.module, self._optimizer
