"""Rules for tensor parallelism: the ranks that it divides, and what does not know divided layers."""

from __future__ import annotations

from orchestrator.config.optimizer import Optimizer
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Adapter, AdapterKind, Loss, LossKind, Measure, MeasureKind, Resources
from orchestrator.config.state_groups import Zero
from orchestrator.config.strict import Broken
from orchestrator.plan.rules.scene import Scene
from zero_runtime.tensor_parallel.refusals import ALONE, refused_optimizer, refused_wire


def tp_divides_the_ranks(scene: Scene, parallel: Parallel, resources: Resources) -> Broken | None:
    ranks, tp = scene.ranks(resources), parallel.tp
    if ranks % tp == 0:
        return None
    nearest = max(one for one in range(1, min(tp, ranks) + 1) if ranks % one == 0)
    more = () if scene.world is not None or scene.hardware.gpus else (f"resources.ranks={tp * -(-ranks // tp)}",)
    return Broken(f"parallel.tp must divide the {ranks} ranks", str(tp), (f"parallel.tp={nearest}", *more))


def patterns_are_used(scene: Scene, parallel: Parallel) -> Broken | None:
    if parallel.tp > 1 or not parallel.patterns:
        return None
    return Broken("parallel.tp=1 uses no parallel.patterns", str(parallel.patterns), ("parallel.patterns=[]",))


def divided_heads_have_full_losses(scene: Scene, parallel: Parallel, loss: Loss) -> Broken | None:
    if parallel.tp == 1 or loss.kind is LossKind.full:
        return None
    rule = f"parallel.tp={parallel.tp} divides the logits by the vocabulary, and needs loss=full"
    return Broken(rule, f"loss={loss.kind}", ("loss=full", ALONE))


def divided_layers_have_no_adapters(scene: Scene, parallel: Parallel, adapter: Adapter) -> Broken | None:
    if parallel.tp == 1 or adapter.kind is AdapterKind.none:
        return None
    rule = f"parallel.tp={parallel.tp} divides linear layers, and cannot divide those with adapters"
    return Broken(rule, f"adapter={adapter.kind}", ("adapter=none", ALONE))


def slices_are_sent_exactly(scene: Scene, parallel: Parallel, zero: Zero) -> Broken | None:
    return next(refused_wire(parallel.tp, zero.wire), None)


def optimizer_updates_slices(scene: Scene, parallel: Parallel, optimizer: Optimizer) -> Broken | None:
    return next(refused_optimizer(parallel.tp, optimizer.rule), None)


def inference_has_full_layers(scene: Scene, parallel: Parallel, measure: Measure) -> Broken | None:
    if parallel.tp == 1 or measure.kind is MeasureKind.train:
        return None
    rule = f"parallel.tp={parallel.tp} is for training: measure=eval and `generate` compute with full layers"
    return Broken(rule, f"measure={measure.kind}", (ALONE,))
