"""Traces the memory of one forward, loss and backward of a model by running them on fake tensors.

[Note: what is real in a dry step]
Parameters are fake tensors of the compute dtype: shapes, dtypes and storages without memory. Every result that depends
on one is fake too, so the model's own code, autograd and recomputation run, and every storage is created and freed as
in a real step. Results of inputs and buffers alone (positions, masks, rotary tables) are computed, since models branch
on their values; they are small compared with the others and are counted in the same way.

[Note: kernels]
Operations are those of a CPU, down to the kernels that torch chooses there. For a CUDA device attention and
normalizations differ (CudaAttention; cuda_norms.py). The scratch memory inside a kernel is not counted; for products of
16-bit matrices on a CPU it depends on the processor (docs/platforms.md).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_runtime.activations.recompute import Recomputation
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.guarded_parameter import ParameterGuard
from zero_runtime.module_hooks import ModuleHooks
from zero_runtime.offload.copy_streams import CopyEvent, HoldingCopies
from zero_runtime.predict.memory.activation_count import Mark, Trace
from zero_runtime.predict.memory.cuda_norms import CudaRMSNorm, cuda_layer_norm
from zero_runtime.state_bytes import ONE_NUMBER_BYTES
from zero_runtime.unit_planner import UnitRules, UnitSpec, block_modules, plan_units

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default  # what reading `device` of a fake tensor calls
_ATTENTION = F.scaled_dot_product_attention  # torch's, also where a test has put another in its place
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM, MASK_ALIGNMENT = 256, 8


class Counter(TorchDispatchMode):
    """Mode that traces every storage that an operation creates, from its first tensor to the end of its last user.

    `existing`: tensors whose storages existed before and are not traced. observe: called after each operation with the
    number of marks before it, the operation, its arguments and its result. on_cuda: LayerNorm's results are CUDA's.
    """

    def __init__(
        self, existing: Iterable[torch.Tensor], observe: Callable[..., None] | None = None, *, on_cuda: bool = False
    ) -> None:
        super().__init__()
        self._on_cuda = on_cuda
        self.trace = Trace()
        self._observe = observe
        self.in_block = self.on_host = False
        self._known: dict[int, weakref.ref[torch.UntypedStorage] | None] = {_key(one): None for one in existing}
        self._fakes = _FakesOfReal()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls, each of which would pass through all modes
        with torch._C.DisableTorchFunction():  # function modes would be asked for each attribute of a tensor in here
            args = self._fakes.in_place_of_real(func, args)
            fake = next((one.fake_mode for one in args if isinstance(one, FakeTensor)), None)
            # A fake tensor would enter its mode and call again, which takes a fifth of the time of all operations.
            result: Any = func(*args, **(kwargs or {})) if fake is None else fake.dispatch(func, types, args, kwargs)
            if self._on_cuda and func is _aten.native_layer_norm.default:
                result = cuda_layer_norm(*result)
            if isinstance(result, torch.Tensor):
                self._see(result)
            else:
                for tensor in tree_leaves(result):
                    if isinstance(tensor, torch.Tensor):
                        self._see(tensor)
            if self._observe is not None:
                self._observe(len(self.trace.marks), func, args, kwargs or {}, result)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or storage.nbytes() <= ONE_NUMBER_BYTES:
            return
        number = self.trace.came(storage.nbytes(), in_block=self.in_block, on_host=self.on_host)

        def gone(_ref: object) -> None:
            del self._known[key]
            self.trace.went(number)

        self._known[key] = weakref.ref(storage, gone)


class _FakesOfReal:
    """Fake tensors of the real ones that operations read together with fake ones, such as rotary tables.

    An operation with fake tensors makes such a fake tensor of each real one itself, every time anew, and torch does
    not keep what it then finds out about the operation's result.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[weakref.ref[torch.UntypedStorage], torch.Tensor]] = {}

    def in_place_of_real(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments, real tensors replaced if another one is fake. Those in lists, and those of an operation that
        changes one, are left to torch."""
        if not any(type(one) is torch.Tensor for one in args):
            return args
        fake = next((one.fake_mode for one in args if isinstance(one, FakeTensor)), None)
        if fake is None or func._schema.is_mutable:
            return args
        return [self._fake_of(one, fake) if type(one) is torch.Tensor else one for one in args]

    def _fake_of(self, real: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
        storage = real.untyped_storage()
        key = (storage._cdata, real.storage_offset(), real.shape, real.stride(), real.dtype)
        known = self._made.get(key)
        if known is None or known[0]() is None:  # a storage that has ended, whose address is used again
            known = weakref.ref(storage), fake.fake_tensor_converter.from_real_tensor(fake, real)
            self._made[key] = known
        return known[1]


def trace_step(
    model: nn.Module,
    rules: UnitRules,
    recompute: RecomputeRule,
    inputs: Sequence[torch.Tensor],
    loss_of: Callable[..., torch.Tensor],
    *,
    on_cuda: bool = False,
    observe: Callable[..., None] | None = None,
    autocast: torch.dtype | None = None,
) -> Trace:
    """Trace the storages that `loss_of(model, *inputs)` and its backward create and free.

    The runtime's own hooks mark in the trace when units are used. The model must be on the meta device and cannot be
    used afterwards. observe: called for each operation, see `Counter`. autocast: the model's forward runs under
    torch.autocast to this dtype, with fp32 weights where they are trained; the casts of weights are traced.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = recompute.offload == "none"  # its keys would keep offloaded storages alive
    with fake:
        specs = give_parameters(model, rules, torch.empty, trained=None if autocast is None else torch.float32)
    params = [param for spec in specs for _, param in spec.params]
    counter = Counter([*params, *model.buffers(), *inputs], observe, on_cuda=on_cuda)
    marking = MarkingSchedule(counter.trace)
    if on_cuda:  # before Recomputation wraps the blocks, so that the recomputation uses it too
        for module in _covering(model):
            module.forward = _OnCuda(module.forward)
    recomputation = Recomputation(model, recompute, copies=_FakeCopies(fake, counter) if on_cuda else None)
    for block in block_modules(model):  # after Recomputation, so that only the first forward is marked
        block.forward = _Marked(block.forward, counter)
    if autocast is not None:
        # The CPU's list of operations. CUDA's computes norms and softmax in fp32 as well; their inputs are fp32 without
        # it in models whose norms read the residual stream.
        model.forward = torch.autocast("cpu", autocast)(model.forward)
    units = [MarkedUnit(spec, position, marking) for position, spec in enumerate(specs)]
    hooks = ModuleHooks(model, cast("list[Any]", units), cast("Any", marking))
    with _no_collection(), counter:
        loss = loss_of(model, *inputs)
        # Recomputing blocks keep the CPU's random state, which no operation creates. (A GPU's is stored on the host.)
        states = 0 if on_cuda else len(recomputation.blocks) * torch.get_rng_state().nbytes
        counter.trace.random_state_bytes = states
        counter.trace.forward_end = len(counter.trace.events)
        marking.begin_backward()
        loss.backward()
        hooks.end_graphs()
        del loss
    if autocast is not None:
        counter.trace.order_ends()
    return counter.trace


def give_parameters(
    model: nn.Module, rules: UnitRules, make: Callable[..., torch.Tensor], trained: torch.dtype | None = None
) -> list[UnitSpec]:
    """Replace every parameter with `make(shape of its slice, dtype=its compute dtype)`; tied parameters stay tied.
    trained: the dtype of those that are trained, for autocast, which casts what it computes with; the others are then
    in the dtype that they are held in.

    Returns the units of the full model, with the new parameters: units planned from slices could be others.
    """
    made: dict[int, nn.Parameter] = {}
    specs = plan_units(model, rules)
    for spec in specs:
        precision = spec.precision
        dtype = TORCH_DTYPE[precision.param if trained is not None else precision.compute or precision.param]
        for (_, param), (_, shape) in zip(spec.params, spec.shapes, strict=True):
            own = trained if trained is not None and param.requires_grad else dtype
            made[id(param)] = nn.Parameter(make(shape, dtype=own), requires_grad=param.requires_grad)
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None:
                module._parameters[name] = made[id(held)]
    return [replace(spec, params=tuple((name, made[id(param)]) for name, param in spec.params)) for spec in specs]


class _Marked:
    """A block's forward that marks in the counter when it runs."""

    def __init__(self, forward: Callable[..., Any], counter: Counter) -> None:
        self._forward, self._counter = forward, counter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._counter.in_block = True
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._counter.in_block = False


class _OnCuda:
    """A forward that enters the function modes itself: torch suspends the caller's in a backward, which recomputes."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with CudaAttention(), CudaRMSNorm():
            return self._forward(*args, **kwargs)


def _covering(model: nn.Module) -> list[nn.Module]:
    """The blocks, and what is outside of them (a last norm) in its smallest modules; without blocks, the model."""
    blocks = block_modules(model) or [model]
    inside = {module for block in blocks for module in block.modules()}
    return [*blocks, *(module for module in model.modules() if module not in inside and not module._modules)]


class MarkingSchedule:
    """Takes the place of the runtime's schedule: records in a trace what the hooks report to it."""

    in_backward = sums_locally = releases_in_forward = False
    backwards = 0

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def begin_backward(self) -> None:
        self.in_backward, self.backwards = True, 1

    def before_unit_forward(self, unit: MarkedUnit) -> None:
        self.trace.mark(Mark.BEFORE_FORWARD, unit.position)

    def after_unit_forward(self, unit: MarkedUnit) -> None:
        self.trace.mark(Mark.AFTER_FORWARD, unit.position)

    def end_forward(self) -> None:
        """Not an event of a unit."""

    def before_unit_backward(self, unit: MarkedUnit) -> None:
        self.trace.mark(Mark.BEFORE_BACKWARD, unit.position)

    def after_unit_backward(self, unit: MarkedUnit) -> None:
        self.trace.mark(Mark.AFTER_BACKWARD, unit.position)


class MarkedUnit:
    """A planned unit whose parameters are always there, and which marks the first gradient in the trace."""

    def __init__(self, spec: UnitSpec, position: int, marking: MarkingSchedule) -> None:
        self.name, self.modules = spec.name, spec.modules
        self.trainable, self.shared = spec.trainable, spec.shared
        self.params = [param for _, param in spec.params]
        self.position = position
        self.uses = 0
        self._trace = marking.trace
        self._has_gradient = False

    def begin_use(self) -> None:
        self.uses += 1

    def end_use(self) -> None:
        self.uses -= 1

    def guard_with(self, guard: ParameterGuard | None) -> None:
        """Open the guard for good: the parameters may be read at any time."""
        if guard is not None:
            guard.open()

    def take_grad(self, index: int, *, sums_locally: bool) -> None:
        """Drop the gradient: the runtime copies it to the flat gradient, which is a model state."""
        if not self._has_gradient:
            self._has_gradient = True
            self._trace.mark(Mark.GRADIENT, self.position)
        self.params[index].grad = None


@contextmanager
def _no_collection() -> Any:
    """Disable garbage collection: it would free cycles at unpredictable times, and two traces would differ."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _FakeCopies(HoldingCopies):
    """Synchronous copies between fake tensors; host buffers are counted as host memory.

    Sources are held as long as CUDA's copies hold them: see [Note: memory in program order] in copy_streams.py.
    """

    def __init__(self, fake: FakeTensorMode, counter: Counter) -> None:
        super().__init__(torch.device("cpu"))
        self._fake, self._counter = fake, counter

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._counter.on_host = True
        try:
            with self._fake:
                return torch.empty(numel, dtype=dtype)
        finally:
            self._counter.on_host = False

    def bring(self, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> tuple[torch.Tensor, CopyEvent]:
        with self._fake:
            return super().bring(source, after)


class CudaAttention(TorchFunctionMode):
    """Mode in which attention is the operation that torch chooses on Ampere and newer GPUs, by shapes and dtypes.

    16-bit dtypes, no mask and heads of at most 256: flash attention, which keeps its inputs, its output and one
    logarithm per row and head (cuDNN's attention, which torch prefers on some GPUs, keeps the same). Otherwise, without
    grouped heads: memory-efficient attention, which keeps the mask too. Otherwise: attention composed of matrix
    products, which keeps its scores.
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if query.dtype in FLASH_DTYPES and attn_mask is None and max(width, value.shape[-1]) <= FLASH_HEAD_DIM:
        padding = (0, -width % 8)  # flash takes head sizes in multiples of 8; padding copies the inputs
        heads = [F.pad(one, padding) if padding[1] else one for one in (query, key, value)]
        return _aten._scaled_dot_product_flash_attention(*heads, dropout_p, is_causal, scale=scale)[0][..., :width]
    if query.shape[1] == key.shape[1]:
        bias = _bias(attn_mask, query, key)
        efficient = _aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    composed = _aten._scaled_dot_product_attention_math
    return composed(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask in the memory-efficient kernel's format: numbers of the query's dtype, rows padded for its loads."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:  # as torch converts it; fake numbers, since a real mask of seq x seq takes its time
        mask = torch.where(mask, query.new_zeros(()), query.new_full((), -torch.inf))
    length = key.shape[-2]
    if length % MASK_ALIGNMENT:
        mask = F.pad(mask, (0, -length % MASK_ALIGNMENT))[..., :length]
    return mask.expand(*query.shape[:2], query.shape[-2], length)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
