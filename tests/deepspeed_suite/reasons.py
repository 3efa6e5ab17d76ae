"""Which files of DeepSpeed's suite are run, and into which class the outcome of a test falls, with the reason."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any


class Kind(enum.Enum):
    """What the outcome of a test means."""

    passed = "passed"
    beyond = "works here, where DeepSpeed refuses it"
    rightly = "refused rightly"
    needless = "refused needlessly"
    name = "public name missing"
    wrong = "wrong or crash, or not classified"
    internal = "asks for internals"
    harness = "harness"
    skipped = "skipped"


KINDS = {kind: kind.value for kind in Kind}
FILES = (
    "checkpoint/test_convert_checkpoint.py",
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_other_optimizer.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_universal_checkpoint.py",
    "checkpoint/test_zero_optimizer.py",
    "runtime/half_precision/test_dynamic_loss_scale.py",
    "runtime/half_precision/test_fp16.py",
    "runtime/half_precision/test_zero_optim_overflow.py",
    "runtime/test_data.py",
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_lr_schedulers.py",
    "runtime/test_multi_output_model.py",
    "runtime/test_multiple_models.py",
    "runtime/test_no_sync_ctxt.py",
    "runtime/test_runtime_utils.py",
    "runtime/zero/test_ignore_unused_parameters.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_allreduce_fetch_params.py",
    "runtime/zero/test_zero_config.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_ancestry.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_dynamic_class.py",
    "runtime/zero/test_zero_grad_clip.py",
    "runtime/zero/test_zero_hook_attribute_delegation.py",
    "runtime/zero/test_zero_late_module_attach.py",
    "runtime/zero/test_zero_leaf_module.py",
    "runtime/zero/test_zero_linear_direct_init.py",
    "runtime/zero/test_zero_nesting_init.py",
    "runtime/zero/test_zero_offloadpp.py",
    "runtime/zero/test_zero_tensor_fragment.py",
    "runtime/zero/test_zero_tiled.py",
    "utils/test_byte_cast.py",
    "utils/test_get_optim_files.py",
    "utils/test_groups.py",
    "utils/test_init_on_device.py",
    "utils/test_partition_balanced.py",
    "utils/test_pin_memory_tracker.py",
    "v1/half_precision/test_bf16.py",
    "v1/half_precision/test_gradient_clipping_default.py",
    "v1/half_precision/test_mixed_precision_dtype.py",
    "v1/half_precision/test_with_autocast.py",
    "v1/zero/test_offload_states.py",
    "v1/zero/test_zero.py",
    "v1/zero/test_zero2_offload_multi_backward.py",
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py",
    "v1/zero/test_zero_autocast.py",
    "v1/zero/test_zero_coalesce_grad_reduction.py",
    "v1/zero/test_zero_cpu_offload_grad_accum.py",
    "v1/zero/test_zero_functorch_linear.py",
    "v1/zero/test_zero_torch_func.py",
    "v1/zero/test_zero_user_backward.py",
)
# Names of DeepSpeed's own parts: no documentation names them, and what they are for is done otherwise here.
_INTERNAL = r"NameMissingError: deepspeed\."
# Each row has a class, a pattern and why. The first whose pattern is found decides; it is searched in the name of the
# test, in its error and at the end of its traceback.
REASONS: tuple[tuple[Kind, str, str], ...] = (
    # ---- harness
    (Kind.harness, r"FixtureLookupError|fixture '.*' not found", "fixtures as classes, which pytest no longer finds"),
    (Kind.harness, r"PackageNotFoundError", "asks for the installed distribution deepspeed"),
    (Kind.harness, r"test_multi_output_model.*\n.*attribute 'dtype' do not match", "compares fp32 with bf16 tensors"),
    (Kind.harness, r"assert dist.get_world_size\(\) <= get_accelerator\(\).device_count\(\)", "one CPU is one device"),
    (Kind.harness, r"re-initialize CUDA in forked subprocess", "a tensor on device 0 where there is no GPU"),
    (
        Kind.harness,
        r"test_non_scalar_backward.*\nAssertionError: Parameter .* mismatch",
        "its reference has no fp32 masters",
    ),
    (Kind.harness, r"'__git_hash__'", "asks for the build of the installed package"),
    (Kind.harness, r"test_byte_cast", "asks for a compiled operator"),
    # ---- works here
    (Kind.beyond, r"test_(no_sync_ctxt|zero_coalesce).*\n.*DID NOT RAISE", "no_sync at every stage, also nested"),
    (Kind.beyond, r"test_unmanaged_rejects.*\n.*DID NOT RAISE", "both go together here"),
    (Kind.beyond, r"TestIncorectAllgatherBucketSize.*\n.*DID NOT RAISE", "buckets need no common size"),
    (Kind.beyond, r"inputs with requires_grad=False is not supported for a leaf module", "they are supported"),
    (Kind.beyond, r"TestZero0DirectBackwardStillRaises.*\n.*DID NOT RAISE", "loss.backward() works at stage 0 too"),
    (
        Kind.beyond,
        r"ErrorOnModification.*\n.*Expected in-place modification",
        "a write that changes no value is no error",
    ),
    # ---- asks for internals
    (Kind.internal, _INTERNAL + r"runtime\.zero\.(offload_)?config\.", "classes of the configuration"),
    (Kind.internal, _INTERNAL + r"runtime\.(config_utils|precision_config)\.", "classes of the configuration"),
    (Kind.internal, _INTERNAL + r"runtime\.config\.get_", "a reader of one key of the configuration"),
    (Kind.internal, _INTERNAL + r"runtime\.zero\.partition_parameters\.(?!ZeroParamStatus|Init|Gath)", "its shards"),
    (
        Kind.internal,
        _INTERNAL + r"runtime\.zero\.(stage|parameter_off|linear|utils|mics|offload_st|leaf)",
        "its stages",
    ),
    (Kind.internal, _INTERNAL + r"runtime\.(bf16_opt|fp16|base_opt|torch_auto|swap_t|checkpoint_eng)", "its precision"),
    (Kind.internal, _INTERNAL + r"runtime\.engine\._", "private functions"),
    (Kind.internal, _INTERNAL + r"runtime\.utils\.(call_to|count_used|Check|partition_bal|clip_gr)", "of its engine"),
    (Kind.internal, _INTERNAL + r"utils\.(groups\._|pin_memory_tracker|nvtx)", "private functions"),
    (Kind.internal, _INTERNAL + r"(module_inject|checkpoint\.(ds_to_univ|constants|univ))", "universal checkpoints"),
    # Names that no public training script was found to use.
    (Kind.internal, _INTERNAL + r"utils\.\w*z3_leaf", "questions about the marks of set_z3_leaf_modules"),
    (Kind.internal, _INTERNAL + r"zero\.unregister_external_parameter", "parameters are not registered"),
    (Kind.internal, _INTERNAL + r"utils\.safe_update_full_grad_vectorized", "a loop over safe_set_full_grad"),
    (
        Kind.internal,
        _INTERNAL + r"(\w+\.)*(add_tuning_arguments|get_config_from_args)",
        "options that its engine ignores",
    ),
    (
        Kind.internal,
        r"'(LRRangeTest|OneCycle|Warmup\w+)' object has no attribute|OneCycle: it cycles",
        "arguments of its schedules",
    ),
    (Kind.internal, r"'ScalerView' object has no attribute", "counters of its loss scaler"),
    (Kind.internal, r"engine\.coalesce_grad_reduction: ", "no_sync does it"),
    (
        Kind.internal,
        r"get_accelerator\(\)\.(supported_dtypes|initial_seed|available_memory|range_\w+|\w*memory_cached) is not here",
        "what its code asks of a device",
    ),
    (Kind.internal, r"get_model_ckpt_name_for_rank|get_optim_files", "names of the files of its checkpoints"),
    (Kind.internal, r"attribute 'ds_(tensor|persist|active_sub|param_alias|secondary)", "its marks on parameters"),
    (Kind.internal, r"all_gather_coalesced|pre_bwd_fn|zero3_linear_wrap|loss_scale_config", "its hooks and attributes"),
    (
        Kind.internal,
        r"(fp16_groups|bf16_groups|_alignment_factor|accumulated_grads_in\w*|averaged_gradients)'",
        "of its optimizers",
    ),
    (
        Kind.internal,
        r"attribute '(forward_hooks|_external_params|leaf_parameters|single_partition_of_fp32_groups)'",
        "its hooks",
    ),
    (
        Kind.internal,
        r"test_zero_context.py::TestScatterGather.*\nAssertionError: assert torch.Size",
        "shape of an empty one",
    ),
    (Kind.internal, r"outside of GatheredParameters the param should go back to be 0-sized", "shape of an empty one"),
    (Kind.internal, r"type object 'Engine' has no attribute '_|SimpleNamespace' object has no", "private methods"),
    (Kind.internal, r"KeyError: 'step'|optimizer.state_dict: states are shards", "the states of its own shards"),
    (Kind.internal, r"TestZeroOffloadOptim.*\n.*got 'Missing'", "an error class of its optimizers"),
    (Kind.internal, r"'DeepSpeedConfig' object has no attribute", "fields of its configuration"),
    (
        Kind.internal,
        r"engine\.(_\w+|tput_timer|sparse_tensor_\w+|managed_\w+|\w+partition_gradients)\b.*has it",
        "private attributes of the engine",
    ),
    (Kind.internal, r"baseline issued no collectives", "counts calls that its engine makes of its own module"),
    (Kind.internal, r"monkeypatch.setattr\(", "replaces a part of DeepSpeed"),
    # ---- refused rightly
    (Kind.rightly, r"ignore_unused_parameters: expected True", "an unused parameter counts as zero, and is no error"),
    (Kind.rightly, r"expected one folder and one tag on all ranks", "no folder would hold the whole checkpoint"),
    (Kind.rightly, r"gradient_allreduce_op: expected 'mean'", "the mean over the ranks; a sum is another loss"),
    (
        Kind.rightly,
        r"test_zero_optim_overflow.*\nNonFiniteError",
        "without a loss scale, an infinite norm ends the run",
    ),
    (Kind.rightly, r"optimizer\.torch_adam: unknown key", "its place is in params; DeepSpeed ignores it elsewhere"),
    (
        Kind.rightly,
        r"(NoModel|NoConfig|EmptyConfig|test_ds_config_dict).*\nPlanError: initialize: expected",
        "as there",
    ),
    (Kind.rightly, r"compression_training: compression is not here", "a feature that is not here"),
    (Kind.rightly, r"data_types\.buffer_dtype: expected 'fp32'", "buffers keep the dtype of the model, or are fp32"),
    (
        Kind.rightly,
        r"ParameterReadError: parameter .* was read outside of forward",
        "a rank has its shard between steps",
    ),
    (Kind.rightly, r"the last backward ended with an error, so gradients", "half a backward is in the gradients"),
    (Kind.rightly, r"engine\.scale: expected a scalar tensor", "as DeepSpeed does"),
    (Kind.rightly, r"torch_autocast: ", "the engine casts parameters; autocast on top would cast again"),
    (Kind.rightly, r"bf16_optimizer_states: ", "the states of the optimizer are fp32"),
    (Kind.rightly, r"fp16_master_weights_and_grads: ", "updates below 6e-8 vanish in fp16 weights"),
    (Kind.rightly, r"Muon|OneBitLamb|ZeroOneAdam", "optimizers that are not here"),
    (Kind.rightly, r"optimizer: .* cannot run on shards", "an update of the script's own may need whole tensors"),
    (Kind.rightly, r"(MoE|PipelineModule|LayerSpec|ProgressiveLayerDrop).* is not here: ", "pipelines and experts"),
    (Kind.rightly, r"NameMissingError: .*(TiledLinear|MiCS_Init)", "nn.Linear in a unit of its own; mics_shard_size"),
    (Kind.rightly, r"test_exception_handling|test_step_inside_context_raises", "an error, in words of ours"),
    (
        Kind.rightly,
        r"test_existing_no_sync|CallOrderError: engine\.(step|no_sync|coalesce\w+): .*no_sync con",
        "as DeepSpeed does",
    ),
    (Kind.rightly, r"set_gradient_accumulation_boundary: expected managed_", "as DeepSpeed does"),
    (Kind.rightly, r"step: the last backward ran inside no_sync", "as DeepSpeed does"),
    (Kind.rightly, r"Loss scaling is required with fp16", "gradients of an unscaled loss vanish in fp16, as there"),
    (Kind.rightly, r"allreduce_gradients: gradients are reduced in backward", "there is nothing to call"),
    (Kind.rightly, r"WarmupLR.*warmup_num_steps|expected at least 1 step", "DeepSpeed refuses it too"),
    (
        Kind.rightly,
        r"expected requires_grad=True as at initialize",
        "momentum would move a frozen one, as it does there",
    ),
    (Kind.rightly, r"found one that is in use, also if", "stage 3: no rank has the weights that a new engine needs"),
    # ---- a public name
    (Kind.name, r"NameMissingError|get_accelerator\(\)\.\w+ is not here|got 'Missing'", ""),
    (Kind.name, r"'\w+' object has no attribute|module '[\w.]+' has no attribute", ""),
    (Kind.name, r"neither the engine nor its module .* has it|AttributeError: engine\.\w+: ", ""),
    (Kind.name, r"hasattr\(Parameter.*'ds_", "ds_id and its like on parameters"),
    (
        Kind.internal,
        r"(?s)test_ds_initialize.*AssertionError: assert .*EngineOptimizer",
        "the returned optimizer is another object than the one handed over",
    ),
)


def kind_of(one: Mapping[str, Any]) -> Kind:
    """The class of one result."""
    if one["outcome"] in ("passed", "skipped"):
        return Kind[one["outcome"]]
    text = f"{one['test']}\n{one['error']}\n{one['trace'][-400:]}"
    for kind, pattern, _ in REASONS:
        if re.search(pattern, text):
            return kind
    refused = re.match(r"(PlanError|CallOrderError|ParameterReadError|UnitStateError)\b", one["error"])
    return Kind.needless if refused else Kind.wrong
