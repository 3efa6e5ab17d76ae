"""Names of DeepSpeed that have no counterpart here, each with what to do instead. Standard library only."""

from __future__ import annotations

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
    "DeepSpeedEngine": "initialize returns the engine; for its type, zero_runtime.deepspeed.engine.Engine",
    "DeepSpeedConfig": "hand the dict or the file to initialize, which checks it",
    "DeepSpeedTransformerLayer": "there are no fused layers; torch's own attention is fused",
    "add_tuning_arguments": "schedules are in the configuration's section scheduler",
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
    "adagrad": 'hand torch.optim.Adagrad to initialize, or name "Adagrad" in the configuration',
    "lamb": 'name "Lamb" in the section optimizer of the configuration',
    "lion": 'name "Lion" in the section optimizer of the configuration',
    "op_builder": "kernels for CPUs are compiled at the first use; there is nothing to build",
    "transformer": "there are no fused layers; torch's own attention is fused",
    "aio": "`zlab io-bench FOLDER` measures a drive; offload to it is in the configuration",
    "sparse_attention": "there is no sparse attention here",
}
ABSENT_OF_UTILS = {
    "zero_to_fp32": "`zlab export-weights CHECKPOINT OUT --dtype fp32` writes the weights of a checkpoint",
    "RepeatingLoader": "loop over the loader again: `while True: for batch in loader: ...`",
    "groups": "engine.get_data_parallel_rank() and dp_world_size say what a rank reads; torch's group has all ranks",
    "init_on_device": "build inside zero.Init(), or inside torch.device(...)",
    "OnDevice": "build inside zero.Init(), or inside torch.device(...)",
}
ABSENT_OF_ZERO = {
    "register_external_parameter": "parameters that another module reads are gathered by themselves; leave it out",
    "unregister_external_parameter": "parameters that another module reads are gathered by themselves; leave it out",
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


def missing(place: str, name: str, absent: dict[str, str]) -> AttributeError:
    """The error for a name that `place` lacks: with what to do, if it is one of DeepSpeed's."""
    if name in absent:
        return AttributeError(f"{place}.{name} is not here: {absent[name]}")
    return AttributeError(f"module {place!r} has no attribute {name!r}")
