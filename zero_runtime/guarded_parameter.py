"""The parameter class that checks every operation on a parameter while its unit is not in use.

[Note: reads outside the owner]
torch does not check for a released storage: a matrix product with it raises, but an addition crashes the process, and a
stale copy silently gives wrong numbers. References to a parameter that other code holds cannot be revoked. So between
its uses the class of a parameter is a subclass of nn.Parameter, whose `__torch_function__` intercepts every operation
on it through any reference. While its unit is in use it is a plain nn.Parameter again, so forward and backward have no
overhead; with a permanent subclass every operation that takes a parameter would run Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from zero_runtime.errors import ParameterReadError

_Tensor = torch.Tensor
SAVE_BEFORE = "save the weights before (engine.save_checkpoint or save_16bit_model), make the model anew and load them"
_DESCRIPTIONS = (
    *("shape", "dtype", "device", "layout", "ndim", "names", "name", "itemsize", "nbytes", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested"),
    *("is_mkldnn", "is_vulkan", "is_ipu", "is_xla", "is_mtia", "is_maia", "output_nr", "retains_grad", "_version"),
    *("_base", "grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "volatile"),
)
_METHODS = (
    *("size", "numel", "nelement", "dim", "ndimension", "stride", "storage_offset", "element_size", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference"),
    *("is_shared", "is_pinned", "is_same_size", "is_set_to", "_is_view", "__len__", "dim_order", "requires_grad_"),
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
)
_FUNCTIONS = (
    *("_has_compatible_shallow_copy_type", "numel", "is_floating_point", "is_complex", "is_signed", "is_conj"),
    *("is_neg", "is_inference"),
)
# Operations that describe a parameter without reading its values.
_DESCRIBES = frozenset(
    [
        *(getattr(_Tensor, name).__get__ for name in _DESCRIPTIONS if hasattr(_Tensor, name)),
        *(getattr(_Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
        *(getattr(_Tensor, name) for name in _METHODS if hasattr(_Tensor, name)),
        *(getattr(torch, name) for name in _FUNCTIONS),
    ]
)
# Operations that return the storage. They only wait for a gather under way: the storage of a released parameter is
# empty, so no value can be misread.
_LOCATES = frozenset({_Tensor.untyped_storage, _Tensor.data_ptr, _Tensor.storage})
_SET_DATA = _Tensor.data.__set__  # type: ignore[attr-defined]  # missing in torch's stubs


class GuardedParameter(nn.Parameter):
    """A parameter whose unit is not in use; each unit has its own subclass. Copies and pickles are plain parameters."""

    _guard: ClassVar[ParameterGuard | ClosedGuard]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DESCRIBES and not _stays_itself(func, args, kwargs):
            for param in _guarded_in((*args, *kwargs.values())):
                param._guard.check(param, func, is_written=_writes(func, param, args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @property
    def ds_status(self) -> Any:
        """DeepSpeed's status of a parameter that is not in use; see deepspeed/sharded_names.py."""
        try:
            return type(self.__dict__["ds_status"]).NOT_AVAILABLE
        except KeyError:
            raise AttributeError("ds_status: the parameters of this plan are not sharded") from None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copied
        return copied


class Owner(Protocol):
    """The interface of a unit that its guard uses."""

    @property
    def params(self) -> Sequence[nn.Parameter]: ...

    @property
    def name(self) -> str: ...

    @property
    def loses_writes(self) -> bool: ...

    def name_of(self, param: nn.Parameter) -> str: ...

    def wait_current(self) -> bool: ...


class ParameterGuard:
    """Closes and opens the parameters of one unit. They are closed initially; repeating a call is a no-op.

    on_touch: called before a checked operation; may gather the unit if that is safe.
    """

    def __init__(self, unit: Owner, on_touch: Callable[[], None]) -> None:
        self._unit = unit
        self._on_touch = on_touch
        self._class = _guarded_class(self)
        self._params = [param for param in unit.params if type(param) is nn.Parameter]  # the others are fake tensors
        self._closed = False
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for param in self._params:
                param.__class__ = self._class

    def open(self) -> None:
        if self._closed:
            self._closed = False
            for param in self._params:
                param.__class__ = nn.Parameter

    def check(self, param: nn.Parameter, func: Callable[..., Any], *, is_written: bool) -> None:
        """Allow the operation if the parameter holds this step's values, after waiting for a gather under way.

        Raises ParameterReadError otherwise, and for a write that the next step would undo.
        """
        unit = self._unit
        if func in _LOCATES:
            unit.wait_current()
            return
        self._on_touch()
        if not unit.wait_current():
            trouble = "where this rank has only its shard of this step's values"
        elif is_written and self._closed and (unit.loses_writes or func == _SET_DATA):
            trouble = "where the next step would undo the write"
        else:
            return
        name = unit.name_of(param)
        verb, more = ("written", ", write=True") if is_written else ("read", "")
        trains = "to train through it, read it inside the model's forward, a penalty too; for its value alone, "
        raise ParameterReadError(
            f"parameter {name!r} (unit {unit.name}) was {verb} outside of forward and backward, {trouble}; "
            f"{'' if is_written else trains}on every rank, use its copy, which has no graph, in "
            f"`with runtime.full_params([{name!r}]{more}) as values:` (the drop-in: engine.runtime.full_params; "
            "engine.save_16bit_model writes all weights)"
        )


class ClosedGuard:
    """Closes parameters for good: the runtime that was closed had no full values of them on this rank."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(param): name for name, param in named.items()}
        kind = _guarded_class(self)
        for param in named.values():
            if type(param) is nn.Parameter:
                param.__class__ = kind

    def check(self, param: nn.Parameter, func: Callable[..., Any], *, is_written: bool) -> None:
        """Raise ParameterReadError, except where the storage alone is asked for, which is empty."""
        if func not in _LOCATES:
            raise ParameterReadError(
                f"parameter {self._names[id(param)]!r}: its runtime was closed (engine.destroy) when this rank had "
                f"only a part of its values; {SAVE_BEFORE}"
            )


def _guarded_class(guard: ParameterGuard | ClosedGuard) -> type[GuardedParameter]:
    return type("GuardedParameter", (GuardedParameter,), {"_guard": guard})


def _guarded_in(values: Any) -> Iterator[GuardedParameter]:
    for value in values:
        if issubclass(type(value), GuardedParameter):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _guarded_in(value)
        elif isinstance(value, dict):
            yield from _guarded_in(value.values())


def _stays_itself(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation sets the data, device or dtype that the parameter has, as `module.to(device)` may."""
    param, *given = args or (None,)
    if func == _SET_DATA:
        return given[0] is param
    if func is not _Tensor.to or any(isinstance(value, torch.Tensor) for value in given):
        return False
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*given, **kwargs)
    except (TypeError, RuntimeError):  # the `copy` argument, or arguments that `to` itself will refuse
        return False
    return (
        (device is None or torch.empty(0, device=device).device == param.device)
        and (dtype is None or dtype == param.dtype)
        and memory_format is None
    )


def _writes(func: Callable[..., Any], param: nn.Parameter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation changes the parameter in place, judging by the operation's name."""
    name = getattr(func, "__name__", "")
    in_place = func == _SET_DATA or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return (in_place and any(one is param for one in _guarded_in(args[:1]))) or any(
        one is param for one in _guarded_in((kwargs.get("out"),))
    )
