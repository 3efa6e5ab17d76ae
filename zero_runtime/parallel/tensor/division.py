"""Divides a model for one rank: installs the forwards and local sizes of a plan, until it is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_runtime.collectives import Collectives
from zero_runtime.divisions import LayerDivision, WholeLayers
from zero_runtime.errors import ParameterReadError, PlanError
from zero_runtime.optim.config_base import OptimizerConfig
from zero_runtime.parallel.tensor.axis import TensorAxis
from zero_runtime.parallel.tensor.layers import ColumnForward, ColumnInput, EmbeddingForward, HeadForward, RowForward
from zero_runtime.parallel.tensor.messages import SliceMessages
from zero_runtime.parallel.tensor.plan import SplitPlan, owner_of, plan_split
from zero_runtime.parallel.tensor.refusals import check_divided
from zero_runtime.parallel.tensor.slices import TensorSlices
from zero_runtime.parallel.tensor.structure import Kind
from zero_runtime.parallel.tensor.tokens import TokenParts, TokenPlan

_HIDDEN = "hidden_states"


@dataclass(frozen=True)
class TensorParallel(WholeLayers):
    """Settings of tensor parallelism.

    degree: number of consecutive ranks that hold the slices of one model. patterns: see `divisions_of`. gathers_logits:
    the head returns all logits on every rank, for any loss; else this rank's rows of them, which only
    `vocabulary_cross_entropy` may use.
    """

    degree: int = 1
    patterns: tuple[str, ...] = ()
    gathers_logits: bool = True

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise PlanError(f"parallel.tp: expected at least 1, found {self.degree}; use parallel.tp=1")

    def data_world(self, world: int) -> int:
        if world % self.degree:
            raise PlanError(
                f"parallel.tp={self.degree}: expected a divisor of the {world} ranks; start a multiple of "
                f"{self.degree} ranks, or use parallel.tp=1"
            )
        return world // self.degree

    def check(self, optimizer: OptimizerConfig | None) -> None:
        check_divided(self.degree, optimizer)

    def division(self, model: nn.Module, *, trains: bool) -> LayerDivision:
        if self.degree == 1:
            return LayerDivision()
        return SplitLayers(self.plan(model, trains=trains), gathers_logits=self.gathers_logits)

    def plan(self, model: nn.Module, *, trains: bool = True) -> SplitPlan:
        """The plan of this division for a full model. PlanError if it trains with dropout: masks would differ."""
        if trains:
            _refuse_dropout(model)
        return plan_split(model, self.degree, self.patterns, trains=trains)


def _refuse_dropout(model: nn.Module) -> None:
    """Raise PlanError for dropout: each rank of a group draws its own mask, for values that must be equal on all."""
    for path, module in model.named_modules():
        own = {"dropout": module.p} if isinstance(module, nn.modules.dropout._DropoutNd) else vars(module)
        for name, value in own.items():
            if "drop" in name and isinstance(value, float) and value > 0:
                raise PlanError(
                    f"parallel.tp: expected a model without dropout, since each rank of a group would draw another "
                    f"mask, found {name}={value:g} in {path or type(model).__name__}; set the model's dropout to 0, or "
                    "use parallel.tp=1"
                )


class SplitLayers(LayerDivision):
    """A plan, the axis of the ranks that hold its slices, and the forwards that compute with them."""

    def __init__(self, plan: SplitPlan, *, gathers_logits: bool) -> None:
        self._plan, self._gathers_logits = plan, gathers_logits
        self._axis: TensorAxis | None = None

    def slices(self, collectives: Collectives) -> TensorSlices:
        self._axis = TensorAxis(SliceMessages(collectives))
        return self._plan.slices(collectives.tensor_rank, self._axis)

    def install(self, model: nn.Module) -> DividedModel:
        assert self._axis is not None, "`slices` comes first"
        return DividedModel(model, self._plan, self._axis, gathers_logits=self._gathers_logits)


class DividedModel:
    """The installed forwards and sizes. The model's parameters must be slices when a forward runs."""

    def __init__(self, model: nn.Module, plan: SplitPlan, axis: TensorAxis, *, gathers_logits: bool) -> None:
        self.axis, self.batch = axis, axis.batch
        self._modules = dict(model.named_modules())
        self._installed: list[nn.Module] = []
        self._heads: list[HeadForward] = []
        self._is_compared = False
        self._hooks = [model.register_state_dict_pre_hook(_refuse_slices)]
        if gathers_logits:  # otherwise the loss by the vocabulary, which alone may use such logits, notes the labels
            self._hooks.append(model.register_forward_pre_hook(self._note, with_kwargs=True))
        self._attributes: list[tuple[nn.Module, str, int]] = []
        shared: dict[str, ColumnInput] = {}
        tokens = None if plan.tokens is None else TokenParts(axis)
        for path, division in plan.divisions.items():
            module = self._modules[path]
            own = shared.setdefault(owner_of(path), ColumnInput(axis, tokens))
            if division.kind in (Kind.COLUMN, Kind.SHARED_INPUT):
                self._install(module, ColumnForward(module, own))
            elif division.kind is Kind.ROW:
                self._install(module, RowForward(module, own))
            elif division.kind is Kind.GATHERED:
                assert isinstance(module, nn.Linear)
                self._install(module, HeadForward(module, axis, module.out_features, gathers=True))
            elif division.kind is Kind.VOCABULARY:
                assert isinstance(module, nn.Embedding)
                self._install(module, EmbeddingForward(module, axis))
            elif division.kind is Kind.HEAD:
                assert isinstance(module, nn.Linear)
                assert plan.vocabulary is not None
                self._heads.append(HeadForward(module, axis, plan.vocabulary, gathers=gathers_logits, tokens=tokens))
                self._install(module, self._heads[-1])
        if plan.tokens is not None and tokens is not None:
            self._hooks.extend(self._part_hooks(plan, plan.tokens, tokens, shared))
        for path, values in plan.attributes.items():
            for name, value in values.items():
                self._attributes.append((self._modules[path], name, getattr(self._modules[path], name)))
                setattr(self._modules[path], name, value)

    def _part_hooks(
        self, plan: SplitPlan, where: TokenPlan, tokens: TokenParts, shared: dict[str, ColumnInput]
    ) -> Iterator[RemovableHandle]:
        """Hooks, since the forward of a block may be replaced after this, by one that recomputes it, or before.

        The first block is called with hidden states of all tokens, and the modules with column layers with parts.
        """
        columns = (path for path, one in plan.divisions.items() if one.kind is Kind.COLUMN)
        for path in dict.fromkeys(map(owner_of, columns)):
            yield _before(self._modules[path], shared[path].begin, lambda: tokens.held)
        yield _before(self._modules[where.first], tokens.begin, torch.is_grad_enabled)
        yield self._modules[""].register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
        yield self._modules[where.norm].register_forward_hook(
            lambda _module, _args, part: tokens.end(part) if tokens.held else part
        )

    def _note(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a training forward is given. That of the first one is compared before it: inputs of two shapes
        would end in an error of the backend."""
        self.axis.batch.note_all((args, kwargs))
        self._is_compared = self._is_compared or self.axis.check_batch()

    def _install(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._installed.append(module)

    @contextmanager
    def full_logits(self) -> Iterator[None]:
        """Inside, the head returns the logits of the whole vocabulary, which generation chooses from."""
        own = [head.gathers for head in self._heads]
        for head in self._heads:
            head.gathers = True
        try:
            yield
        finally:
            for head, gathers in zip(self._heads, own, strict=True):
                head.gathers = gathers

    def remove(self) -> None:
        """Restore the modules' own forwards and sizes. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        for module in self._installed:
            del module.forward
        for module, name, value in self._attributes:
            setattr(module, name, value)
        self._installed.clear()
        self._attributes.clear()


def _refuse_hidden_states(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise PlanError where a training forward is asked for hidden states, of which each rank has a part."""
    if kwargs.get("output_hidden_states") and torch.is_grad_enabled():
        raise PlanError(
            "parallel.tp: expected a training forward that returns logits or the last hidden states, found "
            "output_hidden_states=True: each rank has those of a part of the tokens. Ask for them under "
            "torch.no_grad(), or use parallel.tp=1"
        )


def _before(
    module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], applies: Callable[[], bool]
) -> RemovableHandle:
    """Call the module with changed hidden states, which are its first argument or one of this name. A no-op unless
    `applies()`."""

    def changed(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not applies():
            return args, kwargs
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, _HIDDEN: change(kwargs[_HIDDEN])}

    return module.register_forward_pre_hook(changed, with_kwargs=True)


def _refuse_slices(_module: nn.Module, _prefix: str, keep_vars: bool) -> None:
    """Raise ParameterReadError for a state dict of values, which would be saved as those of the whole model."""
    if not keep_vars:
        raise ParameterReadError(
            "state_dict: expected whole parameters, found this rank's slices (parallel.tp); on every rank, use "
            "runtime.full_params() (the drop-in: engine.module_state_dict() or engine.save_16bit_model)"
        )


def head_of(model: nn.Module) -> HeadForward | None:
    """The divided head of a model that returns its own logits alone; None if all logits are returned."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, HeadForward) and not forward.gathers:
            return forward
    return None
