"""Names of DeepSpeed that have no counterpart here, each with what to do instead. Standard library only.

[Note: imports of absent names]
`from PACKAGE import NAME` turns the AttributeError of `missing` into an ImportError without its words, after it has
looked for a module PACKAGE.NAME. `_Advice`, which Python asks last for a module, raises the words then. `hasattr` of an
absent name stays False.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

_PARALLEL = "pipelines and experts are not here; zero_optimization or tensor_parallel shards the model instead"
_FUSED = "there are no fused layers; torch's own attention is fused"
_ESTIMATE = "the layers count, not their sum: build the model inside zero.Init() and call ..._all_live"

# In any module: the last part of the name.
ABSENT = {
    "init_inference": "freeze the model and hand it to initialize, or use torch; kernels for inference are not here",
    **dict.fromkeys(("PipelineModule", "PipelineEngine", "pipe", "moe"), _PARALLEL),
    **dict.fromkeys(("DeepSpeedTransformerLayer", "transformer"), _FUSED),
    "sequence_parallel": "sequence parallelism of a script is not here; `zlab` has it, see docs/parallel.md",
    "launcher": "start a script with `zlab launch --ranks N script.py`, or with torchrun",
    "monitor": "log what engine.get_lr(), get_global_grad_norm() and the loss return",
    "profiling": "the section flops_profiler of the configuration prints a profile; torch.profiler has more",
    "compression": "compressed models are not here; zero_quantized_weights and _gradients compress messages",
    "activation_checkpointing": "import zero_runtime.checkpointing, or use torch.utils.checkpoint",
    "add_tuning_arguments": "initialize reads none of its options; leave it out",
    "op_builder": "kernels for CPUs are compiled at the first use; there is nothing to build",
    "timer": "wall_clock_breakdown of the configuration prints times of phases; torch.profiler has more",
    **dict.fromkeys([f"estimate_zero{n}_model_states_mem_needs_all_cold" for n in (2, 3)], _ESTIMATE),
    "get_cuda_rng_tracker": "it is for tensor parallelism; torch.utils.checkpoint keeps the random state itself",
    "model_parallel_cuda_manual_seed": "it is for tensor parallelism; call torch.manual_seed",
}
_STATES = "states move by the configuration: offload_optimizer, offload_param; or save a checkpoint and call destroy()"
_BATCHES = "it is for pipelines; call engine(...), and to train engine.backward(loss) and engine.step()"
ABSENT_OF_ENGINE = {
    "compile": "the runtime's hooks are not compiled; leave it out",
    **dict.fromkeys(("offload_states", "reload_states"), _STATES),
    **dict.fromkeys(("train_batch", "eval_batch"), _BATCHES),
    "coalesce_grad_reduction": "call the backwards inside no_sync(); step() reduces their sum once",
    "deepspeed_io": "hand training_data to initialize, which returns the loader",
}


def missing(place: str, name: str) -> AttributeError:
    """The error for a name that `place` lacks: with what to do, if it is one of DeepSpeed's."""
    if name in ABSENT:
        return AttributeError(f"{place}.{name} is not here: {ABSENT[name]}")
    return AttributeError(f"module {place!r} has no attribute {name!r}")


def lazy_modules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """The `__getattr__` of a package: its modules, each imported when it is asked for."""

    def getattr_of_package(name: str) -> ModuleType:
        if name in names:
            return import_module(f"{package}.{name}")
        raise missing(package, name)

    return getattr_of_package


class _Advice:
    """See [Note: imports of absent names]."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, inside = name.partition(".")
        advice = ABSENT.get(inside.rpartition(".")[2])
        if package == "zero_runtime" and advice is not None:
            raise ImportError(f"{name} is not here: {advice}", name=name)


sys.meta_path.append(_Advice)
