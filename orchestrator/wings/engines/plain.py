"""Plain PyTorch in one process, with which the other engines' losses are compared: no ranks, no shards, no messages."""

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
    found = common_problems(config, "plain PyTorch")
    if config.resources.ranks != 1:
        rule = "engine=plain is one process: resources.ranks must be 1"
        found.append(Broken(rule, str(config.resources.ranks), ("resources.ranks=1",)))
    return found


def notes_of(config: RunConfig) -> list[str]:
    return []


def settings_of(config: RunConfig) -> dict[str, Any]:
    return {}


def memory_of(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    return peers.plain(model, weights=ITEMSIZE_BYTES[config.precision.dtypes.param])


def build(task: Task) -> PlainEngine:
    return PlainEngine(task)


class PlainEngine:
    """With a 16-bit precision: 16-bit weights and fp32 masters, as mixed precision is defined in arXiv 1710.03740."""

    def __init__(self, task: Task) -> None:
        import torch

        from orchestrator.wings.engines import materialise, torch_optimizer

        self._tools, self._config = torch_optimizer, task.config
        self.module = materialise.whole(task)
        named = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(task.config.precision.dtypes.param)
        self._weights = [param for _, param in named]
        self._masters = self._weights
        self._names = [name for name, _ in self.module.named_parameters()]
        if half is not None:
            self._masters = [torch.nn.Parameter(param.detach().clone()) for param in self._weights]
            self.module.to(half)
            self._grads_accumulate_in_fp32()
        self._optimizer = torch_optimizer.optimizer_of(
            task.config, zip((name for name, _ in named), self._masters, strict=True)
        )

    def _grads_accumulate_in_fp32(self) -> None:
        """Each 16-bit gradient is added to the master's, as soon as it is there."""
        for weight, master in zip(self._weights, self._masters, strict=True):

            def add(param: torch.Tensor, master: torch.Tensor = master) -> None:
                assert param.grad is not None
                grad = param.grad.to(master.dtype)
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                param.grad = None

            weight.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def before_micro_batch(self, *, last: bool) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, rates: Rates) -> Updated:
        norm = self._tools.clipped_norm(self._masters, self._config.optimizer.clip_norm)
        self._tools.set_rates(self._optimizer, rates)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._masters is not self._weights:
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.detach().copy_(master.detach())
        return Updated(norm)

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        own = self._masters if self._masters is not self._weights else []
        return {
            "params": [param.detach() for param in self.module.parameters()],
            "master": [master.detach() for master in own],
            "grads": [master.grad for master in self._masters if master.grad is not None],
            **self._tools.states_of(self._optimizer),
        }

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        masters = {id(weight): master for weight, master in zip(self._weights, self._masters, strict=True)}
        return ((name, masters.get(id(param), param).detach()) for name, param in self.module.named_parameters())

    def close(self) -> None:
        del self._optimizer
