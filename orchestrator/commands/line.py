"""Carries out a composed line of overrides: one run, a sweep, or a rank of another launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator import wings
from orchestrator.compose import arguments, point_count
from orchestrator.compose.arguments import Arguments
from orchestrator.compose.labels import sweep_name
from orchestrator.compose.line import composed
from orchestrator.config.cluster import ClusterError, ClusterKind
from orchestrator.config.near import did_you_mean
from orchestrator.config.schema import Device, RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.launch import environment
from orchestrator.machine import hardware
from orchestrator.planning.point import Point, Wishes, retry_states
from orchestrator.planning.points import checked_points, judged
from orchestrator.planning.rules.scene import Scene, here
from orchestrator.text.streams import complain, few

if TYPE_CHECKING:
    from orchestrator.commands.admission import Admission
    from orchestrator.commands.sweep import SweepRequest
    from orchestrator.compose.composition import Composition


def run(composition: Composition, asked: Arguments) -> int:
    """The exit code. Refusal: lists everything wrong with the points."""
    os.umask(0o077)  # only the user can read what the runs write
    _join_step()
    scene = replace(here(), plan_only="--plan" in asked.flags)
    # The command sends points to a cluster and exits, so that even a single point is handled as a sweep.
    on_cluster = composition.points[0].values.get("cluster", {}).get("kind") == ClusterKind.slurm.value
    if composition.is_sweep or "--plan" in asked.flags or (on_cluster and scene.world is None):
        request = _sweep_request(composition, asked, scene)
        from orchestrator.commands.sweep import run_sweep

        return run_sweep(request, scene.hardware)
    only_sweeps = ("--plan", "--fresh", "--detach", "--retry", "--anchor", point_count.FLAG)
    if sweeping := [flag for flag in only_sweeps if flag in asked.flags]:
        raise Refusal([f"{' and '.join(sweeping)} belongs to a sweep: add -m, or leave it out"])
    points, problems = checked_points(composition, scene)
    if problems:
        raise Refusal(problems)
    _check_fault(points)
    _note_machine(scene, [point.config for point in points])
    as_json = "--json" in asked.flags
    from orchestrator.planning.rules.output import place_problems

    if scene.world is not None:
        if as_json:
            raise Refusal(["--json: ranks of torchrun or srun print none; the records have a result.json"])
        if problems := place_problems(points[0].config.output, starts_ranks=False):
            raise Refusal(problems)
        return int(wings.load(wings.JOIN)(points[0], admission=_admission(asked, scene)))
    from orchestrator.commands.run import run_point
    from orchestrator.planning.predictor import predictor

    admission = _admission(asked, scene)
    if wrong := predictor().problems(points, counting_within_s=admission.within_s):
        raise Refusal(list(wrong.values()))
    if problems := place_problems(points[0].config.output):
        raise Refusal(problems)

    return run_point(points[0], as_json=as_json, admission=admission)


def _admission(asked: Arguments, scene: Scene) -> Admission:
    from orchestrator.commands.admission import Admission

    return Admission(prune=asked.flags.get("--prune") != "off", ranks_per_node=scene.local_world)


def _join_step() -> None:
    """A task of the user's own srun is a rank: without the others' variables each task would run all of it alone."""
    if "SLURM_STEP_ID" not in os.environ:
        return
    try:
        wings.load(wings.PLACE_IN_STEP)(os.environ)
    except ClusterError as error:
        raise Refusal([str(error)]) from None


def sweep_request(argv: Sequence[str]) -> tuple[SweepRequest, hardware.Hardware]:
    """The sweep that a command line describes, and this machine. Refusal: lists everything wrong with the arguments."""
    asked = arguments.split(argv)
    scene = replace(here(), plan_only="--plan" in asked.flags)
    return _sweep_request(composed(asked), asked, scene), scene.hardware


def _sweep_request(composition: Composition, asked: Arguments, scene: Scene) -> SweepRequest:
    from orchestrator.commands.sweep import SweepRequest
    from orchestrator.report import ranking

    all_points, problems = judged(composition, scene)
    if scene.world is not None:
        problems.insert(0, "a sweep starts its own processes: run it without torchrun or srun")
    wishes = _wishes(asked)
    points = [point for point in all_points if isinstance(point, Point)]
    metric = composition.sweep.rank_by or (ranking.OF_TRAINING if _are_trained(points) else "")
    sweep_problems = [ranking.metric_problem(metric) if metric else None, _places_problem(points)]
    sweep_problems.append(_anchor_problem(wishes.anchor, points))
    problems = [*filter(None, sweep_problems), *problems]
    if not points or scene.world is not None or any(sweep_problems):
        raise Refusal(problems)
    _check_fault(points)
    _note_machine(scene, [point.config for point in points])
    if composition.sweep.prune in ("off", False) and "--prune" not in asked.flags:
        wishes = replace(wishes, prune=False)
    return SweepRequest(
        sweep_name(composition.axes, asked.overrides),
        tuple(all_points),
        tuple(asked.command()),
        wishes,
        metric,
        plan_only="--plan" in asked.flags,
        detach="--detach" in asked.flags,
        as_json="--json" in asked.flags,
    )


def _are_trained(points: Sequence[Point]) -> bool:
    """Whether all points train to an end and validate: what they learn is then what they are compared by."""
    configs = [point.config for point in points]
    return all(one.trains_to_the_end and one.measure.validation_batches != 0 for one in configs) and bool(configs)


def _check_fault(points: Sequence[Point]) -> None:
    """Refuses a ZLAB_FAULT that cannot be parsed or acts in no point: such a run would seem to pass its test."""
    if not os.environ.get(wings.FAULT):
        return
    try:
        # How many steps some epochs have is not known here.
        sizes = [(point.config.resources.ranks, point.config.steps()) for point in points]
        problem = wings.load(wings.CHECK_FAULT)(sizes)
    except ValueError as error:
        raise Refusal([str(error)]) from None
    if problem:
        raise Refusal([problem])


def _anchor_problem(label: str, points: Sequence[Point]) -> str | None:
    """The problem if the anchor is none of the points."""
    labels = [point.label for point in points]
    if not label or label in labels:
        return None
    hint = did_you_mean(label, labels)
    return f"--anchor {label}: there is no point of that label.{hint}      points: {' '.join(few(labels))}"


def _places_problem(points: Sequence[Point]) -> str | None:
    """The problem if the points differ in output folder or scheduler: a sweep has one of each."""
    for key, values in (
        ("cluster", {str(point.config.cluster.kind) for point in points}),
        ("output", {point.config.output for point in points}),
    ):
        if len(values) > 1:
            return f"a sweep has one {key}, found {' and '.join(sorted(values))}      fix: one sweep for each"
    return None


def _wishes(asked: Arguments) -> Wishes:
    retry = asked.flags.get("--retry")
    return Wishes(
        fresh="--fresh" in asked.flags,
        retry=retry_states(retry) if retry else frozenset(),
        prune=asked.flags.get("--prune") != "off",
        anchor=asked.flags.get("--anchor") or "",
    )


def _note_machine(scene: Scene, configs: Sequence[RunConfig]) -> None:
    config = configs[0]
    idle, cores = scene.hardware.idle_gpus, scene.hardware.cores
    ranks = max(one.resources.ranks for one in configs)
    if ranks > cores and config.resources.device is Device.cpu and config.cluster.kind is ClusterKind.local:
        complain(f"warning: {ranks} CPU ranks take turns on {cores} cores: their speed is not that of as many cores")
    if idle and config.resources.device is Device.cpu:
        print(f"note: {idle} GPUs stay idle: the installed torch is built without CUDA", file=sys.stderr)
    warning = environment.caution(os.environ, config.resources.device)
    if warning is not None and os.environ.get("RANK", "0") == "0":
        complain(f"warning: {warning}")
