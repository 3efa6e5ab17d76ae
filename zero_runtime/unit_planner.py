"""Splits a model's parameters into units: the groups that are gathered, reduced and released together.

A unit is a repeated block (a member of an `nn.ModuleList` whose members have one class), an embedding or output head
that shares no weight, or the rest of the model under its root. A parameter used by several modules belongs to one unit,
that of the innermost unit module that contains all its users. All parameters of a unit have the same `requires_grad`
and the same precision.

A tied embedding therefore belongs to the root and stays unsharded during a complete pass. If it were released between
its two uses, each micro-batch would need a third gather of it, and the closed forms of the traffic
(predict/messages.py) would not hold.

[Note: unit size]
`unit_numel` bounds the number of elements of a unit. A larger unit is split into those of its submodules that have
parameters; smaller units are merged with their neighbours in the order of registration. A single parameter, or the
direct parameters of one module, are never split, so a unit may stay larger than the bound. The gradient norm is summed
by unit, so another unit size may change its last bit.

[Note: matrices]
Muon updates the matrices of the blocks whole and has other states for them than for the rest. They are in units of
their own, so that all parameters of a unit have the same states; a block then has two units. Without patterns they are
the trained parameters of two dimensions of the repeated blocks, except those that an nn.Embedding uses; with patterns,
all trained ones of two dimensions whose names match one.

[Note: modules that are one unit]
A module whose attribute ONE_UNIT is true is one unit with everything inside it: ranks and steps may then use different
parts of it. A container that is never called gives its parameters to the unit around it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zero_runtime.deferred_values import DeferredTensor
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import PlanError
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.slices import WHOLE, Slices
from zero_runtime.wings import CODED_MATRICES, load

log = logging.getLogger(__name__)

ROOT = ""
# Containers that are never called: a hook on them would never announce that their parameters are about to be read.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
ONE_UNIT = "_z3_leaf"  # DeepSpeed's name, which scripts set themselves, too
_NAME_OF_DTYPE = {TORCH_DTYPE[name]: name for name in ITEMSIZE_BYTES}


@dataclass(frozen=True)
class UnitRules:
    """Settings that, in addition to the model's structure, decide the units.

    unit_numel: see [Note: unit size]; None makes each block one unit. keep_dtype: patterns (as for file names) of the
    parameters that keep their dtype in the given model, such as `*norm*`; all others are cast to precision.param.
    matrices: the matrices that the optimizer updates whole are in units of their own, see [Note: matrices]; None if it
    has none.
    slices: the slices of parameters that this rank holds with tensor parallelism; `unit_numel` counts the elements of
    full parameters, so that the units are those of any degree.
    """

    precision: MixedPrecision = field(default_factory=MixedPrecision)
    unit_numel: int | None = None
    keep_dtype: tuple[str, ...] = ()
    matrices: tuple[str, ...] | None = None
    slices: Slices = WHOLE

    def __post_init__(self) -> None:
        if self.unit_numel is not None and self.unit_numel < 1:
            raise PlanError(
                f"zero.unit_numel: expected at least 1, or null for a unit a block; found {self.unit_numel}"
            )


@dataclass(frozen=True)
class UnitSpec:
    """A planned unit, before its tensors are allocated.

    modules: their calls decide when the unit is gathered and released. params: pairs of full name and parameter.
    shared: some parameter is used by several modules, so its gradient may arrive in several parts. matrices: see
    [Note: matrices]. slices: what this rank holds of the parameters, which are full ones until their unit is built.
    """

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[tuple[str, nn.Parameter], ...]
    trainable: bool
    precision: MixedPrecision
    shared: bool
    matrices: bool = False
    slices: Slices = WHOLE

    @property
    def is_coded(self) -> bool:
        """Whether the parameters are stored as codes."""
        return self.precision.weights is not None

    @property
    def numel(self) -> int:
        """Number of elements of the full parameters."""
        return sum(param.numel() for _, param in self.params)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Each parameter's name with the shape of this rank's tensor of it."""
        return [(name, self.slices.local_shape(name, tuple(param.shape))) for name, param in self.params]


def plan_units(model: nn.Module, rules: UnitRules | None = None) -> list[UnitSpec]:
    """Split the model's parameters into units, in the order in which the model registers them."""
    rules = rules or UnitRules()
    _refuse_unsupported(model)
    _check_dtypes(model, rules)
    users = _users_by_parameter(model)
    boundaries = _unit_modules(model, users, rules.unit_numel)
    matrices = _matrices(model, users, rules.matrices)
    coded = load(CODED_MATRICES)(model, block_modules(model), rules.keep_dtype) if rules.precision.weights else ()
    members: dict[tuple[str, bool, MixedPrecision, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():  # yields a tied parameter once, under its first name
        owner = _owner(users[id(param)], boundaries)
        kind = (owner, param.requires_grad, _precision_of(name, param, rules, coded), name in matrices)
        members.setdefault(kind, []).append((name, param))
    specs = [
        UnitSpec(
            name=_unit_name(owner, precision, rules, trainable=trainable) + (" (matrices)" if whole else ""),
            modules=(model.get_submodule(owner),),
            params=tuple(params),
            trainable=trainable,
            precision=precision,
            shared=any(len(users[id(param)]) > 1 for _, param in params),
            matrices=whole,
            slices=rules.slices,
        )
        for (owner, trainable, precision, whole), params in members.items()
    ]
    return specs if rules.unit_numel is None else _merge_small(specs, model, rules.unit_numel)


def block_modules(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model in order of registration, to which activation checkpointing is applied."""
    return [model.get_submodule(path) for path in _repeated_blocks(model)]


# ---- supported parameters --------------------------------------------------------------------------------------------


def _refuse_unsupported(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        plain = type(param) in (nn.Parameter, FakeTensor) or isinstance(param, DeferredTensor)
        if not plain:  # dry runs use fake parameters
            raise PlanError(
                f"parameter {name!r} is a {type(param).__name__}: expected a plain nn.Parameter; "
                "shard or quantise through the runtime, not before it"
            )
        if not param.is_floating_point():
            raise PlanError(f"parameter {name!r} has dtype {param.dtype}: expected a floating-point dtype")


def _check_dtypes(model: nn.Module, rules: UnitRules) -> None:
    """Refuse patterns that match no parameter; warn if parameters of several dtypes will all be cast to one."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in rules.keep_dtype:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(
                f"precision.keep_dtype: expected every pattern to match a parameter, found {pattern!r}, which matches "
                f"none of {', '.join(names[:5])}, ...; correct or remove it"
            )
    firsts: dict[torch.dtype, str] = {}
    for name, param in model.named_parameters():
        if not _keeps_dtype(name, rules):
            firsts.setdefault(param.dtype, name)
    if len(firsts) > 1:
        found = ", ".join(f"{dtype} ({name})" for dtype, name in firsts.items())
        log.warning(
            "the model has parameters of several dtypes: %s; all become precision.param=%s. Name those that should "
            "keep theirs in precision.keep_dtype",
            found,
            rules.precision.param,
        )


def _keeps_dtype(name: str, rules: UnitRules) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in rules.keep_dtype)


def _precision_of(name: str, param: nn.Parameter, rules: UnitRules, coded: Collection[str]) -> MixedPrecision:
    """The run's precision. For a parameter that keeps its dtype, that dtype replaces the param and compute dtypes, and
    the master dtype if the run's master dtype is narrower."""
    if not _keeps_dtype(name, rules):
        return rules.precision if name in coded else replace(rules.precision, weights=None)
    own = _NAME_OF_DTYPE.get(param.dtype)
    if own is None:
        raise PlanError(
            f"precision.keep_dtype: parameter {name!r} has dtype {param.dtype}; expected one of {sorted(TORCH_DTYPE)}"
        )
    wide = ITEMSIZE_BYTES[rules.precision.master] >= ITEMSIZE_BYTES[own]
    master = rules.precision.master if wide else own
    return replace(rules.precision, param=own, compute=None, master=master, weights=None)


def _unit_name(owner: str, precision: MixedPrecision, rules: UnitRules, *, trainable: bool) -> str:
    is_usual = precision == replace(rules.precision, weights=None)
    marks = ("" if trainable else " (frozen)") + ("" if is_usual else f" ({precision.weights or precision.param})")
    return (owner or "root") + marks


def _matrices(model: nn.Module, users: dict[int, list[str]], patterns: tuple[str, ...] | None) -> set[str]:
    """Names of the parameters that the optimizer updates whole. See [Note: matrices]."""
    if patterns is None:
        return set()
    trained = {
        name: param for name, param in model.named_parameters() if param.requires_grad and param.dim() == 2
    }  # a tied parameter is known by its first name
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in trained):
            raise PlanError(
                f"optimizer.matrices: expected every pattern to match a trained parameter of two dimensions, found "
                f"{pattern!r}, which matches none of {', '.join(list(trained)[:5])}, ...; correct or remove it"
            )
    if patterns:
        return {name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns)}
    blocks = set(_repeated_blocks(model))
    found = {
        name
        for name, param in trained.items()
        if any(_inside(user, block) for user in users[id(param)] for block in blocks)
        and not any(isinstance(model.get_submodule(user), nn.Embedding) for user in users[id(param)])
    }
    if not found:
        raise PlanError(
            "optimizer.kind=muon: expected trained matrices in the model's repeated blocks, found none; name the "
            "matrices that it shall orthogonalise in optimizer.matrices, or use optimizer=adamw"
        )
    return found


# ---- users of a parameter --------------------------------------------------------------------------------------------


def _users_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Paths of the modules that hold each parameter, registered or in plain attributes, by the parameter's id."""
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), []).append(path)
    for path, module in model.named_modules(remove_duplicate=False):
        for param in _hidden_parameters(module):
            if id(param) in users and path not in users[id(param)]:
                users[id(param)].append(path)
    return users


def _hidden_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters in plain attributes and containers, in which some models keep a weight that another module owns."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        yield from (item for item in items if isinstance(item, nn.Parameter))


def _owner(users: list[str], boundaries: set[str]) -> str:
    """Path of the innermost unit module that contains every user of a parameter; the root if no other does."""
    path = users[0]
    while path != ROOT:
        if path in boundaries and all(_inside(user, path) for user in users):
            return path
        path = path.rpartition(".")[0]
    return ROOT


def _inside(path: str, ancestor: str) -> bool:
    return ancestor == ROOT or path == ancestor or path.startswith(ancestor + ".")


# ---- the modules that bound units ------------------------------------------------------------------------------------


def _unit_modules(model: nn.Module, users: dict[int, list[str]], unit_numel: int | None) -> set[str]:
    blocks = set(_repeated_blocks(model))
    ends = {
        path
        for path, module in model.named_modules()
        # No subclasses: their weights may be read without a call (nn.MultiheadAttention reads its out_proj that way),
        # and such a unit would stay gathered until the reading module's call ends.
        if type(module) in (nn.Embedding, nn.Linear)
        and not any(_inside(path, block) for block in blocks)
        and all(len(users[id(param)]) == 1 for param in module.parameters())
    }
    boundaries = _with_whole_modules(model, blocks | ends)
    if unit_numel is not None:
        for path in sorted(boundaries | {ROOT}):
            boundaries |= set(_split_large(model, path, unit_numel, boundaries))
    return boundaries


def _with_whole_modules(model: nn.Module, boundaries: set[str]) -> set[str]:
    """The boundaries, with marked modules in place of those inside them."""
    marked = {path: module for path, module in model.named_modules() if getattr(module, ONE_UNIT, False)}
    outside = {path for path in boundaries if not any(_inside(path, whole) for whole in marked)}
    return outside | {path for path, module in marked.items() if not isinstance(module, _NEVER_CALLED)}


def _repeated_blocks(model: nn.Module) -> Iterator[str]:
    """Members of the outermost module lists whose members have one class; for a list of lists, of the inner lists. A
    list of one member counts if no list has more: the model then has one block."""
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
        if not isinstance(module[0], _NEVER_CALLED)
    }
    least = min(2, max(map(len, lists.values()), default=0))
    outermost: list[str] = []
    for path, module in lists.items():
        if len(module) >= least and not any(_inside(path, seen) for seen in outermost):
            outermost.append(path)
            yield from (f"{path}.{index}" for index in range(len(module)))


def _split_large(model: nn.Module, path: str, unit_numel: int, boundaries: set[str]) -> Iterator[str]:
    """Submodules of `path` that become units because the parameters that `path` still holds exceed the bound."""
    module = model.get_submodule(path)
    inner = [other for other in boundaries if other != path and _inside(other, path)]
    elsewhere = {id(param) for other in inner for param in model.get_submodule(other).parameters()}
    if sum(param.numel() for param in module.parameters() if id(param) not in elsewhere) <= unit_numel:
        return
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path in boundaries or next(child.parameters(), None) is None:
            continue
        if not isinstance(child, _NEVER_CALLED):
            yield child_path
        yield from _split_large(model, child_path, unit_numel, boundaries)


def _merge_small(specs: list[UnitSpec], model: nn.Module, unit_numel: int) -> list[UnitSpec]:
    """Merge neighbours of equal trainability and precision up to the bound.

    The root's units are not merged, because they stay gathered for the whole forward.
    """
    merged: list[UnitSpec] = []
    open_at: dict[tuple[bool, MixedPrecision, bool], int] = {}
    for spec in specs:
        kind = (spec.trainable, spec.precision, spec.matrices)
        place = open_at.get(kind)
        if spec.modules[0] is model:
            merged.append(spec)
        elif place is not None and merged[place].numel + spec.numel <= unit_numel:
            merged[place] = _join(merged[place], spec)
        else:
            open_at[kind] = len(merged)
            merged.append(spec)
    return merged


def _join(first: UnitSpec, second: UnitSpec) -> UnitSpec:
    return replace(
        first,
        name=f"{first.name.partition(' .. ')[0]} .. {second.name}",
        modules=first.modules + tuple(module for module in second.modules if module not in first.modules),
        params=first.params + second.params,
        shared=first.shared or second.shared,
    )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the model's buffers to the device; they keep their dtypes (rotary frequencies need fp32)."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
