"""Counts the work of a run in one way for every engine, ours included: weights, tokens, updates and messages.

The first steps of each attempt are counted, and again some after all that is timed, in which an engine could do other
work than it has shown. What losses a training has there depends on how many steps were timed, which differs from row to
row. So the same engine is taken back to the first weights, and its losses are compared with those of the first steps.

Nothing is taken from what the engine says: tokens are those that its module is called with, updates are changes of its
weights, trained is what has other values at the end, and messages are seen where they begin (messages.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from orchestrator import wings
from orchestrator.wings.engines.beginning import begin_again
from orchestrator.wings.engines.checksums import checksum, hex_of, hexadecimal
from orchestrator.wings.engines.equality import ALIKE_STEPS, STEPS
from orchestrator.wings.engines.messages import MessageCount, messages
from orchestrator.wings.engines.probe import Probe
from orchestrator.worker.listeners import Listener, RankRun
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.ledger import Ledger
from zero_runtime.step_report import StepReport

UPCAST = "16-bit weights are converted to fp32 for each operation, because this processor has no 16-bit products"
SPREAD = "orchestrator.wings.engines.spread:spread_of"


class CountedWork(Listener):
    """Records result["work"]. A run that resumes has none."""

    def __init__(self, run: RankRun) -> None:
        super().__init__(run)
        self._steps: list[_Step] = []
        self._counts: MessageCount | None = None  # in the step that is counted
        self._within = ExitStack()
        self._counted, self._ledger = 0, Ledger()
        self._work: dict[str, Any] = {}
        self._recording = False
        self._first = dict(_checksums(run))
        self._watch()

    def _watch(self) -> None:
        """Steps are counted from here on. The probe is made anew, as an engine may hold other tensors by then."""
        self._steps.clear()
        self._hook = self.run.runtime.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._probe = Probe(self.run)

    @property
    def _computes_wider(self) -> bool:
        precision = self.run.config.precision
        return precision.compute != precision.dtypes.param

    def before_step(self, step: int) -> None:
        if step > self.run.loop.steps:
            return
        self._recording = step == len(self._steps) + 1 <= STEPS
        if self._recording:
            self._steps.append(_Step())
        if self.run.measurement.counts(step - 1):
            self._counted, self._counts = step, MessageCount(len(self._first))
            self._within.enter_context(self._counts)

    def _before_forward(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._recording or not torch.is_grad_enabled():  # a validation after the step trains on nothing
            return
        ids, step, here = kwargs["input_ids"], self._steps[-1], self.run.runtime.collectives
        step.weights.append(self._probe.read())
        if here.tensor_rank == 0 and here.sequence_rank == 0:  # the ranks of such a group have the same sequences
            size = self.run.config.batch.global_size // here.batch_world
            first = here.batch_rank * size + step.sequences
            step.tokens.append(checksum(ids, first * ids.shape[1]))
            step.sequences += ids.shape[0]
            step.micro_batches += 1

    def after_step(self, step: int) -> None:
        if self._recording:
            self._steps[-1].weights.append(self._probe.read())
            self._recording = False
        if self._counts is not None:
            self._within.close()
            self._ledger, self._counts = self._counts.ledger, None
        if step == STEPS:
            self._hook.remove()

    def at_end(self) -> None:
        run = self.run
        self._hook.remove()
        if not self._steps:
            return
        run.measurement.keep_peaks()  # what follows uses memory of its own
        readings, trained = run.measurement.readings, self._trained()
        steps = self._counts_of(readings.losses, readings.norms)
        norm = self._audited_norm(sum(trained.values()))
        if self._counted <= len(steps) and steps[self._counted - 1]["norm"] is None:
            steps[self._counted - 1]["norm"] = norm
        self._work = {
            "weights": hex_of(f"{name} {one.computed}" for name, one in self._first.items()),
            "trained": [len(trained), hex_of(trained)],
            "steps": steps,
            "messages": messages(self._ledger),
            "control_bytes": self._ledger.control.bytes,
        }
        if run.config.engine.kind == "plain":
            self._work["spread"] = wings.load(SPREAD)(run, steps)

    def _trained(self) -> dict[str, int]:
        """The elements of each parameter that has other values than at the beginning. A collective."""
        return {name: one.elements for name, one in _checksums(self.run) if one.exact != self._first[name].exact}

    def _counts_of(self, losses: Sequence[float], norms: Sequence[float]) -> list[dict[str, Any]]:
        """The steps that were counted, in all ranks, with these losses and norms. A collective."""
        ranks = self.run.runtime.collectives.gather_objects([step.read() for step in self._steps])
        return [
            {**_combined(counts), "loss": loss, "norm": norm if math.isfinite(norm) else None}
            for counts, loss, norm in zip(zip(*ranks, strict=True), losses, norms, strict=False)
        ]

    def _after_the_last(self) -> dict[str, Any]:
        """The dtypes and messages of a step after all that were timed; then the first steps once more. A collective."""
        run, reports = self.run, list[StepReport]()
        accounts, count = run.measurement.accounts, min(ALIKE_STEPS, len(self._work["steps"]))
        run.loop.step(run.measurement)  # which gathers again what was let go when the weights were read
        run.runtime.reset_ledger()
        with MessageCount(len(self._first)) as counted:
            run.loop.step(run.measurement, counts=True)
        dtypes = accounts.dtypes(run.runtime.reset_ledger())
        begin_again(run)
        self._watch()
        for step in range(count):
            self._recording = True
            self._steps.append(_Step())
            reports.append(run.loop.step(run.measurement, counts=step == count - 1)[0])
            self.after_step(0)
            run.loop.advance()
        self._hook.remove()
        trained = self._trained()
        steps = self._counts_of([one.loss for one in reports], [one.grad_norm for one in reports])
        norm = self._audited_norm(sum(trained.values()))
        steps[-1]["norm"] = norm if steps[-1]["norm"] is None else steps[-1]["norm"]
        names = [len(trained), hex_of(trained)]
        return {"steps": steps, "trained": names, "dtypes": dtypes, "messages": messages(counted.ledger)}

    def _audited_norm(self, trained: int) -> float | None:
        """The norm of the gradients before the update of the counted step, for engines that do not clip and so compute
        none: else sums and means, between which Adam makes no difference, would look alike. trained: elements."""
        accounts: Any = self.run.measurement.accounts
        if self.run.config.engine.is_own or self.run.config.precision.scales_loss:  # by which gradients are multiplied
            return None
        squares, held = map(sum, zip(*self.run.runtime.collectives.gather_objects(accounts.grads), strict=True))
        copies = round(held / trained) if trained else 0  # of each gradient, in all ranks
        return math.sqrt(squares / copies) if copies else None

    def add_to(self, result: dict[str, Any]) -> None:
        engine = self.run.config.engine
        if not self._work:
            return
        self._work["late"] = self._after_the_last()  # all was measured: nothing of it is in the result
        if not result:
            return
        result["work"] = self._work
        if engine.is_own:
            notes = [UPCAST] if self._computes_wider else []
            result["engine"] = {"kind": engine.kind, "versions": engine.versions, "settings": {}, "notes": notes}
            return
        data = {kind: asdict(volume) for kind, volume in sorted(self._ledger.data.items())}
        result["communication"] |= {"data": data, "control_bytes": self._work["control_bytes"]}


class _Checksums(NamedTuple):
    """Of a parameter's full value: as the optimizer has it, and rounded to the dtype in which the model computes."""

    exact: int
    computed: int
    elements: int


@dataclass
class _Step:
    """A rank's counts of a step. weights: checksums of some weights, before each forward and after the update."""

    weights: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)
    sequences: int = 0
    micro_batches: int = 0

    def read(self) -> dict[str, int]:
        """Waits for the device."""
        return {
            "tokens": sum(int(one) for one in self.tokens),
            "sequences": self.sequences,
            "micro_batches": self.micro_batches,
            "updates": sum(before != after for before, after in pairwise(map(int, self.weights))),
        }


def _combined(ranks: Sequence[dict[str, int]]) -> dict[str, Any]:
    """The counts of all ranks. A rank's sampled weights may be some that had no gradient, so one that changed is
    enough."""
    return {
        "tokens": hexadecimal(one["tokens"] for one in ranks),
        "sequences": sum(one["sequences"] for one in ranks),
        "micro_batches": sum(one["micro_batches"] for one in ranks),
        "updates": max(one["updates"] for one in ranks),
    }


def _checksums(run: RankRun) -> Iterator[tuple[str, _Checksums]]:
    """The checksums of every parameter by its name. A collective, in which no rank has more than a unit at a time."""
    computed = TORCH_DTYPE[run.config.precision.dtypes.param]
    for name, value in _full_values(run):
        exact = int(checksum(value))
        yield (
            name,
            _Checksums(exact, exact if value.dtype == computed else int(checksum(value.to(computed))), value.numel()),
        )


def _full_values(run: RankRun) -> Iterator[tuple[str, torch.Tensor]]:
    runtime: Any = run.runtime
    if not run.config.engine.is_own:
        yield from runtime.engine.parameters()
        return
    for unit in runtime.units:
        with runtime.full_params(unit.names) as values:
            yield from values.items()
