"""torch's DistributedDataParallel: everything is replicated, and gradients are averaged in buckets during backward.

A 16-bit precision is autocast over fp32 weights, as its users train: each weight is cast once in a forward, whose end
drops the copies.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Broken
from orchestrator.wings.engines.contract import Task, Updated
from orchestrator.wings.engines.limits import broken_keys, common_problems, replicated
from orchestrator.wings.engines.optimizer_words import step_form
from zero_runtime.limits import as_typed
from zero_runtime.offload_plan import Tier
from zero_runtime.precision import ITEMSIZE_BYTES
from zero_runtime.predict.memory import peers
from zero_runtime.predict.memory.peers import PeerMemory, PeerModel

if TYPE_CHECKING:
    import torch

    from zero_runtime.optim.lr_schedule import Rates

PACKAGES, EXTRA = ("torch",), ""
HOOKS = (None, "bf16_compress_hook", "fp16_compress_hook")  # of what is sent, beside fp32


def problems_of(config: RunConfig) -> list[Broken]:
    found = [*common_problems(config, "DDP in these runs"), *broken_keys(config, settings_of)]
    if (hook := settings_of(config)["comm_hook"]) not in HOOKS:
        rule = f"engine.ddp.comm_hook must be one of {', '.join(map(as_typed, HOOKS))}"
        found.append(Broken(rule, str(hook), ("engine.ddp.comm_hook=bf16_compress_hook",)))
    if Tier.HOST in (config.offload.params, config.offload.optimizer):
        found.append(Broken("DDP offloads nothing", "group offload", ("offload=none", "engine=fsdp2")))
    return found


def notes_of(config: RunConfig) -> list[str]:
    found = ["DDP replicates all model states, so every zero.stage is this row"]
    if config.precision.dtypes.param != "fp32":
        found.append(
            "DDP keeps fp32 weights and casts them for each operation (torch.autocast), so its weights and gradients "
            "are fp32, and norms, softmax and losses are computed in fp32; what is frozen is held in 16 bits"
        )
    return found


def settings_of(config: RunConfig) -> dict[str, Any]:
    reduce = config.precision.dtypes.reduce
    given = {
        "gradient_as_bucket_view": True,  # without it gradients are held twice
        "bucket_cap_mb": 25,
        "static_graph": False,
        "find_unused_parameters": False,
        "batched_grad_copy": False,
        "init_sync": True,
        "forward_sync_buffers": False,  # of the model's tables, which never change
        "comm_hook": None if reduce == "fp32" else f"{reduce}_compress_hook",
    }
    return {**given, **config.engine.native}


def autocast_of(config: RunConfig) -> str | None:
    dtypes = config.precision.dtypes
    return None if dtypes.param == dtypes.master else dtypes.param


def memory_of(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    dtypes = config.precision.dtypes
    return peers.ddp(
        model,
        weights=ITEMSIZE_BYTES[dtypes.param],
        held=ITEMSIZE_BYTES[dtypes.master],
        views=bool(settings_of(config)["gradient_as_bucket_view"]),
        accumulates=config.batch.accumulation > 1,
        step=step_form(config, by_default=model.by_default),
    )


def meaning(config: RunConfig) -> RunConfig:
    return replicated(config)


def build(task: Task) -> DdpEngine:
    return DdpEngine(task)


class DdpEngine:
    def __init__(self, task: Task) -> None:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        from orchestrator.wings.engines import materialise, torch_optimizer
        from zero_runtime.dtypes import TORCH_DTYPE

        param = task.config.precision.dtypes.param
        self._computes_in_half = param != "fp32"
        self._model = materialise.whole(task, TORCH_DTYPE[param])  # as users of adapters have their frozen base
        settings = settings_of(task.config) | {"device_ids": [task.device] if task.device.type == "cuda" else None}
        hook = settings.pop("comm_hook")
        if "forward_sync_buffers" not in inspect.signature(DistributedDataParallel).parameters:  # torch before 2.13
            settings["broadcast_buffers"] = settings.pop("forward_sync_buffers")
            del settings["batched_grad_copy"]
        self.module = DistributedDataParallel(self._model, **settings)
        if hook is not None:
            self.module.register_comm_hook(None, getattr(default_hooks, hook))
        if self._computes_in_half:
            autocast = torch.autocast(task.device.type, TORCH_DTYPE[param])
            self.module.forward = autocast(self.module.forward)  # type: ignore[method-assign]  # of this module alone
        trained = ((name, one) for name, one in self._model.named_parameters() if one.requires_grad)
        self._update = torch_optimizer.Update(task.config, trained)
        self._world = torch.distributed.get_world_size()

    def before_micro_batch(self, *, last: bool) -> None:
        self.module.require_backward_grad_sync = last  # what DDP.no_sync() sets

    def backward(self, loss: torch.Tensor) -> None:
        (self._update.scaled(loss) * self._world).backward()  # type: ignore[no-untyped-call]  # DDP averages

    def step(self, rates: Rates) -> Updated:
        return self._update.step(rates)

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        weights = [param.detach() for param in self._model.parameters() if not param.requires_grad]
        masters = [param.detach() for param in self._update.params]
        own = {"params": weights, "master": masters} if self._computes_in_half else {"params": [*masters, *weights]}
        return {**own, "grads": self._update.grads(), **self._update.states()}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, param.detach()) for name, param in self._model.named_parameters())

    def begin_again(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._update.begin_again(values)

    def close(self) -> None:
        del self.module, self._update
