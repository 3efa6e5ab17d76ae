"""Parameters without memory: they remember the operations that gave them their values, and repeat them when asked.

Inside `recording()` a module that registers a parameter of uninitialised memory, as all layers of torch do, loses that
memory. Its parameter becomes a RecordedTensor: each operation that writes to it runs as it would anywhere, which also
advances the random generator, and is remembered with the generator's state and copies of its other operands. A read
repeats the operations. So at any later time the values are those of plain PyTorch, bit for bit, and only the parameter
that was used last has memory. A parameter that has values when it is registered, or whose memory other tensors use,
stays as it is.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zero_runtime.deferred_values import DeferredTensor, swap_content, values_of
from zero_runtime.errors import PlanError

_ATEN = torch.ops.aten
_BLANK = (
    *(_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
)
_SETTERS = (
    *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.zero_.default, _ATEN.copy_.default),
    *(_ATEN.fill_.Scalar, _ATEN.fill_.Tensor),
)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # those with a nan for what is not written
_REPLACES_MEMORY = ("set_", "resize_", "resize_as_")
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # missing in torch's stubs


@contextmanager
def recording() -> Iterator[None]:
    """Record the parameters of the modules that are built inside."""
    blank = _BlankMemory()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and param.dtype in _DTYPES and blank.holds(param):
            _record(param, f"{type(module).__name__}.{name}")

    handle = register_module_parameter_registration_hook(register)
    try:
        with blank:
            yield
    finally:
        handle.remove()
        _forget_values()


class RecordedTensor(DeferredTensor):
    """A parameter without memory, or a view of one."""

    memory: _Memory

    @property
    def label(self) -> str:
        """The module's class and the parameter's name in it."""
        return self.memory.label

    def computed(self, name: str) -> torch.Tensor:
        values = _part(self, self.memory.current())
        _forget_values()  # the caller owns them
        if name and bool(torch.isnan(values).any()):
            raise PlanError(
                f"parameter {name!r} ({self.label}) was built inside zero.Init() and not all of it was given a "
                "value: expected its module, or one around it, to set it, as by nn.init; set it in the constructor, or "
                f"in `with GatheredParameters({name}, modifier_rank=0)` before initialize"
            )
        return values

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA and isinstance(args[0], RecordedTensor):
            return _replace(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = _like(self, self.memory.copy(memo))
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        values = values_of(self)
        return nn.Parameter(values, self.requires_grad) if isinstance(self, nn.Parameter) else values


def take_values(param: RecordedTensor) -> RecordedTensor:
    """Make it a plain parameter with its values in memory. Returns what `record_again` needs."""
    recorded = _like(param, param.memory)
    recorded.requires_grad_(param.requires_grad)
    param.data = values_of(param)
    return recorded


def record_again(param: torch.Tensor, recorded: RecordedTensor) -> None:
    """Undo `take_values`, with all that was written to the parameter since."""
    marked = nn.Parameter(recorded, recorded.requires_grad)  # with torch's attribute that tells a parameter
    swap_content(param, marked)
    param.__class__ = RecordedTensor
    vars(param).update(vars(marked))


# ---- one operation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """A recorded tensor as the operand of an operation: a part of a memory as it is after `count` operations.

    memory: None for the one that the operation writes to, which has copies. operations: the memory's list then.
    """

    memory: _Memory | None
    operations: list[_Operation]
    count: int
    size: torch.Size
    stride: Sequence[Any]
    offset: Any

    def real(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of its memory's values, or of `flat`, what the operation writes to."""
        values = flat if self.memory is None else self.memory.repeat(self.operations[: self.count])
        return values.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Operation:
    """An operation that wrote into a memory.

    generator, state: of its random numbers, before it; None if it has none.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generator: torch.Generator | None
    state: torch.Tensor | None

    def repeat(self, flat: torch.Tensor) -> None:
        """Do to `flat` what was done to the memory."""
        args, kwargs = tree_map(lambda one: one.real(flat) if isinstance(one, _View) else one, (self.args, self.kwargs))
        if self.generator is None or self.state is None:
            self.func(*args, **kwargs)
            return
        before = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            self.func(*args, **kwargs)
        finally:
            self.generator.set_state(before)


@dataclass(eq=False)
class _Memory:
    """What stands for the memory of a parameter: its size, and all that was written to it since it was allocated."""

    label: str
    numel: int
    dtype: torch.dtype
    device: torch.device
    operations: list[_Operation] = field(default_factory=list)

    def repeat(self, operations: Sequence[_Operation]) -> torch.Tensor:
        """The values after these operations, flat; nan where nothing was written."""
        flat = self.unset().fill_(torch.nan)
        for operation in operations:
            operation.repeat(flat)
        return flat

    def unset(self) -> torch.Tensor:
        """Memory for the values.

        On the host it is mapped by itself, so that the system gets it back: the allocator would put small tensors that
        stay into the gaps, and grow by each parameter.
        """
        if self.device.type != "cpu" or not self.numel:
            return torch.empty(self.numel, dtype=self.dtype, device=self.device)
        return torch.frombuffer(mmap.mmap(-1, self.numel * self.dtype.itemsize), dtype=self.dtype)

    def current(self) -> torch.Tensor:
        """The values now, flat. They stay in memory until those of another memory are asked for."""
        if not _LAST or _LAST[0][0] is not self:
            _forget_values()
            _LAST[:] = [(self, self.repeat(self.operations))]
        return _LAST[0][1]

    def copy(self, memo: dict[int, Any]) -> _Memory:
        """Another memory with the same values; the same one for all copies that are made with one `memo`."""
        copied = _Memory(self.label, self.numel, self.dtype, self.device, list(self.operations))
        return memo.setdefault(id(self), copied)


_LAST: list[tuple[_Memory, torch.Tensor]] = []  # the memory that was used last, and its values; at most one


def _forget_values() -> None:
    _LAST.clear()


@torch.no_grad()
def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has recorded operands; what it writes to them is remembered.

    Views are recorded tensors, all other results are plain ones.
    """
    if func is _ATEN.detach.default:
        return _like(args[0], args[0].memory)
    if func.overloadpacket.__name__ in _REPLACES_MEMORY:
        if args[0] is args[-1]:  # torch's parametrizations do that
            return args[0]
        raise PlanError(
            f"zero.Init: {next(_recorded((args, kwargs))).label}: found {func.overloadpacket.__name__}, which "
            "replaces a parameter's memory; assign to its `data`, or a new nn.Parameter to the module"
        )
    written = list(dict.fromkeys(one.memory for one in _recorded(_written(func, args, kwargs))))
    generator = _generator(func, kwargs, written)
    state = None if generator is None else generator.get_state()
    counts = {one.memory: len(one.memory.operations) for one in _recorded((args, kwargs))}
    overwritten = written[0] if _sets_all(func, args, kwargs) else None
    held = {memory: memory.unset() if memory is overwritten else memory.current() for memory in counts}

    def real(one: Any) -> Any:
        return _part(one, held[one.memory]) if isinstance(one, RecordedTensor) else one

    result = func(*tree_map(real, args), **tree_map(real, kwargs))
    if not written:
        return tree_map(partial(_viewed, held=held), result)
    if overwritten is not None:
        overwritten.operations = []  # another list: operations on other memories may have views of this one
    for memory in written:
        kept_args, kept_kwargs = tree_map(partial(_kept, counts=counts, target=memory), (args, kwargs))
        memory.operations.append(_Operation(func, kept_args, kept_kwargs, generator, state))
        _LAST[:] = [(memory, held[memory])]
    outs = _written(func, args, kwargs)
    return outs[0] if len(outs) == 1 and isinstance(result, torch.Tensor) else (None if result is None else outs)


def _sets_all(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operation gives every element of one memory a value that depends on none of it."""
    if func not in _SETTERS or not isinstance(args[0], RecordedTensor):
        return False
    memory = args[0].memory
    others = {one.memory for one in _recorded((args[1:], kwargs))}
    return args[0].numel() == memory.numel and args[0].is_contiguous() and memory not in others


def _kept(operand: Any, *, counts: dict[_Memory, int], target: _Memory) -> Any:
    """An operand as an operation on `target` keeps it: with its values now, whatever is written to it later."""
    if isinstance(operand, RecordedTensor):
        memory = operand.memory
        other = None if memory is target else memory
        place = operand.size(), operand.stride(), operand.storage_offset()
        return _View(other, memory.operations, counts[memory], *place)
    return operand.detach().clone() if isinstance(operand, torch.Tensor) else operand


def _generator(func: Any, kwargs: Mapping[str, Any], written: Sequence[_Memory]) -> torch.Generator | None:
    """The generator from which a recorded operation takes its random numbers."""
    if not written or torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    device = written[0].device
    default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    return kwargs.get("generator") or default


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The operands that the operation changes in place."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += tree_leaves(given)
    return found


def _recorded(values: Any) -> Iterator[RecordedTensor]:
    return (one for one in tree_leaves(values) if isinstance(one, RecordedTensor))


# ---- recorded tensors ----------------------------------------------------------------------------------------------


def _part(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _viewed(result: Any, *, held: dict[_Memory, torch.Tensor]) -> Any:
    """A recorded tensor for a result that is a view of a recorded one; every other result as it is."""
    if not isinstance(result, torch.Tensor):
        return result
    for memory, flat in held.items():
        if result.untyped_storage()._cdata == flat.untyped_storage()._cdata:
            if result.dtype != memory.dtype:
                raise PlanError(f"zero.Init: {memory.label}: expected views of its dtype, found {result.dtype}")
            return _like(result, memory)
    return result


def _like(tensor: torch.Tensor, memory: _Memory) -> RecordedTensor:
    """A recorded tensor that covers of `memory` what `tensor` covers of its own."""
    made: RecordedTensor = torch.Tensor._make_wrapper_subclass(
        RecordedTensor,
        tensor.size(),
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=memory.dtype,
        device=memory.device,
    )
    made.memory = memory
    return made


def _record(param: nn.Parameter, label: str) -> None:
    """Take the parameter's memory, unless other tensors use it. The object stays the same."""
    whole = param.untyped_storage()
    shape = torch.empty_strided(param.size(), param.stride(), device="meta")
    offset, reference = param.storage_offset(), StorageWeakRef(whole)
    memory = _Memory(label, whole.nbytes() // param.element_size(), param.dtype, param.device)
    param.data = param.new_empty(0)
    del whole
    if not reference.expired():
        shared = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        param.data = param.new_empty(0).set_(shared, offset, shape.size(), shape.stride())
        return
    recorded = _like(torch.as_strided(shape, shape.size(), shape.stride(), offset), memory)
    recorded.requires_grad_(param.requires_grad)
    record_again(param, recorded)


def _replace(param: RecordedTensor, data: torch.Tensor) -> None:
    """`param.data = data`: the parameter has the memory of `data` from now on, and is a plain one if that is."""
    requires_grad = param.requires_grad
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise PlanError(
            f"zero.Init: {param.label}: expected hooks on gradients to be registered after initialize, found one before"
        )
    if isinstance(data, RecordedTensor):
        new: torch.Tensor = _like(data, data.memory).requires_grad_(requires_grad)
        param.memory = data.memory
    else:
        new = nn.Parameter(data.new_empty(0), requires_grad=requires_grad)
        new.data = data
        param.__class__ = nn.Parameter if isinstance(param, nn.Parameter) else torch.Tensor  # type: ignore[assignment]
    swap_content(param, new)


class _BlankMemory(TorchDispatchMode):
    """Knows which memory was allocated inside and not written since."""

    def __init__(self) -> None:
        super().__init__()
        self._blank: set[StorageWeakRef] = set()

    def holds(self, param: nn.Parameter) -> bool:
        """Whether all of the parameter's memory is blank."""
        return StorageWeakRef(param.untyped_storage()) in self._blank

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _BLANK and type(result) is torch.Tensor and not result.is_meta:
            self._blank.add(StorageWeakRef(result.untyped_storage()))
            return result
        for one in _written(func, args, kwargs or {}):
            if isinstance(one, torch.Tensor) and not isinstance(one, RecordedTensor):
                self._blank.discard(StorageWeakRef(one.untyped_storage()))
        return result
