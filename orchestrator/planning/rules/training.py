"""Rules for training to an end: where it is, what it validates on, and which keys are used without it."""

from __future__ import annotations

from dataclasses import fields

from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Measure, Train
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene


def training_has_one_end(scene: Scene, measure: Measure, train: Train) -> Broken | None:
    if measure.steps is not None or (train.max_steps is None) != (train.epochs is None):
        return None
    if train.max_steps is None:
        rule = "measure=train needs an end: train.max_steps or train.epochs"
        return Broken(rule, "neither", ("train.max_steps=1000", "train.epochs=1"))
    rule = "measure=train has one end, train.max_steps or train.epochs"
    return Broken(rule, f"{train.max_steps} steps and {train.epochs:g} epochs", ("train.epochs=null",))


def training_keys_are_used(scene: Scene, measure: Measure, train: Train) -> Broken | None:
    if measure.steps is None:
        return None
    for key in fields(train):
        if (value := getattr(train, key.name)) != key.default:
            rule = f"train.{key.name} is for measure=train without measure.steps, which trains to an end"
            unset = "null" if key.default is None else str(key.default).lower()
            end = "" if train.max_steps or train.epochs else " train.max_steps=1000"
            fixes = (f"measure=train measure.steps=null{end}", f"train.{key.name}={unset}")
            return Broken(rule, f"{value} with measure.steps={measure.steps}", fixes)
    return None


def option_is_not_undone(option: str | None, measure: Measure) -> Broken | None:
    """Only a line shows this: its configuration is that of a measurement. `option`: what it chose for `measure`."""
    if option != "train" or measure.steps is None:
        return None
    rule = "measure=train trains to train.max_steps or train.epochs, and measure.steps would only measure so many"
    return Broken(rule, str(measure.steps), ("measure.steps=null", "measure=quick"))


def training_on_the_way_is_validated(scene: Scene, measure: Measure, train: Train) -> Broken | None:
    if train.eval_every is None or measure.validation_batches != 0:
        return None
    rule = "train.eval_every validates, which measure.validation_batches=0 turns off"
    return Broken(rule, str(train.eval_every), ("train.eval_every=null", "measure.validation_batches=null"))


def examples_have_full_layers(scene: Scene, measure: Measure, train: Train, parallel: Parallel) -> Broken | None:
    if measure.steps is not None or train.examples == 0 or parallel.group == 1:
        return None
    rule = (
        "train.examples are generated with full layers and sequences on each rank, without parallel.tp and parallel.sp"
    )
    return Broken(rule, str(train.examples), ("train.examples=0",))
