"""One rank of a calibration: measures the costs that predicted step times are made from. Rank 0 writes the answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import nn

from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import append_event, require_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.kinds.classes import zeros
from orchestrator.wings.kinds.kind import is_causal, sample_of
from orchestrator.wings.predict import speed
from orchestrator.worker.machine_load import LoadMeter, others_share
from orchestrator.worker.setup import build_deferred, offload_plan, prepare_process, unit_rules, world_of
from orchestrator.workloads.models import token_losses
from zero_runtime.accounting import unit_sizes
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.collectives import Collectives
from zero_runtime.initial_values import Initialise
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.memory.short_model import Shortened, short_copy
from zero_runtime.predict.timing.machine_timer import Repeated, time_copies, time_links, time_updates
from zero_runtime.predict.timing.segment_timer import SegmentTimer, typical
from zero_runtime.predict.timing.segments import Key
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.settings import RuntimeSettings
from zero_runtime.unit_planner import UnitRules
from zero_runtime.watch.watch import RankWatch

STEPS = 8  # timed micro-batches of a model, and real steps
SIZES = [1 << power for power in (14, 18, 20, 22, 24, 26)]  # bytes of the tensors of collectives and copies
UPDATED = [1 << power for power in (14, 18, 20, 22)]  # elements of the shards that are updated
Answer = Any


def run_rank(attempt: AttemptPaths, rank: RankInfo) -> None:
    """Measures what calibration.json asks for; rank 0 writes an event with each answer, and result.json at the end."""
    asked = require_json(attempt.root / "calibration.json")
    config = from_dict(require_json(attempt.config))
    device = prepare_process(config, rank.local_rank)
    with world_of(attempt, config, rank, device) as watch:

        def tell(job: dict[str, Any], answer: Answer) -> None:
            event = {"event": "measured", "time": time.time(), "key": job["key"], "answer": answer}
            append_event(attempt.metrics, event)

        calibration = Calibration(device, watch, tell)
        calibration.answers(asked["jobs"], asked["budget_s"])
        if rank.rank == 0:
            write_json_atomic(attempt.result, {"others_share": calibration.others_share})


class ShortModel(NamedTuple):
    """A deferred model, the rule of its initial values and of its units, and what was removed; None if nothing was."""

    model: nn.Module
    initialise: Initialise | None
    rules: UnitRules
    short: Shortened | None


def _short_model(config: RunConfig) -> ShortModel:
    """The configured model, of whose repeating blocks few are left."""
    model, initialise = build_deferred(config)
    rules = unit_rules(config, model)
    short = short_copy(model, rules, config.recompute)
    if short is None:
        return ShortModel(model, initialise, rules, None)
    return ShortModel(short.model, initialise, rules, short.left)


def timer_of(config: RunConfig, device: torch.device) -> tuple[SegmentTimer, Shortened | None]:
    """The timer of a configuration's model. Of blocks that repeat few are built, if the second value is not None."""
    model, _, rules, short = _short_model(config)
    timer = SegmentTimer(
        model,
        rules,
        config.recompute,
        _tokens(config, device),
        lambda built, ids, labels: token_losses(built, ids, labels, config.loss.tile_tokens) / labels.numel(),
    )
    return timer, short


def short_runtime(config: RunConfig, device: torch.device, watch: RankWatch | None) -> ZeroRuntime:
    """The runtime of the configuration's model, of whose repeating blocks few are built, for one micro-batch."""
    model, initialise, _, _ = _short_model(config)
    Recomputation(model, config.recompute, device)
    settings = RuntimeSettings(
        clip_norm=config.optimizer.clip_norm,
        prefetch=config.zero.prefetch,
        unit_numel=config.zero.unit_numel,
        keep_dtype=tuple(config.precision.keep_dtype),
        initialise=initialise,
        watch=watch,
    )
    return ZeroRuntime(model, config.zero.plan, config.precision.mixed, config.optimizer.rule, settings, device)


def step_of(config: RunConfig, runtime: ZeroRuntime, device: torch.device) -> Callable[[], None]:
    """A step of one micro-batch, as training makes it."""
    ids, labels = _tokens(config, device)

    def step() -> None:
        tokens = runtime.sum_over_ranks(labels.numel())
        runtime.backward(token_losses(runtime.model, ids, labels, config.loss.tile_tokens) / tokens)
        runtime.step(0.0)

    return step


def _tokens(config: RunConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch: of a causal model random ids and labels, [micro, seq] int64, of others see `SampleShape`."""
    if config.data.packing:
        inputs, _ = zeros(sample_of(config), config.batch.micro, device)
        ids = inputs[:, 0].random_(int(config.model.config["vocab_size"]))
        return inputs, ids.roll(-1, 1)
    if not is_causal(config.model):
        inputs, labels = zeros(sample_of(config), config.batch.micro, device)
        return inputs if sample_of(config).is_image else inputs.random_(1, config.model.config["vocab_size"]), labels
    shape = (config.batch.micro, config.batch.seq)
    ids = torch.randint(int(config.model.config["vocab_size"]), shape, device=device)
    return ids, ids.roll(-1, 1)


class SegmentTurns:
    """Measures the seconds of a model's segments at the configured micro-batch, and of a real step of the same blocks.

    [Note: taking turns]
    A micro-batch whose segments are timed and a real step follow one another, so that a machine whose speed changes
    does not make a difference between them. Of two real steps in a turn the second is timed: gathers that a step leaves
    under way run beside the next step, as in training.
    """

    def __init__(self, config: RunConfig, repeated: Repeated, device: torch.device, watch: RankWatch | None) -> None:
        self._repeated = repeated
        self._timer, self._short = timer_of(config, device)
        self._runtime = short_runtime(speed.anchored(config), device, watch)
        self._step = step_of(config, self._runtime, device)
        self._alone: list[tuple[list[Key], list[float]]] = []
        self._real: list[float] = []
        for action in (self._timer.step, self._step, self._step):  # which may compile and allocate
            action()

    def turn(self) -> None:
        """Measure each of the two once. All ranks must call it together."""
        self._repeated.mean(0.0)  # ranks begin together, as in a step
        self._alone.append(self._timer.step())
        self._step()
        self._real.append(self._repeated.once(self._step))
        for unit in self._runtime.units:
            unit.wait_unshard()

    def answer(self) -> Answer:
        """The answer of a job from the turns since the last answer."""
        marks, runtime, short = self._alone[0][0], self._runtime, self._short
        table = typical(self._alone).map(self._repeated.mean)
        units = zip(unit_sizes(runtime), (unit.precision for unit in runtime.units), strict=True)
        anchor = {
            "seconds": self._repeated.mean(statistics.median(self._real)),
            "marks": [[int(kind), unit] for kind, unit in marks],
            "segments": table.in_order(marks),
            "units": [[asdict(size), asdict(precision)] for size, precision in units],
        }
        self._alone, self._real = [], []
        whole = table if short is None else short.complete_table(table)
        return {"table": whole.plain(), "anchor": anchor}

    def close(self) -> None:
        self._runtime.close()


class Calibration:
    """The measurements of one rank, each together with all other ranks. told: called on rank 0 with each job and its
    answer.

    others_share: the share of the cores that other processes took during the last `answers`; None if it is not known.
    """

    others_share: float | None = None

    def __init__(
        self, device: torch.device, watch: RankWatch | None, told: Callable[[dict[str, Any], Answer], None]
    ) -> None:
        self._device, self._watch, self._told = device, watch, told
        self._collectives = Collectives(1, PhaseClock(device), watch)
        self._repeated = Repeated(self._collectives, device)

    def answers(self, jobs: Sequence[dict[str, Any]], budget_s: float) -> dict[str, Answer]:
        """By key, in the order of the jobs, as far as the time allows; a job that has begun is completed."""
        measures = {"segments": self._segments, "links": self._links, "copies": self._copies, "update": self._update}
        began, found, load = time.monotonic(), {}, LoadMeter()
        for job in jobs:
            if self._repeated.mean(time.monotonic() - began) > budget_s:
                break
            self._collectives.journal.begin("start")  # in which ranks may be slow
            found[job["key"]] = measures[job["kind"]](from_dict(job["config"]))
            if self._collectives.rank == 0:
                self._told(job, found[job["key"]])
        self.others_share = others_share(self._collectives.gather_objects(load.end()))
        self._collectives.free()
        return found

    def _segments(self, config: RunConfig) -> Answer:
        with closing(SegmentTurns(config, self._repeated, self._device, self._watch)) as turns:
            for _ in range(STEPS):
                turns.turn()
            return turns.answer()

    def _links(self, config: RunConfig) -> Answer:
        world = config.resources.ranks
        collectives = Collectives(config.zero.plan.group_ranks(world), PhaseClock(self._device), self._watch)
        try:
            return asdict(time_links(self._repeated, collectives, self._device, SIZES))
        finally:
            collectives.free()

    def _copies(self, _config: RunConfig) -> Answer:
        return asdict(time_copies(self._repeated, self._device, SIZES))

    def _update(self, config: RunConfig) -> Answer:
        settings = RuntimeSettings(
            clip_norm=config.optimizer.clip_norm,
            watch=self._watch,
            offload=offload_plan(config.offload, config.output),
        )
        plan, precision, rule = ZeroPlan.from_stage(0), config.precision.mixed, config.optimizer.rule
        return asdict(time_updates(self._repeated, self._device, plan, precision, rule, settings, UPDATED))
