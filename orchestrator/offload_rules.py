"""What must hold between offload and the other groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.schema import Device, Offload, Place, Resources, Zero
from orchestrator.strict import Broken
from orchestrator.training import Optimizer, OptimizerKind

if TYPE_CHECKING:
    from orchestrator.rules import Scene

ONE_BY_ONE = (
    OptimizerKind.adamw,
    OptimizerKind.adamw8bit,
    OptimizerKind.adam,
    OptimizerKind.sgd,
    OptimizerKind.lion,
)


def offloaded_params_are_sharded(scene: Scene, offload: Offload, zero: Zero) -> Broken | None:
    if offload.params is Place.device or zero.stage == 3:
        return None
    rule = f"offload.params={offload.params} needs zero=stage3: the other stages keep whole parameters on every rank"
    return Broken(rule, f"stage {zero.stage}", ("zero.stage=3", "offload.params=device"))


def params_rest_with_the_optimizer(scene: Scene, offload: Offload) -> Broken | None:
    if offload.params is not Place.nvme or offload.optimizer is Place.nvme:
        return None
    rule = "offload.params=nvme needs offload.optimizer=nvme, which is several times as large"
    return Broken(rule, str(offload.optimizer), ("offload.optimizer=nvme", "offload.params=device"))


def optimizer_can_rest(scene: Scene, offload: Offload, optimizer: Optimizer) -> Broken | None:
    if offload.optimizer is not Place.nvme or optimizer.kind in ONE_BY_ONE:
        return None
    fitting = ", ".join(ONE_BY_ONE[:-1])
    rule = (
        f"offload.optimizer=nvme needs an optimizer that updates one unit after another: {fitting} or {ONE_BY_ONE[-1]}"
    )
    return Broken(rule, str(optimizer.kind), ("offload.optimizer=device offload.params=device",))


def host_is_the_device(scene: Scene, offload: Offload, resources: Resources) -> Broken | None:
    """On a CPU the host's memory is the device's. From a GPU the way there is not written yet."""
    if Place.cpu not in (offload.params, offload.optimizer) or scene.device(resources) is not Device.cuda:
        return None
    rule = "offload to the host's memory is not here yet for GPUs"
    return Broken(rule, "resources.device=cuda", ("offload.optimizer=device offload.params=device",))


def scratch_is_for_a_cpu(scene: Scene, offload: Offload, resources: Resources) -> Broken | None:
    if not offload.uses_nvme or scene.device(resources) is not Device.cuda:
        return None
    rule = "offload to a scratch file is not here yet for GPUs"
    return Broken(rule, "resources.device=cuda", ("offload.optimizer=device offload.params=device",))


def offload_keys_are_used(scene: Scene, offload: Offload) -> Broken | None:
    if not offload.uses_nvme and offload.folder is not None:
        rule = "offload.folder is for offload=optimizer_nvme and optimizer_param_nvme"
        return Broken(rule, offload.folder, ("offload.folder=null",))
    if offload.ratio != 1 and offload.params is offload.optimizer is Place.device:
        return Broken("offload=none uses no offload.ratio", str(offload.ratio), ("offload.ratio=1.0",))
    return None
