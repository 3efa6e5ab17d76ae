"""The environment in which a configuration is checked: this machine, and the world of torchrun or srun, if any."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config.schema import Device, Resources
from orchestrator.config.strict import Broken, ConfigError, Refusal
from orchestrator.machine import hardware
from orchestrator.machine.hardware import Hardware

CPU_RANKS = 2


@dataclass(frozen=True)
class Scene:
    """The environment in which a configuration is checked.

    `world`, `local_world`: the number of ranks that torchrun or srun has started, in all and on this machine; None if
    this process was started by neither. `own_gpu`: each of those ranks may see a GPU of its own alone.
    """

    hardware: Hardware
    world: int | None = None
    local_world: int | None = None
    own_gpu: bool = False

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
        return resources.ranks or (self.hardware.gpus if on_gpus else CPU_RANKS)


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
