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

_INFERENCE = "freeze the model and hand it to initialize, or use torch; kernels for inference are not here"
_PARALLEL = "pipelines and experts are not here; zero_optimization or tensor_parallel shards the model instead"
_SEQUENCE = "sequence parallelism of a script is not here; `zlab` has it, see docs/parallel.md"
_FUSED = "there are no fused layers; torch's own attention is fused"
_HYBRID = "the engine generates and trains: call engine.generate"
_ESTIMATE = "the layers count, not their sum: build the model inside zero.Init() and call ..._all_live"

# In any module: the last part of the name.
ABSENT = {
    **dict.fromkeys(("init_inference", "InferenceEngine"), _INFERENCE),
    **dict.fromkeys(("PipelineModule", "PipelineEngine", "pipe", "moe"), _PARALLEL),
    **dict.fromkeys(("sequence", "sequence_parallel"), _SEQUENCE),
    **dict.fromkeys(("DeepSpeedTransformerLayer", "transformer"), _FUSED),
    **dict.fromkeys(("DeepSpeedHybridEngine", "hybrid_engine"), _HYBRID),
    "launcher": "start a script with `zlab launch --ranks N script.py`, or with torchrun",
    "monitor": "log what engine.get_lr(), get_global_grad_norm() and the loss return",
    "profiling": "`zlab` reports the time of each phase of a run; torch.profiler profiles a script",
    "autotuning": "`zlab choose` predicts and confirms the fastest settings",
    "elasticity": "checkpoints load at any number of ranks: start again with the ranks that are there",
    "compression": "compressed models are not here; zero_quantized_weights and _gradients compress messages",
    "linear": "for adapters use peft; for frozen weights in 8 or 4 bits see docs/training.md",
    "activation_checkpointing": "import zero_runtime.checkpointing, or use torch.utils.checkpoint",
    "data_pipeline": "curriculum learning and data efficiency are not here; order the data set",
    "fp16": "the engine has the loss scale (engine.loss_scale()); the section fp16 sets its rule",
    "bf16_optimizer": "the section bf16 chooses it; parameters are masters of fp32",
    "op_builder": "kernels for CPUs are compiled at the first use; there is nothing to build",
    "aio": "`zlab io-bench FOLDER` measures a drive; offload to it is in the configuration",
    "sparse_attention": "there is no sparse attention here",
    "tensor_fragment": "its functions on parameters are in utils (safe_get_full_fp32_param, ...)",
    "nvtx": "torch.cuda.nvtx marks ranges",
    "timer": "the engine waits for no device; use torch.profiler, or `zlab`, which times each phase",
    "TiledLinear": "use nn.Linear",
    "MiCS_Init": "build inside zero.Init(); zero_optimization.mics_shard_size sets the size of the groups",
    "estimate_zero2_model_states_mem_needs_all_cold": _ESTIMATE,
    "estimate_zero3_model_states_mem_needs_all_cold": _ESTIMATE,
    "get_cuda_rng_tracker": "it is for tensor parallelism; torch.utils.checkpoint keeps the random state itself",
    "model_parallel_cuda_manual_seed": "it is for tensor parallelism; call torch.manual_seed",
}
_STATES = (
    "states move by the configuration: zero_optimization.offload_optimizer and offload_param keep them on the host"
)
ABSENT_OF_ENGINE = {
    "compile": "the runtime's hooks are not compiled; leave it out",
    "offload_states": f"{_STATES}, and where another model needs the memory, save a checkpoint and call destroy()",
    "reload_states": _STATES,
    "train_batch": "it is for pipelines; call engine(...), engine.backward(loss) and engine.step()",
    "eval_batch": "it is for pipelines; call engine(...) under torch.no_grad()",
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
