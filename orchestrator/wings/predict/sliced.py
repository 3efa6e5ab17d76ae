"""Tensor and sequence parallelism of a configured model that is counted: the messages of its layers, and its layers or
sequences divided for a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from orchestrator.config.schema import RunConfig
from orchestrator.wings.divided import tensor_parallel
from orchestrator.wings.predict.tensor_messages import TensorMessages
from orchestrator.wings.predict.transport import GLOO, NCCL, SHM, transport
from zero_runtime.parallel.sequence.attention import traded_widths
from zero_runtime.parallel.sequence.axis import AloneInSequence, SequenceAxis
from zero_runtime.parallel.sequence.division import DividedSequences
from zero_runtime.parallel.tensor.adapters import layer_path
from zero_runtime.parallel.tensor.axis import AloneOnAxis, TensorAxis
from zero_runtime.parallel.tensor.cross_entropy import NUMBERS_PER_TOKEN
from zero_runtime.parallel.tensor.division import DividedModel, head_of
from zero_runtime.parallel.tensor.layers import HeadForward
from zero_runtime.parallel.tensor.plan import SplitPlan, owner_of
from zero_runtime.parallel.tensor.structure import Kind, linear_sizes
from zero_runtime.same_host.sizes import terms_bytes
from zero_runtime.unit_planner import block_modules


def divide(config: RunConfig, model: nn.Module) -> HeadForward | None:
    """Install the forwards of divided layers in a full model that is to be traced alone. Returns the divided head.

    None without tensor parallelism, or if the head is not divided.
    """
    if config.parallel.tp == 1:
        return None
    settings = tensor_parallel(config)
    axis = TensorAxis(_STAND_INS[transport(config)](settings.degree))
    DividedModel(model, settings.plan(model), axis, gathers_logits=settings.gathers_logits)
    return head_of(model)


def divide_sequences(config: RunConfig, model: nn.Module) -> SequenceAxis | None:
    """Install the forward and the attention of a part in a model that is to be traced alone. Returns its axis.

    None without sequence parallelism. Between CPUs and between GPUs, an exchange receives into a tensor of its own.
    """
    if config.parallel.sp == 1:
        return None
    axis = SequenceAxis(AloneInSequence(config.parallel.sp))
    DividedSequences(model, axis)
    return axis


class _Messages(AloneOnAxis):
    """Stands in for messages between CPUs, which receive the terms of the other ranks in tensors: see gloo.py."""

    def sum_over_slices_(self, values: torch.Tensor) -> torch.Tensor:
        padded = -(-values.numel() // self.tensor_degree) * self.tensor_degree
        copy = values.new_empty(padded) if padded > values.numel() else None
        received = self._received(values, padded // self.tensor_degree)
        del received, copy
        return values

    def _received(self, values: torch.Tensor, numel: int) -> list[torch.Tensor]:
        """The tensors with the other ranks' terms of `numel` elements that this rank sums."""
        return [values.new_empty(numel) for _ in range(self.tensor_degree - 1)]


class _Reads(_Messages):
    """Stands in for CPU ranks that read each other's terms in chunks: see same_host/operations.py."""

    def _received(self, values: torch.Tensor, numel: int) -> list[torch.Tensor]:
        return [values.new_empty(terms_bytes(numel * values.element_size()) // values.element_size())]


_STAND_INS = {NCCL: AloneOnAxis, GLOO: _Messages, SHM: _Reads}


def messages_of(config: RunConfig, model: nn.Module) -> TensorMessages:
    """The messages of a full model's layers, counted from the plan that divides them, or those of its attentions."""
    if config.parallel.sp > 1:
        return TensorMessages(traded=traded_widths(model, config.parallel.sp))
    if config.parallel.tp == 1:
        return TensorMessages()
    plan, modules = tensor_parallel(config).plan(model), dict(model.named_modules())
    params = dict(model.named_parameters())
    head = any(division.kind is Kind.HEAD for division in plan.divisions.values())
    return TensorMessages(
        widths=(*_forward(plan, modules), *_backward(plan, model)),
        repeated=tuple(_repeated(plan, modules, block_modules(model))),
        parameters=tuple(params[name].numel() for name in sorted(plan.summed)),
        loss_numbers=NUMBERS_PER_TOKEN if head else 0,
    )


def _forward(plan: SplitPlan, modules: dict[str, nn.Module]) -> Iterator[int]:
    """A sum of the outputs of each row layer and of the embeddings of tokens."""
    for path, division in plan.divisions.items():
        module, sizes = modules[path], linear_sizes(modules[path])
        if division.kind is Kind.ROW and sizes is not None:
            yield sizes[1]
        elif division.kind is Kind.VOCABULARY and isinstance(module, nn.Embedding):
            yield module.embedding_dim


def _backward(plan: SplitPlan, model: nn.Module) -> Iterator[int]:
    """A sum of the gradient of each input of column layers, which those of one module share, and of the head's.

    None for the first ones of a model whose parameters before them are frozen: their input has no gradient.
    """
    modules = dict(model.named_modules())
    owners: dict[str, int] = {}
    for path, division in plan.divisions.items():
        sizes = linear_sizes(modules[path])
        if sizes is not None and division.kind in (Kind.COLUMN, Kind.HEAD):
            owners[path if division.kind is Kind.HEAD else owner_of(path)] = sizes[0]
    without = _without_gradient(model, [path for path in modules if path in owners])
    yield from (width for path, width in owners.items() if path not in without)


def _without_gradient(model: nn.Module, owners: Sequence[str]) -> set[str]:
    """The owners of column layers, of all in the order of registration, before which no parameter is trained.

    Nothing inside of the first block is trained but its layers, which are called one after another, or with parallel
    residuals (GPT-NeoX) with the same input.
    """
    blocks = block_modules(model)
    paths = {id(module): path for path, module in model.named_modules()}
    inside = tuple(f"{paths[id(block)]}." for block in blocks)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    layers = tuple(f"{path}." for path in owners if path.startswith(inside))
    if any(not name.startswith(layers) for name in trained):
        return set()
    first = [path for path in owners if path.startswith(inside[0])]
    parallel = bool(getattr(getattr(model, "config", None), "use_parallel_residual", False))
    found: set[str] = set()
    for path in first:
        found.add(path)
        if any(name.startswith(f"{path}.") for name in trained) and not parallel:
            break
    return found


def _repeated(plan: SplitPlan, modules: dict[str, nn.Module], blocks: Sequence[nn.Module]) -> Iterator[tuple[int, ...]]:
    """Of each block, what a recomputation repeats: all sums of its forward up to the last tensor that backward needs,
    which the last sum is only if an adapter's B reads it."""
    paths = {id(module): path for path, module in modules.items()}
    for block in blocks:
        inside = f"{paths[id(block)]}."
        own = {path: division for path, division in plan.divisions.items() if path.startswith(inside)}
        rows = [path for path in modules if path in own and own[path].kind is Kind.ROW]
        widths = [sizes[1] for path in rows if (sizes := linear_sizes(modules[path])) is not None]
        is_read = bool(rows) and layer_path(rows[-1]) != rows[-1]
        yield tuple(widths if is_read else widths[:-1])
