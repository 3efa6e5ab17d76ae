"""Keys that an option does not use, which must keep their defaults: who sets one believes that it does something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from orchestrator.config.cluster import Cluster, ClusterKind
from orchestrator.config.schema import CheckpointKind, DataKind, LossKind, TrackingKind
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene
from zero_runtime.limits import as_typed
from zero_runtime.offload_plan import Tier

USED_ANYWHERE = ("kind", "exclusive", "usd_per_gpu_hour")


class Unused(NamedTuple):
    """Keys of a group that it does not use if `holds`. option: what it then is. others: settings that use them, in
    which {} stands for the value."""

    group: str
    option: str
    holds: Callable[[Any], bool]
    keys: tuple[str, ...]
    others: tuple[str, ...] = ()

    def check(self, scene: Scene, group: Any) -> Broken | None:
        """The first of the keys that is set, if there is one."""
        for name in self.keys if self.holds(group) else ():
            value, default = getattr(group, name), getattr(type(group)(), name)
            if value != default:
                key = f"{self.group}.{name}"
                fixes = (*(other.format(value) for other in self.others), f"{key}={as_typed(default)}")
                return Broken(f"{self.option} uses no {key}", str(value), fixes)
        return None


UNUSED = (
    Unused("data", "data=stdlib", lambda one: one.kind is DataKind.stdlib, ("path",), ("data=text data.path={}",)),
    Unused(
        "data", "data=synthetic", lambda one: one.kind is DataKind.synthetic, ("path",), ("data=text data.path={}",)
    ),
    Unused("loss", "loss=full", lambda one: one.kind is LossKind.full, ("tile",), ("loss=tiled",)),
    Unused(
        "checkpoint",
        "checkpoint=none",
        lambda one: one.kind is CheckpointKind.none,
        ("every", "keep_every", "node_folder"),
        ("checkpoint=sharded",),
    ),
    Unused("tracking", "tracking=none", lambda one: one.kind is TrackingKind.none, ("uri", "experiment")),
    Unused("parallel", "parallel.tp=1", lambda one: one.tp == 1, ("patterns",)),
    Unused("offload", "offload without nvme", lambda one: not one.uses_nvme, ("folder",)),
    Unused("offload", "offload=none", lambda one: one.params is one.optimizer is Tier.DEVICE, ("ratio",)),
    Unused(
        "cluster",
        "cluster=local",
        lambda one: one.kind is ClusterKind.local,
        tuple(one.name for one in fields(Cluster) if one.name not in USED_ANYWHERE),
    ),
)
