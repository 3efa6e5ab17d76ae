"""Which files of DeepSpeed's suite are run, and into which class the outcome of a test falls, with the reason."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any


class Kind(enum.Enum):
    """What the outcome of a test means."""

    passed = "passed"
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
# Names that belong to DeepSpeed's own parts: no documentation names them, and what they are for is done otherwise here.
_INTERNAL = r"NameMissingError: deepspeed\."
# The first row whose pattern is found in "TEST\nERROR" decides: the class, the pattern, and why.
REASONS: tuple[tuple[Kind, str, str], ...] = (
    # ---- harness
    (Kind.harness, r"FixtureLookupError|fixture '.*' not found", "fixtures as classes, which pytest no longer finds"),
    (Kind.harness, r"PackageNotFoundError", "asks for the installed distribution deepspeed"),
    (Kind.harness, r"test_multi_output_model.*\n.*attribute 'dtype' do not match", "compares fp32 with bf16 tensors"),
    # ---- asks for internals
    (Kind.internal, _INTERNAL + r"runtime\.zero\.(offload_)?config\.", "classes of the configuration"),
    (Kind.internal, _INTERNAL + r"runtime\.(config_utils|precision_config)\.", "classes of the configuration"),
    (Kind.internal, _INTERNAL + r"runtime\.config\.get_", "a reader of one key of the configuration"),
    (Kind.internal, _INTERNAL + r"runtime\.zero\.partition_parameters\.(?!ZeroParamStatus|Init|Gath)", "of its shards"),
    (
        Kind.internal,
        _INTERNAL + r"runtime\.zero\.(stage|parameter_offload|linear|utils|mics|offload_states)",
        "of stages",
    ),
    (
        Kind.internal,
        _INTERNAL + r"runtime\.(bf16_opt|fp16|base_opt|torch_autocast|swap_t|checkpoint_eng)",
        "of precision",
    ),
    (Kind.internal, _INTERNAL + r"runtime\.engine\._", "private functions"),
    (Kind.internal, _INTERNAL + r"runtime\.utils\.(call_to|count_used|Check|partition_bal)", "helpers of its engine"),
    (Kind.internal, _INTERNAL + r"utils\.(groups\._|pin_memory_tracker|nvtx)", "private functions"),
    (
        Kind.internal,
        _INTERNAL + r"(module_inject|checkpoint\.(ds_to_univ|constants|univ))",
        "of its universal checkpoints",
    ),
    (Kind.internal, r"get_model_ckpt_name_for_rank|get_optim_files", "names of the files of its checkpoints"),
    (
        Kind.internal,
        r"attribute 'ds_(tensor|persist)|all_gather_coalesced|pre_bwd_fn|loss_scale_config",
        "its attributes",
    ),
    (Kind.internal, r"engine\.(_change_recovery|tput_timer)", "private attributes of the engine"),
    # ---- a public name
    (Kind.name, r"NameMissingError|get_accelerator\(\)\.\w+ is not here", ""),
    (Kind.name, r"'(EngineOptimizer|JsonSchedule|Parameter)' object has no attribute", ""),
    (Kind.name, r"neither the engine nor its module .* has it", ""),
    (Kind.name, r"isinstance\(\) arg 2 must be a type", "ops.adam.FusedAdam is no class"),
    (Kind.name, r"hasattr\(Parameter.*'ds_", "ds_id and its like on parameters"),
    # ---- refused rightly
    (Kind.rightly, r"ignore_unused_parameters: expected True", "an unused parameter counts as zero, and is no error"),
    (Kind.rightly, r"expected one folder and one tag on all ranks", "no folder would hold the whole checkpoint"),
)


def kind_of(one: Mapping[str, Any]) -> Kind:
    """The class of one result."""
    if one["outcome"] in ("passed", "skipped"):
        return Kind[one["outcome"]]
    text = f"{one['test']}\n{one['error']}"
    for kind, pattern, _ in REASONS:
        if re.search(pattern, text):
            return kind
    refused = re.match(r"(PlanError|CallOrderError|ParameterReadError|UnitStateError)\b", one["error"])
    return Kind.needless if refused else Kind.wrong
