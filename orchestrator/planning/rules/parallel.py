"""Rules for tensor and sequence parallelism: what they divide, and what does not know divided layers or sequences."""

from __future__ import annotations

from orchestrator.config.optimizer import Optimizer
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Batch, Measure, MeasureKind, Resources
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene
from zero_runtime.wings import REFUSED_OPTIMIZER, load

ALONE = "parallel.tp=1"


def tp_divides_the_ranks(scene: Scene, parallel: Parallel, resources: Resources) -> Broken | None:
    ranks, tp = scene.ranks(resources), parallel.tp
    if ranks % tp == 0:
        return None
    return Broken(f"parallel.tp must divide the {ranks} ranks", str(tp), _dividing(scene, "tp", tp, ranks))


def _dividing(scene: Scene, name: str, degree: int, ranks: int) -> tuple[str, ...]:
    """The largest degree below that divides the ranks, and the ranks above that it divides if they can be started."""
    nearest = max(one for one in range(1, min(degree, ranks) + 1) if ranks % one == 0)
    more = -(-ranks // degree) * degree
    others = () if scene.world is not None or scene.hardware.gpus else (f"resources.ranks={more}",)
    return (f"parallel.{name}={nearest}", *others)


def optimizer_updates_slices(scene: Scene, parallel: Parallel, optimizer: Optimizer) -> Broken | None:
    return next(load(REFUSED_OPTIMIZER)(parallel.tp, optimizer.rule), None) if parallel.tp > 1 else None


def inference_has_full_layers(scene: Scene, parallel: Parallel, measure: Measure) -> Broken | None:
    if parallel.tp == 1 or measure.kind is MeasureKind.train:
        return None
    rule = f"parallel.tp={parallel.tp} is for training: measure=eval and `generate` compute with full layers"
    return Broken(rule, f"measure={measure.kind}", (ALONE,))


# ---- sequence parallelism --------------------------------------------------------------------------------------------


def sp_divides_the_ranks(scene: Scene, parallel: Parallel, resources: Resources) -> Broken | None:
    ranks, sp = scene.ranks(resources), parallel.sp
    if ranks % sp == 0:
        return None
    return Broken(f"parallel.sp must divide the {ranks} ranks", str(sp), _dividing(scene, "sp", sp, ranks))


def heads_are_divided_once(scene: Scene, parallel: Parallel) -> Broken | None:
    if parallel.tp == 1 or parallel.sp == 1:
        return None
    rule = "parallel.tp and parallel.sp both divide the attention's heads: one of them must be 1"
    return Broken(rule, f"{parallel.tp} and {parallel.sp}", ("parallel.sp=1", ALONE))


def sp_divides_the_sequences(scene: Scene, parallel: Parallel, batch: Batch) -> Broken | None:
    sp, left = parallel.sp, batch.seq % parallel.sp
    if not left:
        return None
    fits = [one for one in (batch.seq - left, batch.seq - left + sp) if one]
    fixes = tuple(f"batch.seq={one}" for one in fits)
    return Broken(f"parallel.sp={sp} must divide batch.seq", str(batch.seq), (*fixes, "parallel.sp=1"))


def inference_has_whole_sequences(scene: Scene, parallel: Parallel, measure: Measure) -> Broken | None:
    if parallel.sp == 1 or measure.kind is MeasureKind.train:
        return None
    rule = f"parallel.sp={parallel.sp} is for training: measure=eval and `generate` compute with whole sequences"
    return Broken(rule, f"measure={measure.kind}", ("parallel.sp=1",))
