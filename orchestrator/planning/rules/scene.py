"""The environment in which a configuration is checked: this machine, and the world of torchrun or srun, if any."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.config.hardware import GpuNode
from orchestrator.config.schema import Device, Resources
from orchestrator.config.strict import Broken, ConfigError, Refusal
from orchestrator.machine import hardware
from orchestrator.machine.hardware import Hardware, short_name

CPU_RANKS = 2


@dataclass(frozen=True)
class Scene:
    """The environment in which a configuration is checked.

    `world`, `local_world`: the number of ranks that torchrun or srun has started, in all and on this machine; None if
    this process was started by neither. `own_gpu`: each of those ranks may see a GPU of its own alone. `plan_only`:
    nothing is started. `needs_weights`: the folder of a model must hold its weights, not its config.json alone.
    `node`: the hardware that a configuration describes (`on`); `hardware` then has its GPUs, and `found` is this
    machine.
    """

    hardware: Hardware
    world: int | None = None
    local_world: int | None = None
    own_gpu: bool = False
    plan_only: bool = False
    needs_weights: bool = True
    node: GpuNode = field(default_factory=GpuNode)
    found: Hardware | None = None

    def on(self, node: GpuNode) -> Scene:
        """The scene of a configuration with this `hardware`: described GPUs take the place of those of this machine."""
        if not node.is_described:
            return self
        described = replace(self.machine, gpus=node.gpus or 1, gpu=short_name(node.gpu or node.name), idle_gpus=0)
        return replace(self, hardware=described, node=node, found=self.machine)

    @property
    def machine(self) -> Hardware:
        """The hardware of this machine."""
        return self.found or self.hardware

    def is_elsewhere(self, resources: Resources) -> bool:
        """Whether the hardware is described, and is not this machine or need not be."""
        return self.node.is_described and (self.plan_only or self.lacks_its_gpus(resources))

    def lacks_its_gpus(self, resources: Resources) -> bool:
        """Whether the hardware is described and this machine does not have the GPUs that its ranks need."""
        if not self.node.is_described:
            return False
        if self.machine.gpu != self.hardware.gpu:
            return True
        return self.ranks_here(resources) > self.machine.gpus and not self.own_gpu

    def ranks_here(self, resources: Resources) -> int:
        """The number of ranks of a node."""
        return self.local_world or -(-self.ranks(resources) // resources.nodes)

    def nodes(self, resources: Resources) -> int:
        """The number of machines that the ranks are on."""
        return resources.nodes if self.world is None else -(-self.world // (self.local_world or self.world))

    def device(self, resources: Resources) -> Device:
        """The device: cpu or cuda, where auto is cuda if this machine has a GPU."""
        if resources.device is not Device.auto:
            return resources.device
        return Device.cuda if self.hardware.gpus else Device.cpu

    def ranks(self, resources: Resources) -> int:
        """The number of processes that a run will have."""
        if self.world is not None:
            return self.world
        on_gpus = self.device(resources) is Device.cuda and self.hardware.gpus
        gpus = self.hardware.gpus * (resources.nodes if self.node.is_described else 1)
        return resources.ranks or (gpus if on_gpus else CPU_RANKS)


def here() -> Scene:
    """The scene of this process. Refusal if the environment variables of a launcher are not valid."""
    try:
        return scene_of(os.environ)
    except ConfigError as error:
        raise Refusal(list(map(str, error.broken))) from None


def scene_of(environ: Mapping[str, str]) -> Scene:
    """The scene of a process with this environment. ConfigError if a launcher's variables are not valid."""
    found = hardware.detect(environ)
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return Scene(found)
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK")
    wrong = [name for name in names if not environ.get(name, "1").isdigit()]
    if wrong:
        raise ConfigError([Broken(f"the environment's {name} must be a whole number", environ[name]) for name in wrong])
    world = int(environ["WORLD_SIZE"])
    # With `srun --gpus-per-task=1` every rank sees one GPU, its own. torchrun shows all GPUs to all its ranks.
    own_gpu = found.gpus == 1 and "SLURM_LOCALID" in environ and "TORCHELASTIC_RUN_ID" not in environ
    return Scene(found, world, int(environ.get("LOCAL_WORLD_SIZE", world)), own_gpu)
