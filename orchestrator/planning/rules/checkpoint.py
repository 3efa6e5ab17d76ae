"""Rules for checkpoints: the one to resume from, and those to save."""

from __future__ import annotations

from orchestrator.config.near import fix_of_path
from orchestrator.config.schema import Adapter, AdapterKind, Checkpoint, WeightsExport
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene
from orchestrator.text.paths import expanded


def checkpoint_is_there(scene: Scene, checkpoint: Checkpoint) -> Broken | None:
    if checkpoint.resume in ("none", "auto"):
        return None
    path = expanded(checkpoint.resume)
    if path.is_dir():
        return None
    if path.is_file() and path.parent.name.startswith("step-"):  # inside the folder of a checkpoint
        fixes: tuple[str, ...] = (f"checkpoint.resume={path.parent}",)
    else:
        fixes = fix_of_path("checkpoint.resume", path)
    rule = "checkpoint.resume must be none, auto or the folder of a checkpoint"
    return Broken(rule, checkpoint.resume, (*fixes, "checkpoint.resume=none"))


def gathered_weights_are_whole(scene: Scene, checkpoint: Checkpoint, adapter: Adapter) -> Broken | None:
    if checkpoint.weights is WeightsExport.none or adapter.kind is AdapterKind.none:
        return None
    rule = "checkpoint.weights gathers a whole model; export-weights makes the folder of an adapter from a checkpoint"
    return Broken(rule, str(checkpoint.weights), ("checkpoint.weights=none",))
