"""Where a configuration is judged: this machine, and the world of torchrun or srun where one started this process."""

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
    """Where a configuration is judged. `world` and `local_world` are set by torchrun or srun, else None."""

    hardware: Hardware
    world: int | None = None
    local_world: int | None = None

    def device(self, resources: Resources) -> Device:
        """cpu or cuda: what `auto` comes to here."""
        if resources.device is not Device.auto:
            return resources.device
        return Device.cuda if self.hardware.gpus else Device.cpu

    def ranks(self, resources: Resources) -> int:
        """How many processes will run."""
        if self.world is not None:
            return self.world
        on_gpus = self.device(resources) is Device.cuda and self.hardware.gpus
        return resources.ranks or (self.hardware.gpus if on_gpus else CPU_RANKS)


def here() -> Scene:
    """This machine as it is found; Refusal where a launcher's environment makes no sense."""
    try:
        return scene_of(os.environ)
    except ConfigError as error:
        raise Refusal(list(map(str, error.broken))) from None


def scene_of(environ: Mapping[str, str]) -> Scene:
    """This machine, and the world that torchrun or srun started, where one did."""
    found = hardware.detect(environ)
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return Scene(found)
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK")
    wrong = [name for name in names if not environ.get(name, "1").isdigit()]
    if wrong:
        raise ConfigError([Broken(f"the environment's {name} must be a whole number", environ[name]) for name in wrong])
    world = int(environ["WORLD_SIZE"])
    return Scene(found, world, int(environ.get("LOCAL_WORLD_SIZE", world)))
