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
# The first row whose pattern is found in "TEST\nERROR" decides: the class, the pattern, and why.
REASONS: tuple[tuple[Kind, str, str], ...] = ()


def kind_of(one: Mapping[str, Any]) -> Kind:
    """The class of one result."""
    if one["outcome"] in ("passed", "skipped"):
        return Kind[one["outcome"]]
    text = f"{one['test']}\n{one['error']}"
    for kind, pattern, _ in REASONS:
        if re.search(pattern, text):
            return kind
    if "NameMissingError" in text:
        return Kind.name
    return Kind.wrong
