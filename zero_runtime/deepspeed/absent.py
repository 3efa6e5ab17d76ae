"""Names of DeepSpeed that have no counterpart here, each with what to do instead. Standard library only.

[Note: imports of absent names]
`from PACKAGE import NAME` turns the AttributeError of `missing` into an ImportError without its words, after it has
looked for a module PACKAGE.NAME. `_Advice`, which Python asks last for a module, raises the words then. `hasattr` of an
absent name stays False.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib import import_module
from types import ModuleType

_ESTIMATE = "the layers count, not their sum: build the model inside zero.Init() and call ..._all_live"
_STATES = (
    "states move by the configuration: zero_optimization.offload_optimizer and offload_param keep them on the host"
)
_PARALLEL = "pipelines and experts are not here; zero_optimization or tensor_parallel shards the model instead"

ABSENT = {
    "init_inference": "freeze the model and hand it to initialize, or use torch; kernels for inference are not here",
    "PipelineModule": _PARALLEL,
    "pipe": _PARALLEL,
    "moe": _PARALLEL,
    "launcher": "start a script with `zlab launch --ranks N script.py`, or with torchrun",
    "monitor": "log what engine.get_lr(), get_global_grad_norm() and the loss return",
    "profiling": "`zlab` reports the time of each phase of a run; torch.profiler profiles a script",
    "autotuning": "`zlab choose` predicts and confirms the fastest settings",
    "elasticity": "checkpoints load at any number of ranks: start again with the ranks that are there",
    "compression": "compressed models are not here; zero_quantized_weights and _gradients compress messages",
    "DeepSpeedTransformerLayer": "there are no fused layers; torch's own attention is fused",
    "PipelineEngine": _PARALLEL,
    "DeepSpeedHybridEngine": "the engine generates and trains: call engine.generate",
    "InferenceEngine": "freeze the model and hand it to initialize, or use torch",
    "sequence": "sequence parallelism of a script is not here; `zlab` has it, see docs/parallel.md",
    "linear": "for adapters use peft; for frozen weights in 8 or 4 bits see docs/training.md",
}
ABSENT_OF_RUNTIME = {
    "pipe": _PARALLEL,
    "hybrid_engine": "the engine generates and trains: call engine.generate",
    "activation_checkpointing": "import zero_runtime.checkpointing, or use torch.utils.checkpoint",
    "sequence_parallel": "sequence parallelism of a script is not here; `zlab` has it, see docs/parallel.md",
    "data_pipeline": "curriculum learning and data efficiency are not here; order the data set",
    "fp16": "the engine has the loss scale (engine.loss_scale()); the section fp16 sets its rule",
    "bf16_optimizer": "the section bf16 chooses it; parameters are masters of fp32",
}
ABSENT_OF_ENGINE = {
    "flops_profiler": "torch.profiler counts operations",
    "compile": "the runtime's hooks are not compiled; leave it out",
    "offload_states": f"{_STATES}, and where another model needs the memory, save a checkpoint and call destroy()",
    "reload_states": _STATES,
    "eigenvalue": "there is none here",
    "train_batch": "it is for pipelines; call engine(...), engine.backward(loss) and engine.step()",
    "eval_batch": "it is for pipelines; call engine(...) under torch.no_grad()",
    "deepspeed_io": "hand training_data to initialize, which returns the loader",
}
ABSENT_OF_OPS = {
    "op_builder": "kernels for CPUs are compiled at the first use; there is nothing to build",
    "transformer": "there are no fused layers; torch's own attention is fused",
    "aio": "`zlab io-bench FOLDER` measures a drive; offload to it is in the configuration",
    "sparse_attention": "there is no sparse attention here",
}
ABSENT_OF_UTILS = {
    "tensor_fragment": "its functions on parameters are in utils (safe_get_full_fp32_param, ...)",
    "nvtx": "torch.cuda.nvtx marks ranges",
    "numa": "`zlab` places ranks; for a script use numactl",
    "timer": "the engine waits for no device; use torch.profiler, or `zlab`, which times each phase",
}
ABSENT_OF_ZERO = {
    "TiledLinear": "use nn.Linear",
    "estimate_zero2_model_states_mem_needs_all_cold": _ESTIMATE,
    "estimate_zero3_model_states_mem_needs_all_cold": _ESTIMATE,
    "MiCS_Init": "build inside zero.Init(); zero_optimization.mics_shard_size sets the size of the groups",
}
ABSENT_OF_CHECKPOINTING = {
    "get_cuda_rng_tracker": "it is for tensor parallelism; torch.utils.checkpoint keeps the random state itself",
    "model_parallel_cuda_manual_seed": "it is for tensor parallelism; call torch.manual_seed",
    "partition_activations_in_checkpoint": "it is for tensor parallelism; leave it out",
}
_PLACES = {
    "": ABSENT,
    "checkpointing": ABSENT_OF_CHECKPOINTING,
    "ops": ABSENT_OF_OPS,
    "runtime": ABSENT_OF_RUNTIME,
    "runtime.zero": ABSENT_OF_ZERO,
    "utils": ABSENT_OF_UTILS,
    "zero": ABSENT_OF_ZERO,
}


def missing(place: str, name: str, absent: dict[str, str]) -> AttributeError:
    """The error for a name that `place` lacks: with what to do, if it is one of DeepSpeed's."""
    if name in absent:
        return AttributeError(f"{place}.{name} is not here: {absent[name]}")
    return AttributeError(f"module {place!r} has no attribute {name!r}")


def submodule(package: str, name: str, modules: Collection[str], absent: dict[str, str]) -> ModuleType:
    """The module of this name in a package, imported now; AttributeError for a name that is not in `modules`."""
    if name in modules:
        return import_module(f"{package}.{name}")
    raise missing(package, name, absent)


class _Advice:
    """See [Note: imports of absent names]."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, inside = name.partition(".")
        place, _, last = inside.removeprefix("deepspeed.").rpartition(".")
        advice = _PLACES.get(place, {}).get(last)
        if package == "zero_runtime" and advice is not None:
            raise ImportError(f"{name} is not here: {advice}", name=name)


sys.meta_path.append(_Advice)
