"""Another engine in the place of zero-lab's own runtime: what a rank's loop, measurement and result use of it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from orchestrator import wings
from orchestrator.config.schema import RunConfig
from orchestrator.wings.engines.contract import EngineModule, Task, TrainingEngine
from orchestrator.worker.accounts import state_rows
from orchestrator.worker.measure import begin_peak
from orchestrator.worker.setup import TrainingSetup, build_deferred
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.census import HeldStates
from zero_runtime.collectives import Collectives
from zero_runtime.divisions import SequencePart
from zero_runtime.dtypes import short_name
from zero_runtime.errors import NonFiniteError
from zero_runtime.initial_values import Initialise, InitialValues
from zero_runtime.ledger import Ledger
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.step_report import StepReport
from zero_runtime.watch.watch import RankWatch
from zero_runtime.wings import READ_WEIGHTS_FOLDER, load


def build(
    config: RunConfig, device: torch.device, watch: RankWatch | None, stop_asked: Callable[[], bool] | None = None
) -> TrainingSetup:
    """The engine that config.engine names, with the model's first values. Needs the process group."""
    # An engine that compiles calls programs of its environment, ninja for one, which nobody has activated.
    os.environ["PATH"] = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)])
    module: EngineModule = wings.load(wings.ENGINES[config.engine.kind])
    model, initialise = build_deferred(config)
    begin_peak()
    parameters = sum(param.numel() for param in model.parameters())
    recomputation = Recomputation(model, config.recompute, device)
    with first_values(config, model, initialise) as first_value:
        runtime = ForeignRuntime(config, device, watch, stop_asked)
        runtime.start(module.build(Task(config, model, first_value, device)))
    return TrainingSetup(runtime, ForeignAccounts(config, runtime, module, parameters), recomputation)


@contextmanager
def first_values(
    config: RunConfig, model: nn.Module, initialise: Initialise | None
) -> Iterator[Callable[[str, nn.Parameter], torch.Tensor]]:
    """Gives the first value of each parameter of a model on the meta device: that of the folder of weights, or drawn
    from the seed. Fills the model's buffers."""
    values = InitialValues(model, seed=config.seed, initialise=initialise)
    values.fill_buffers()
    if config.model.path is None:
        yield values.draw
        return
    with load(READ_WEIGHTS_FOLDER)(config.model.path, model, config.model.adapter) as weights:
        stored = set(weights.names())

        def first_value(name: str, param: nn.Parameter) -> torch.Tensor:
            """Adapters are not in the folder."""
            if name not in stored:
                return values.draw(name, param)
            found: torch.Tensor = weights.read(name, 0, param.numel())
            return found.reshape(param.shape)

        yield first_value


class ForeignRuntime:
    """Trains with another engine, by the methods of ZeroRuntime that a run uses.

    The other engine's collectives are its own. Those of `collectives` are the control messages of the run: counts of
    tokens, and the loss of each step, which every engine's row reports.
    """

    trains = True

    def __init__(
        self, config: RunConfig, device: torch.device, watch: RankWatch | None, stop_asked: Callable[[], bool] | None
    ) -> None:
        self.device, self.clock = device, PhaseClock(device)
        self.collectives = Collectives(1, self.clock, watch)
        if watch is not None:
            watch.count_others(issued_collectives)
        self.collectives.journal.begin("start")
        self.sequence = SequencePart()
        self.scaler = SimpleNamespace(scale=1.0)
        self.updates = 0
        self.engine: TrainingEngine
        self._micro_batches, self._count = config.batch.accumulation, 0
        self._stop_asked, self._kind = stop_asked, config.engine.kind
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def start(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self._expect_micro_batch()
        self.collectives.journal.begin("forward")

    @property
    def model(self) -> Any:
        return self.engine.module

    def _expect_micro_batch(self) -> None:
        self.engine.before_micro_batch(last=self._count == self._micro_batches - 1)

    def sum_over_ranks(self, count: int) -> torch.Tensor:
        """The sum of `count` over all ranks, as a 0-dim int64 tensor on the device. Every rank must call it."""
        return self.collectives.sum_over_data_(torch.full((), count, dtype=torch.int64, device=self.device))

    def no_sync(self) -> AbstractContextManager[None]:
        """The engine knows by its configuration which backwards send nothing."""
        return nullcontext()

    @contextmanager
    def uneven_forwards(self) -> Iterator[None]:
        """Without gradients. All ranks make the same number of calls."""
        with torch.no_grad():
            yield

    def backward(self, loss: torch.Tensor) -> None:
        self._loss += loss.detach()
        self.collectives.journal.begin("backward")
        self.engine.backward(loss)
        self._count += 1
        if self._count < self._micro_batches:
            self.collectives.journal.begin("forward")
            self._expect_micro_batch()

    def step(self, rates: Rates) -> StepReport:
        """NonFiniteError on every rank after an update with a loss that is not finite."""
        self.collectives.journal.begin("step")
        updated = self.engine.step(rates)
        self._count = 0
        self._expect_micro_batch()  # not before the update: DeepSpeed would take the step for one between two updates
        self.updates += not updated.skipped
        self.scaler.scale = updated.loss_scale
        asked = self._stop_asked is not None and self._stop_asked()
        sums = self.collectives.sum_over_ranks_(torch.stack([self._loss, torch.full_like(self._loss, float(asked))]))
        found = torch.full_like(self._loss, math.nan) if updated.norm is None else updated.norm
        own = torch.as_tensor(found, dtype=torch.float64, device=self.device).reshape(1)
        loss, stop, norm = torch.cat([sums, own]).tolist()  # the step's only wait for the device
        self._loss.zero_()
        self.collectives.journal.next_step()
        report = StepReport(loss, norm, updated.skipped, updated.loss_scale, stop=bool(stop))
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {self.updates}: the loss is {loss} with engine={self._kind}")
        return report

    def find_non_finite(self, backwards: Callable[[], None]) -> str:
        return "the engine has updated its weights already, so the cause cannot be located"

    def reset_ledger(self) -> Ledger:
        """The run's own control messages alone: those of the engine are counted by work.py."""
        return self.collectives.ledger.reset()

    def close(self) -> None:
        self.engine.close()


def issued_collectives() -> int:
    """How many collectives this rank has issued in all of its groups, whoever called them.

    A rank that hangs in its engine's code has issued fewer than those that wait for it there.
    """
    # Backends count them for the flight recorder. Nothing public tells the number, and to count each call would slow
    # the steps that are measured.
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


class ForeignAccounts:
    """What is counted of another engine, see orchestrator/worker/accounts.py."""

    def __init__(self, config: RunConfig, runtime: ForeignRuntime, module: EngineModule, parameters: int) -> None:
        self.parameters = parameters
        self._config, self._runtime, self._module = config, runtime, module
        self._dtypes: dict[str, dict[str, int]] = {}
        self.grads: tuple[float, int] = 0.0, 0  # of this rank in the audited step: the sum of squares, the elements

    def held(self) -> HeldStates:
        engine = self._runtime.engine
        by_name = dict(engine.held())
        states = {"params": by_name.pop("params", []), "grads": by_name.pop("grads", [])}
        states["optimizer"] = [tensor for tensors in by_name.values() for tensor in tensors]
        kept = {
            name: [one for one in tensors if one.device == self._runtime.device] for name, tensors in states.items()
        }
        host = [one for tensors in states.values() for one in tensors if one.device != self._runtime.device]
        return HeldStates(engine.module, self._runtime.device, kept, host)

    @contextmanager
    def auditing(self) -> Iterator[None]:
        yield
        held = self._runtime.engine.held()
        self._dtypes, grads = bytes_by_dtype(held), held.get("grads", [])
        norms = [float(torch.linalg.vector_norm(one, dtype=torch.float32)) for one in grads]
        self.grads = sum(norm * norm for norm in norms), sum(one.numel() for one in grads)

    def dtypes(self, ledger: Ledger) -> dict[str, dict[str, int]]:
        return self._dtypes

    def states(self, measured: Mapping[str, int | None]) -> dict[str, Any]:
        predicted = self._predicted
        return {
            "states": state_rows({name: predicted.get(name) for name in ("params", "grads", "optimizer")}, measured),
            "formula": "",
            "scratch_bytes": 0,
            "scratch_predicted_bytes": 0,
            "host": {"predicted_bytes": predicted.get("host"), "measured_bytes": measured.get("host")},
            "padding_bytes": 0,
        }

    @cached_property
    def _predicted(self) -> dict[str, int]:
        found: dict[str, int] = wings.load(wings.PREDICTED).engine_states(self._config)
        return found

    def communication(self, ledger: Ledger) -> dict[str, Any]:
        return {"data": {}, "control_bytes": ledger.control.bytes}

    def settle(self) -> None:
        """An engine's step has ended when its `step` returns, or on a GPU in the stream."""

    def added(self) -> dict[str, Any]:
        config = self._config
        return {
            "engine": {
                "kind": config.engine.kind,
                "versions": config.engine.versions,
                "settings": self._module.settings_of(config),
                "notes": self._module.notes_of(config),
            }
        }


def bytes_by_dtype(held: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes by component and dtype."""
    found: dict[str, dict[str, int]] = {}
    for component, tensors in held.items():
        for tensor in tensors:
            name = short_name(tensor.dtype)
            own = found.setdefault(component, {})
            own[name] = own.get(name, 0) + tensor.nbytes
    return found
