"""Initial values of meta parameters and buffers, drawn one parameter at a time from the seed and the parameter's name.

A parameter's initial value depends only on (seed, name) and on the initialisation rule of its modules, not on other
draws. So it is the same for every plan, world size, unit size and device. The modules' own rules are applied by
running them: the one parameter gets real memory, all others stay on the meta device (where drawing costs nothing and
advances no generator), and the initialisers of its module and of every enclosing module run from the inside out, as
`model.apply` would run them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zero_runtime.deferred_values import DeferredTensor, swap_content
from zero_runtime.errors import PlanError

Initialise = Callable[[nn.Module], None]
_OWN_RULES = ("reset_parameters", "_reset_parameters")  # torch's own layers use both names
_SEED_BYTES = 8


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build models inside this context with parameters on the meta device and buffers with their real values.

    A parameter's memory is freed when its module registers it, so at most one parameter has memory at a time, and
    random draws into it after that cost nothing. (`torch.device("meta")` would also lose the buffers: a rotary table
    computed in a constructor could not be recovered.) The CPU's random state is restored at exit.
    """
    handle = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]  # it may return a new one
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        handle.remove()


def _to_meta(_module: nn.Module, _name: str, param: nn.Parameter | None) -> nn.Parameter | None:
    # `plan_units` refuses other types with their name
    if not (type(param) is nn.Parameter or isinstance(param, DeferredTensor)) or param.is_meta:
        return None
    return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)


class InitialValues:
    """Draws the initial values of a model's meta parameters and meta buffers.

    The rule of a module is the first of these that exists: `initialise`; the `_init_weights` of the nearest enclosing
    module that has one (the convention of Hugging Face); the module's own reset_parameters. Values that a constructor
    writes into a parameter after registering it are lost on the meta device: write them in one of these rules instead.
    A tied parameter follows the modules of its first name.
    """

    def __init__(self, model: nn.Module, *, seed: int, initialise: Initialise | None = None) -> None:
        self._model = model
        self._seed = seed
        self._initialise = initialise
        _refuse_mixed_devices(model)

    def draw(self, name: str, param: nn.Parameter) -> torch.Tensor:
        """The initial value of a meta parameter: a CPU tensor of its dtype and shape, owned by the caller.

        `param` stays on the meta device. Raises PlanError if the modules' rules leave any element unset.
        """
        real = nn.Parameter(torch.full(param.shape, torch.nan, dtype=param.dtype), requires_grad=param.requires_grad)
        path = name.rpartition(".")[0]
        swap_content(param, real)  # every user of the parameter now sees real memory
        try:
            self._run_rules(name, list(_around(path)), param)
        finally:
            swap_content(param, real)
        if bool(torch.isnan(real.detach()).any()):
            raise PlanError(self._unset_message("parameter", name, path))
        return real.detach()

    def fill_buffers(self) -> None:
        """Give every meta buffer its values by its module's own rule. Call it before any parameter is bound.

        Raises PlanError if the rule leaves any element of a buffer unset.
        """
        for path, module in self._model.named_modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    self._fill_buffer(path, module, key)

    def _fill_buffer(self, path: str, module: nn.Module, key: str) -> None:
        """Run the rule on a buffer of zeros, then on one of ones: elements that end up equal were set by the rule."""
        name = f"{path}.{key}" if path else key
        meta, persistent = module.get_buffer(key), key not in module._non_persistent_buffers_set
        found = []
        for start in (0, 1):
            module.register_buffer(key, torch.full(meta.shape, start, dtype=meta.dtype), persistent=persistent)
            self._run_rules(name, [path], None)
            found.append(module.get_buffer(key))
        if not torch.equal(*found):
            raise PlanError(self._unset_message("buffer", name, path))

    def _run_rules(self, name: str, paths: list[str], param: nn.Parameter | None) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            # By name, not in torch's sequential order, which would require drawing the full model on every rank.
            # torch.manual_seed would also seed every GPU, and fork_rng(devices=[]) does not restore those.
            torch.default_generator.manual_seed(seed_of(self._seed, name))
            try:
                for path in paths:
                    self._run_rule(path)
                if param is None or not bool(torch.isnan(param).any()):
                    return
                for path in paths:  # modules that the enclosing rule ignores fall back to their own rule
                    _own_rule(self._model.get_submodule(path))
            except NotImplementedError as error:  # raised by torch when a value on the meta device is read
                kind = type(self._model.get_submodule(path)).__name__
                raise PlanError(
                    f"{name!r} cannot be drawn alone: the initialiser of {kind} at {path or 'the root'!r} reads "
                    f"another parameter's values ({str(error).splitlines()[0]}); build the model with weights instead "
                    "of on the meta device"
                ) from error

    def _run_rule(self, path: str) -> None:
        module = self._model.get_submodule(path)
        if self._initialise is not None:
            self._initialise(module)
            return
        for around in _around(path):
            rule = getattr(self._model.get_submodule(around), "_init_weights", None)
            if callable(rule):
                rule(module)
                return
        _own_rule(module)

    def _unset_message(self, kind: str, name: str, path: str) -> str:
        module = type(self._model.get_submodule(path)).__name__
        return (
            f"{kind} {name!r} is on the meta device and no rule sets all of it: expected {module} to have a "
            "reset_parameters(), or an _init_weights(module) around it; give RuntimeSettings.initialise, or build the "
            "model with weights" + (", or inside parameters_on_meta()" if kind == "buffer" else "")
        )


def _refuse_mixed_devices(model: nn.Module) -> None:
    """Refuse a model with real and meta tensors: rules run on entire modules and would overwrite its real weights."""
    real = [name for name, param in model.named_parameters() if not param.is_meta]
    if not real:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise PlanError(
            f"expected a model with weights or one on the meta device, found both: {real[0]!r} has values and "
            f"{on_meta[0]!r} is on the meta device; build all inside parameters_on_meta(), or give all of it values"
        )


def seed_of(seed: int, name: str) -> int:
    """A signed 64-bit seed from a seed and a name: the first eight bytes of the SHA-256 of both."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:_SEED_BYTES], "little", signed=True)


def _around(path: str) -> Iterator[str]:
    """The path and those of its enclosing modules, from the inside out; the root is the empty path."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _own_rule(module: nn.Module) -> None:
    for name in _OWN_RULES:
        rule = getattr(module, name, None)
        if callable(rule):
            rule()
            return
