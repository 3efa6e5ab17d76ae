"""Rules for dtypes and the device, the dtype that `compute` auto stands for, and the rule for shard groups."""

from __future__ import annotations

from orchestrator.config.schema import Device, Resources
from orchestrator.config.state_groups import Compute, DType, Precision, Zero
from orchestrator.config.strict import Broken
from orchestrator.plan.rules.scene import Scene

WIDTH = {DType.bf16: 2, DType.fp16: 2, DType.fp32: 4}
SCALE_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


def computed_in(precision: Precision, scene: Scene, resources: Resources) -> Compute:
    """The dtype of the computation. auto is that of the parameters, but fp32 on a CPU without matrix instructions for
    it."""
    if precision.compute is not Compute.auto:
        return precision.compute
    on_cpu = scene.device(resources) is Device.cpu
    if on_cpu and precision.param is not DType.fp32 and str(precision.param) not in scene.hardware.cpu_dtypes:
        return Compute.fp32
    return Compute(str(precision.param))


def master_is_not_narrower(scene: Scene, precision: Precision) -> Broken | None:
    if WIDTH[precision.master] >= WIDTH[precision.param]:
        return None
    rule = f"precision.master must hold precision.param={precision.param}"
    return Broken(rule, str(precision.master), (f"precision.master={precision.param}",))


def master_is_not_fp16(scene: Scene, precision: Precision) -> Broken | None:
    if precision.master is not DType.fp16:
        return None
    rule = "precision.master must keep updates that fp16 would lose (those below 6e-8)"
    return Broken(rule, "fp16", ("precision.master=fp32",))


def compute_is_param_or_fp32(scene: Scene, precision: Precision) -> Broken | None:
    if str(precision.compute) in ("auto", "fp32", str(precision.param)):
        return None
    rule = f"precision.compute must be auto, fp32 or precision.param={precision.param}"
    return Broken(rule, str(precision.compute), ("precision.compute=auto",))


def scale_keys_are_used(scene: Scene, precision: Precision) -> Broken | None:
    """The loss scale is only for fp16, and the keys of a dynamic scale are not used with a fixed one."""
    usual = Precision()
    changed = [key for key in SCALE_KEYS if vars(precision)[key] != vars(usual)[key]]
    if precision.param is not DType.fp16:
        unused = (["loss_scale"] if precision.loss_scale is not None else []) + changed
        rule = f"precision.param={precision.param} needs no loss scale"
    else:
        unused = changed if precision.loss_scale is not None else []
        rule = f"precision.loss_scale={precision.loss_scale} is fixed"
    if not unused:
        return None
    reset = " ".join(f"precision.{key}={_text(vars(usual)[key])}" for key in unused)
    found = ", ".join(f"{key}={_text(vars(precision)[key])}" for key in unused)
    return Broken(rule, found, (reset,))


def tf32_is_used(scene: Scene, precision: Precision, resources: Resources) -> Broken | None:
    fp32 = computed_in(precision, scene, resources) is Compute.fp32
    if not precision.tf32 or (fp32 and scene.device(resources) is Device.cuda):
        return None
    rule = "precision.tf32 is for fp32 matrix products on a GPU"
    found = f"precision.param={precision.param} on {scene.device(resources)}"
    return Broken(rule, found, ("precision.tf32=false",))


def shard_groups_divide_the_ranks(scene: Scene, zero: Zero, resources: Resources) -> Broken | None:
    if zero.shard_ranks is None:
        return None
    ranks = scene.ranks(resources)
    if zero.stage == 0:
        rule = "zero.shard_ranks needs a stage that shards something"
        return Broken(rule, "stage 0", ("zero.shard_ranks=null", "zero.stage=1"))
    if ranks % zero.shard_ranks == 0:
        return None
    rule = f"zero.shard_ranks must divide the {ranks} ranks"
    return Broken(rule, str(zero.shard_ranks), ("zero.shard_ranks=null",))


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower()
