"""Rules for dtypes and the device, the dtype that `compute` auto stands for, and the rule for shard groups."""

from __future__ import annotations

from typing import Any

from orchestrator import wings
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Device, Resources
from orchestrator.config.state_groups import Compute, Precision, Zero
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene
from zero_runtime.limits import as_typed, broken_by, values_of
from zero_runtime.optim.loss_scaler import LossScaleRule


def computed_in(precision: Precision, scene: Scene, resources: Resources) -> Compute:
    """The dtype of the computation. auto is that of the parameters, but fp32 on a CPU without matrix instructions for
    it."""
    if precision.compute != "auto":
        return precision.compute
    param = precision.dtypes.param
    on_cpu = scene.device(resources) is Device.cpu
    return "fp32" if on_cpu and param != "fp32" and param not in scene.hardware.cpu_dtypes else param


def compute_is_param_or_fp32(scene: Scene, precision: Precision) -> Broken | None:
    param = precision.dtypes.param
    if precision.compute in ("auto", "fp32", param):
        return None
    rule = f"precision.compute must be auto, fp32 or precision.param={param}"
    return Broken(rule, precision.compute, ("precision.compute=auto",))


def scale_keys_are_used(scene: Scene, precision: Precision) -> Broken | None:
    """The loss scale is only for fp16, and the keys of a dynamic scale are not used with a fixed one."""
    values, usual = values_of(precision.scale), values_of(LossScaleRule())
    unused = [key for key in usual if values[key] != usual[key]]
    rule = f"precision.param={precision.dtypes.param} needs no loss scale"
    if precision.scales_loss:
        fixed = precision.scale.static
        unused = [key for key in unused if key != "loss_scale"] if fixed is not None else []
        rule = f"precision.loss_scale={fixed} is fixed"
    if not unused:
        return None
    reset = " ".join(f"precision.{key}={as_typed(usual[key])}" for key in unused)
    return Broken(rule, ", ".join(f"{key}={as_typed(values[key])}" for key in unused), (reset,))


def tf32_is_used(scene: Scene, precision: Precision, resources: Resources) -> Broken | None:
    fp32 = computed_in(precision, scene, resources) == "fp32"
    if not precision.tf32 or (fp32 and scene.device(resources) is Device.cuda):
        return None
    rule = "precision.tf32 is for fp32 matrix products on a GPU"
    found = f"precision.param={precision.dtypes.param} on {scene.device(resources)}"
    return Broken(rule, found, ("precision.tf32=false",))


def quantised_gathers_keep_masters(scene: Scene, zero: Zero, precision: Precision) -> Broken | None:
    return next(iter(broken_by(lambda: zero.wire.check_precision(zero.plan, precision.dtypes))), None)


def codes(scene: Scene, precision: Precision, *others: Any) -> Broken | None:
    """Stored codes get no updates: see the wing."""
    weights = precision.dtypes.weights
    found: Broken | None = None if weights is None else wings.load(wings.CODED_BROKEN)(weights, *others)
    return found


def errors_are_fed_back_in_one_scale(scene: Scene, zero: Zero, precision: Precision) -> Broken | None:
    if not zero.wire.error_feedback or not precision.scales_loss:
        return None
    rule = "zero.error_feedback needs gradients of one scale, and precision.param=fp16 scales the loss"
    return Broken(rule, "fp16", ("zero.error_feedback=false",))


def shard_groups_divide_the_ranks(scene: Scene, zero: Zero, resources: Resources, parallel: Parallel) -> Broken | None:
    if zero.shard_ranks is None:
        return None
    ranks = parallel.data_ranks(scene.ranks(resources))
    if ranks % zero.shard_ranks == 0:
        return None
    slices = f" that hold the same slice with parallel.tp={parallel.tp}" if parallel.tp > 1 else ""
    rule = f"zero.shard_ranks must divide the {ranks} ranks{slices}"
    return Broken(rule, str(zero.shard_ranks), ("zero.shard_ranks=null",))
