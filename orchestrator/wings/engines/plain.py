"""Plain PyTorch in one process, with which the other engines' losses are compared: no ranks, no shards, no messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.config.engine import EngineKind
from orchestrator.config.optimizer import Optimizer
from orchestrator.config.schema import RunConfig
from orchestrator.config.state_groups import Precision
from orchestrator.config.strict import Broken
from orchestrator.wings.engines import ddp
from orchestrator.wings.engines.contract import Task, Updated
from orchestrator.wings.engines.equality import STEPS
from orchestrator.wings.engines.limits import common_problems, replicated
from orchestrator.wings.engines.optimizer_words import step_form
from zero_runtime.offload_plan import Tier
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.predict.memory import peers
from zero_runtime.predict.memory.peers import PeerMemory, PeerModel

if TYPE_CHECKING:
    import torch

    from zero_runtime.optim.lr_schedule import Rates

PACKAGES, EXTRA = ("torch",), ""


def problems_of(config: RunConfig) -> list[Broken]:
    found = common_problems(config, "plain PyTorch in these runs")
    if config.resources.ranks != 1:
        rule = "engine=plain is one process: resources.ranks must be 1"
        found.append(Broken(rule, str(config.resources.ranks), ("resources.ranks=1",)))
    if Tier.HOST in (config.offload.params, config.offload.optimizer):
        found.append(Broken("plain PyTorch offloads nothing", "group offload", ("offload=none",)))
    return found


def notes_of(config: RunConfig) -> list[str]:
    return []


def settings_of(config: RunConfig) -> dict[str, Any]:
    return {}


def memory_of(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    precision, step = config.precision.mixed, step_form(config, by_default=model.by_default)
    has_masters = precision.param != precision.master
    weights = ITEMSIZE_BYTES[(has_masters and precision.compute) or precision.param]
    held = ITEMSIZE_BYTES[precision.master]
    return peers.plain(model, weights=weights, has_masters=has_masters, held=held, step=step)


def meaning(config: RunConfig) -> RunConfig:
    return replace(replicated(config), precision=config.precision)  # it converts 16-bit weights to fp32, as ours


def build(task: Task) -> PlainEngine:
    return PlainEngine(task)


def with_norm(optimizer: Optimizer) -> Optimizer:
    """The optimizer with a norm that clips nothing where it has none: the reference knows the norm of every step."""
    return optimizer if optimizer.clip_norm is not None else replace(optimizer, clip_norm=math.inf)


def variants(config: RunConfig) -> dict[str, RunConfig]:
    """Variants of one computation with other roundings, by how it is computed: in micro-batches of other sizes, in fp32
    throughout, and with fp32 weights that are cast for each operation (autocast, which is DDP on one rank)."""
    # Like the reference, see PlainEngine: a norm is computed where nothing is clipped.
    config = replace(config, optimizer=with_norm(config.optimizer))
    size = config.batch.global_size
    # The smallest and the largest that a row on several ranks can have: in 16 bits a gradient of more sequences is a
    # sum of more terms before it is rounded.
    own = config.batch.micro
    sizes = {next(one for one in range(1, size + 1) if size % one == 0 and (one != own or size == 1))}
    is_fp32 = config.precision.dtypes.param == "fp32"
    sizes |= set() if is_fp32 or size % 2 else {size // 2} - {own}
    found = {
        f"in micro-batches of {micro}": replace(
            config, batch=replace(config.batch, micro=micro, accumulation=size // micro)
        )
        for micro in sorted(sizes)
    }
    if not is_fp32:
        found["in fp32"] = replace(config, precision=Precision(MixedPrecision(), compute="fp32"))
        cast = replace(config, engine=replace(config.engine, kind=EngineKind.ddp))
        found |= {} if ddp.problems_of(cast) else {"in autocast": cast}
    return found


def cost_text(config: RunConfig) -> str:
    """The line of a plan that says what the reference adds to the sweep."""
    steps, ways = config.steps() or 0, variants(config)
    again = len(ways) * min(STEPS, steps)
    return (
        f"{steps} steps of plain PyTorch, and {again} more ({', '.join(ways)}) to know how far equal work may differ: "
        f"together those of {(steps + again) / steps:.1f} rows; measure.reference=false leaves it out"
    )


class PlainEngine:
    """With a 16-bit precision: 16-bit weights, fp32 masters and sums of gradients, as mixed precision is defined in
    arXiv 1710.03740."""

    def __init__(self, task: Task) -> None:
        from orchestrator.wings.engines import materialise, torch_optimizer
        from zero_runtime.dtypes import TORCH_DTYPE

        self.module = materialise.whole(task)
        precision = task.config.precision.mixed
        self._half = None if precision.param == "fp32" else TORCH_DTYPE[precision.param]
        named = {name: param for name, param in self.module.named_parameters() if param.requires_grad}
        self._masters: dict[str, torch.Tensor] = dict(named)
        if self._half is not None:
            self._masters = {name: param.detach().clone().requires_grad_() for name, param in named.items()}
            for param in self.module.parameters():  # not the buffers, which every engine leaves in their dtypes
                param.data = param.detach().to(self._half).to(TORCH_DTYPE[precision.compute or precision.param])
        self._weights = [(param, self._masters[name]) for name, param in named.items()]
        if self._half is not None:
            self._sum_in_fp32()
        config = replace(task.config, optimizer=with_norm(task.config.optimizer))
        self._update = torch_optimizer.Update(config, self._masters.items())

    def _sum_in_fp32(self) -> None:
        """Each gradient is added to the master's, as soon as it is there."""
        for weight, master in self._weights:

            def add(param: torch.Tensor, master: torch.Tensor = master) -> None:
                assert param.grad is not None
                grad = param.grad.to(master.dtype)
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                param.grad = None

            weight.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def before_micro_batch(self, *, last: bool) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
        self._update.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, rates: Rates) -> Updated:
        updated = self._update.step(rates)
        self._round_weights()
        return updated

    def _round_weights(self) -> None:
        if self._half is not None:
            for weight, master in self._weights:
                weight.detach().copy_(master.detach().to(self._half))

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        own = [] if self._half is None else [master.detach() for master in self._masters.values()]
        weights = [param.detach() for param in self.module.parameters()]
        return {"params": weights, "master": own, "grads": self._update.grads(), **self._update.states()}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._masters.get(name, param).detach()) for name, param in self.module.named_parameters())

    def begin_again(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._update.begin_again(values)
        self._round_weights()

    def close(self) -> None:
        del self.module, self._update
