"""Tensor and sequence parallelism of a configured model that is counted: the messages of its layers, and its layers or
sequences divided for a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

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

    def sum_to_slices(self, values: torch.Tensor) -> torch.Tensor:
        own = super().sum_to_slices(values)
        received = self._received(own, own.numel())
        del received
        return own

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
    params = {name: param.numel() for name, param in model.named_parameters() if param.requires_grad}
    head = [path for path, division in plan.divisions.items() if division.kind is Kind.HEAD]
    messages = TensorMessages(
        repeated=tuple(_repeated(plan, modules, block_modules(model))),
        parameters=tuple(params[name] for name in sorted(plan.summed & params.keys())),
        loss_numbers=NUMBERS_PER_TOKEN if head else 0,
    )
    if plan.tokens is None:
        return replace(messages, widths=(*_forward(plan, modules), *_backward(plan, model)))
    again = [sizes[0] for path in head if modules[path].weight.requires_grad and (sizes := linear_sizes(modules[path]))]
    return replace(
        messages, widths=tuple(_embeddings(plan, modules)), parts=tuple(_parts(plan, model)), head=sum(again)
    )


def _embeddings(plan: SplitPlan, modules: dict[str, nn.Module]) -> Iterator[int]:
    for path, division in plan.divisions.items():
        module = modules[path]
        if division.kind is Kind.VOCABULARY and isinstance(module, nn.Embedding):
            yield module.embedding_dim


def _rows(plan: SplitPlan, modules: dict[str, nn.Module]) -> dict[str, int]:
    """The outputs of each row layer, by path."""
    rows = (path for path, division in plan.divisions.items() if division.kind is Kind.ROW)
    return {path: sizes[1] for path in rows if (sizes := linear_sizes(modules[path])) is not None}


def _forward(plan: SplitPlan, modules: dict[str, nn.Module]) -> Iterator[int]:
    """A sum of the outputs of each row layer and of the embeddings of tokens."""
    yield from _rows(plan, modules).values()
    yield from _embeddings(plan, modules)


def _parts(plan: SplitPlan, model: nn.Module) -> Iterator[int]:
    """With parts of tokens: see [Note: parts of tokens] in zero_runtime/parallel/tensor/tokens.py.

    The input of the column layers of a module is gathered in forward, and again for the gradient of a trained weight;
    in backward its gradient is summed to parts, if it has one. A result of a row layer is summed to parts in forward,
    and in backward its gradient is gathered, if it has one. The last norm's result is gathered, and its gradient is
    summed to parts; the gradient of the first block's input is gathered.
    """
    modules = dict(model.named_modules())
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    inputs = _inputs(plan, modules)
    without = _without_gradient(model, [path for path in modules if path in inputs])
    for owner, width in inputs.items():
        own = [name for name in trained if name.startswith(f"{owner}.")]
        rows = {path: size for path, size in _rows(plan, modules).items() if owner_of(path) == owner}
        in_rows = tuple(f"{layer_path(path)}." for path in rows)
        columns = [name for name in own if not name.startswith(in_rows)]
        has_gradient = owner not in without
        yield from (width,) * (1 + has_gradient + (bool(columns) and not _is_head(plan, owner)))
        for path, size in rows.items():
            yield from (size,) * (1 + (has_gradient or bool(columns) or modules[path].weight.requires_grad))
    behind = (*(plan.tokens.inside if plan.tokens else ()), *(f"{path}." for path in inputs if _is_head(plan, path)))
    if any(not name.startswith(behind) for name in trained):
        yield next(iter(inputs.values()))  # of the first block's input


def _is_head(plan: SplitPlan, path: str) -> bool:
    return path in plan.divisions and plan.divisions[path].kind is Kind.HEAD


def _inputs(plan: SplitPlan, modules: dict[str, nn.Module]) -> dict[str, int]:
    """The width of each input of column layers, by the module that owns them, and of the head's."""
    owners: dict[str, int] = {}
    for path, division in plan.divisions.items():
        sizes = linear_sizes(modules[path])
        if sizes is not None and division.kind in (Kind.COLUMN, Kind.HEAD):
            owners[path if division.kind is Kind.HEAD else owner_of(path)] = sizes[0]
    return owners


def _backward(plan: SplitPlan, model: nn.Module) -> Iterator[int]:
    """A sum of the gradient of each input of column layers, which those of one module share, and of the head's.

    None for the first ones of a model whose parameters before them are frozen: their input has no gradient.
    """
    modules = dict(model.named_modules())
    owners = _inputs(plan, modules)
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
    which the last sum is only if an adapter's B reads it; with parts of tokens, also the gathers of its inputs."""
    paths = {id(module): path for path, module in modules.items()}
    for block in blocks:
        inside = f"{paths[id(block)]}."
        own = {path: division for path, division in plan.divisions.items() if path.startswith(inside)}
        rows = [path for path in modules if path in own and own[path].kind is Kind.ROW]
        widths = [sizes[1] for path in rows if (sizes := linear_sizes(modules[path])) is not None]
        is_read = bool(rows) and layer_path(rows[-1]) != rows[-1]
        inputs = (
            []
            if plan.tokens is None
            else [width for path, width in _inputs(plan, modules).items() if path.startswith(inside)]
        )
        yield (*inputs, *(widths if is_read else widths[:-1]))
