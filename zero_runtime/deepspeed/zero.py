"""DeepSpeed's `zero`: building a model without its memory, full parameters inside a context, estimates of memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from zero_runtime.deepspeed import comm
from zero_runtime.deepspeed.absent import missing
from zero_runtime.deepspeed.engine import Engine
from zero_runtime.deepspeed.entry import init_distributed, own_device
from zero_runtime.deepspeed.live_engines import owned
from zero_runtime.deepspeed.sharded_names import ZeroParamStatus, is_zero_param, name_as_sharded, registered_as_sharded
from zero_runtime.deferred_values import values_of
from zero_runtime.errors import ParameterReadError, PlanError, some
from zero_runtime.predict.memory.live_estimate import (
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zero_runtime.recorded_values import RecordedTensor, record_again, recording, take_values
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.world import is_joined, world_size

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_live",
    "is_zero_param",
    "register_external_parameter",
    "unwrap_model_for_generation",
]


class Init(AbstractContextManager["Init"]):
    """Build a model inside with the values of plain PyTorch, almost without memory; `initialize` shards it.

    Layers, `apply`, nn.init and other writes, inside and until `initialize`, give the values, and take the random
    numbers, that they would without the context. Each parameter of uninitialised memory remembers how it got its values
    (recorded_values.py) instead of keeping them; one that is built from values keeps them. Ranks with different seeds
    get rank 0's values. For weights from files use integrations.transformers.from_pretrained. Joins
    the process group if RANK and WORLD_SIZE tell of one. DeepSpeed's other arguments are accepted and have no effect.
    `enabled`: False makes the context do nothing.
    """

    def __init__(self, module: nn.Module | None = None, *_ignored: Any, enabled: bool = True, **_more: Any) -> None:
        if module is not None:
            raise PlanError("zero.Init: expected no module, found one with weights; initialize shards it as it is")
        self._enabled = enabled
        self._context = recording() if enabled else nullcontext()
        self._names = registered_as_sharded() if enabled else nullcontext()

    def __enter__(self) -> Init:
        if self._enabled and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            init_distributed()
        self._context.__enter__()
        self._names.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._names.__exit__(kind, error, trace)
        return self._context.__exit__(kind, error, trace)


class GatheredParameters(AbstractContextManager[None]):
    """Inside, the parameters have their full values on every rank, which must all enter it, between steps.

    params: a parameter, or several; those that have their values are left as they are. modifier_rank: what this rank
    has changed is the value on every rank afterwards, also between zero.Init and `initialize`; with None, a change
    raises ParameterReadError at exit. The model must not be called inside.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter] | Mapping[str, nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        ranks = world_size() if is_joined() else 1
        if modifier_rank is not None and modifier_rank not in range(ranks):
            raise PlanError(
                f"zero.GatheredParameters: expected modifier_rank None or one of {ranks} ranks, found {modifier_rank}; "
                "use 0"
            )
        if isinstance(params, Mapping):
            params = params.values()
        chosen = [params] if isinstance(params, nn.Parameter) else list(params)
        self._params = list({id(param): param for param in chosen}.values()) if enabled else []
        self._source = modifier_rank
        self._is_shared = modifier_rank is not None and ranks > 1
        self._lost: list[str] = []  # parameters whose change is undone
        self._runtimes: list[ZeroRuntime] = []
        self._stack = ExitStack()

    def __enter__(self) -> None:
        by_runtime: dict[int, tuple[ZeroRuntime, dict[str, nn.Parameter]]] = {}
        with ExitStack() as stack:
            for param in self._params:
                found = owned(param)
                if found is not None:
                    by_runtime.setdefault(id(found.runtime), (found.runtime, {}))[1][found.name] = param
                elif isinstance(param, RecordedTensor):
                    stack.callback(self._record_again, param, take_values(param), values_of(param).clone())
                elif param.is_meta:
                    raise PlanError(
                        f"zero.GatheredParameters: a parameter of shape {list(param.shape)} has no values yet; "
                        "initialize gives it its values: change it afterwards"
                    )
                if found is None and is_zero_param(param):
                    stack.enter_context(self._not_owned(param))
            for runtime, named in by_runtime.values():
                runtime.check_between_steps("zero.GatheredParameters")
                values = stack.enter_context(
                    runtime.full_params(list(named), write=self._source is not None, source=self._source or 0)
                )
                for name, param in named.items():
                    stack.callback(self._take_back, name, values[name], _Shown(param, values[name]))
            self._runtimes = [runtime for runtime, _ in by_runtime.values()]
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._lost.clear()
        suppressed = self._stack.__exit__(kind, error, trace)
        every = [self._lost]
        if kind is None and self._source is None:
            for runtime in self._runtimes:
                if runtime.collectives.shard_count == 1:
                    continue  # such a parameter was gathered without the other ranks, which may be elsewhere
                every += runtime.collectives.gather_objects(self._lost)
        lost = list(dict.fromkeys(name for names in every for name in names))
        if lost and kind is None:
            raise ParameterReadError(
                f"zero.GatheredParameters: expected no change without modifier_rank, found one of {some(lost)}, which "
                "is undone; enter it with modifier_rank=0, and what rank 0 writes stays"
            )
        return suppressed

    @torch.no_grad()
    def _take_back(self, name: str, master: torch.Tensor, shown: _Shown) -> None:
        """Put the changed elements into `master`; the others keep their bits there, more than those shown."""
        param = shown.param
        changed = _changed(param.data, shown.before)
        if self._source is None:
            self._lost += [name] if bool(changed.any()) else []
        else:
            master.copy_(torch.where(changed, param.data.to(master.dtype), master))
        param.data = shown.data
        param.__class__ = shown.kind

    @contextmanager
    def _not_owned(self, param: nn.Parameter) -> Iterator[None]:
        """Inside, a parameter that no engine owns yet has the status of one with values. At exit, every rank has what
        the modifier's rank has."""
        name_as_sharded(param, param.shape, is_open=True)
        try:
            yield
        finally:
            name_as_sharded(param, param.shape, is_open=False)
        if self._is_shared:
            values = param.detach().to(own_device(), copy=True).contiguous()
            comm.broadcast(values.view(-1).view(torch.uint8), src=self._source)  # gloo supports few dtypes
            if not torch.equal(values.to(param.device), param.detach()):
                param.data.copy_(values)

    @torch.no_grad()
    def _record_again(self, param: torch.Tensor, recorded: RecordedTensor, before: torch.Tensor) -> None:
        """A changed parameter keeps its memory, from which `initialize` takes its values."""
        if bool(_changed(param.data, before).any()):
            if self._source is not None:
                return
            self._lost.append(f"{recorded.label} of shape {list(param.shape)}")
        record_again(param, recorded)


class _Shown:
    """A parameter that shows full values: its own class and data are set aside."""

    def __init__(self, param: nn.Parameter, full: torch.Tensor) -> None:
        self.param, self.kind = param, type(param)
        param.__class__ = nn.Parameter  # the guard would refuse reads: see guarded_parameter.py
        self.data = param.data
        self.before = full.to(param.dtype)
        param.data = self.before.clone()


def _changed(found: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Which elements differ; nan equals nan."""
    if found.shape != before.shape:
        raise PlanError(
            f"zero.GatheredParameters: expected parameters to keep their shapes, found {list(found.shape)} for "
            f"{list(before.shape)}; build the model with that shape"
        )
    return (found != before) & ~(found.isnan() & before.isnan())


@contextmanager
def unwrap_model_for_generation(model: Engine) -> Iterator[Engine]:
    """Context without gradients in which each rank may call the engine, its module and `generate` as it needs.

    Every rank enters it. Weights are gathered by each call, not once for all; parameters are not readable inside.
    """
    if not isinstance(model, Engine):
        raise PlanError(f"unwrap_model_for_generation: expected the engine, found a {type(model).__name__}")
    with model.runtime.uneven_forwards():
        yield model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: parameters that another module reads are gathered by themselves."""


def __getattr__(name: str) -> NoReturn:
    raise missing(__name__, name)
