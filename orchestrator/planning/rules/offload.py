"""Rules between offload and the other groups."""

from __future__ import annotations

from orchestrator.config.cluster import Cluster
from orchestrator.config.near import fix_of_path
from orchestrator.config.optimizer import Optimizer
from orchestrator.config.schema import Device, Resources
from orchestrator.config.state_groups import Offload, Zero
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.cluster import is_slurm
from orchestrator.planning.rules.scene import Scene
from orchestrator.records.run_record import scratch_path
from orchestrator.text.paths import expanded
from zero_runtime.errors import missing_folder
from zero_runtime.offload_plan import Tier
from zero_runtime.optim.configs import OPTIMIZERS


def offloaded_params_are_sharded(scene: Scene, offload: Offload, zero: Zero) -> Broken | None:
    if offload.params is Tier.DEVICE:
        return None
    if zero.plan.outer_sharding is not None:
        rule = f"zero.outer_sharding keeps the parameters of a group on the device: offload.params={offload.params}"
        return Broken(f"{rule} must be device", zero.plan.outer_sharding, ("offload.params=device",))
    if zero.stage == 3:
        return None
    rule = f"offload.params={offload.params} needs zero=stage3: the other stages keep whole parameters on every rank"
    return Broken(rule, f"stage {zero.stage}", ("zero.stage=3", "offload.params=device"))


def optimizer_can_be_offloaded(
    scene: Scene, offload: Offload, optimizer: Optimizer, resources: Resources
) -> Broken | None:
    places = [place for place in (offload.optimizer, offload.params) if _moves(scene, place, resources)]
    if not places or optimizer.rule.updates_units_alone:
        return None
    *most, last = (kind for kind, rule in OPTIMIZERS.items() if rule.updates_units_alone)
    fitting = f"{', '.join(most)} or {last}"
    rule = f"offload to {places[0]} needs an optimizer that updates one unit after another: {fitting}"
    return Broken(rule, optimizer.rule.kind, ("offload.optimizer=device offload.params=device",))


def _moves(scene: Scene, tier: Tier, resources: Resources) -> bool:
    """Whether states stored there must be moved for their use. On a CPU, host memory is the memory of the device."""
    on_cuda = scene.device(resources) is Device.cuda
    return tier is Tier.NVME or (tier is Tier.HOST and on_cuda)


def folder_is_there(scene: Scene, output: str, offload: Offload, cluster: Cluster) -> Broken | None:
    """A folder that the user names is never created: with a mistyped mount point the files would be on the root disk.

    On a cluster the folder may exist only on the nodes, where the ranks check it (offload/preflight.py).
    """
    if not offload.uses_nvme or offload.folder is None or is_slurm(cluster):
        return None
    folder = expanded(offload.folder).absolute()
    if folder.is_dir() or folder == scratch_path(expanded(output).absolute()):
        return None
    fixes = (*fix_of_path("offload.folder", folder), "offload.folder=null")
    return Broken("offload.folder must exist", missing_folder(folder), fixes)
