"""ZeroRuntime: trains a model with ZeRO through forward, backward and step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zero_runtime import non_finite, whole_tensors
from zero_runtime.agreed_parameters import AgreedParameters
from zero_runtime.build import UnitBuilder, checked_plan, make_collectives
from zero_runtime.closed import hand_back, retire
from zero_runtime.divisions import LayerDivision
from zero_runtime.errors import CallOrderError, NonFiniteError, PlanError, RankError
from zero_runtime.kernels.reference import root64
from zero_runtime.ledger import Ledger
from zero_runtime.module_hooks import ModuleHooks
from zero_runtime.optim.configs import OptimizerConfig
from zero_runtime.optim.grad_norm import clip_coefficient, local_sum_of_squares
from zero_runtime.optim.loss_scaler import LossScaler
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.own_device import make_current
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.schedule import Schedule, UnevenCalls
from zero_runtime.settings import RuntimeSettings
from zero_runtime.shared_backward import backward_through
from zero_runtime.state_tier import NOTHING_OFFLOADED, residence
from zero_runtime.step_backwards import Collaborators, StepBackwards
from zero_runtime.step_report import StepReport
from zero_runtime.unit import Unit
from zero_runtime.wings import REFUSE_TRAINING, TURNS, WRAP_GENERATE, load

__all__ = ["RuntimeSettings", "ZeroRuntime"]


class ZeroRuntime:
    """Trains `model` over all ranks of the default process group, which must be initialized.

    The runtime takes ownership of the model's parameters: they become views of flat tensors and hold values only while
    they are in use. Gradients are **summed** over the ranks, so the loss passed to `backward` must be this rank's and
    micro-batch's share of the objective. For a mean over all tokens, that is the sum of the local token losses divided
    by `sum_over_ranks(local tokens)`.

    Without an optimizer it is for inference: the parameters are frozen, there are no gradients, masters and states, and
    the plan shards the parameters or nothing (ConfigError otherwise).
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ZeroPlan,
        precision: MixedPrecision,
        optimizer: OptimizerConfig | None,
        settings: RuntimeSettings,
        device: torch.device,
    ) -> None:
        # Before process groups are made: a rank that refuses and ends while another one still connects would leave it
        # with an error of the connection.
        plan = checked_plan(model, plan, precision, optimizer, settings, device.type)
        self.trains = optimizer is not None
        self.model = model
        self.plan = plan
        self.precision = precision
        self.settings = settings
        self.device = device = make_current(device)
        self.clock = PhaseClock(device)
        division = settings.tensor_parallel.division(model, trains=self.trains)
        self.collectives = make_collectives(plan, settings, self.clock)
        self.collectives.journal.begin("start")
        # As the model is given: its parameters are views of flat tensors from here on.
        self.given_dtypes = {name: param.dtype for name, param in model.named_parameters()}
        try:
            slices = division.slices(self.collectives)
            builder = UnitBuilder(plan, precision, settings, self.collectives, device, slices)
            self.units, self.optimizer, self.tier = builder.build(model, optimizer)
        except BaseException:
            self.collectives.free()  # the caller gets no runtime to close
            raise
        self.scaler: LossScaler = settings.loss_scale.start()
        self._schedule = Schedule(self.units, plan, prefetch=settings.prefetch, has_backward=self.trains)
        self._hooks = ModuleHooks(model, self.units, self._schedule)
        self.backwards = StepBackwards(settings.micro_batches, self._collaborators())
        self._agreed = AgreedParameters(model)
        self._install(division)
        # The order of the gathers in `renew`: the same on all ranks and close to that of the forward, which needs the
        # root's unit first.
        self._renewal = sorted(self.units, key=lambda unit: model not in unit.modules)
        self.renew()
        self.collectives.journal.begin("forward")
        self._spent: weakref.ref[torch.Tensor] | None = None  # the last loss, if its backward freed its graph
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def _install(self, division: LayerDivision) -> None:
        """Install the forwards of divided layers, those of parts of sequences, and `generate` of ranks in step."""
        layers = division.install(self.model)
        self.sequence = self.settings.sequence_parallel.part(self.collectives)
        sequences = self.settings.sequence_parallel.install(self.model, self.sequence)
        self._divisions = [one for one in (layers, sequences) if one is not None]
        self._installed = ExitStack()  # what was installed last is removed first
        for one in self._divisions:
            self._installed.callback(one.remove)
        # What a group was given; None if every rank has its own batch. Only one of the two divides.
        self._batch = self._divisions[0].batch if self._divisions else None
        self._turns: UnevenCalls | None = None
        if not self.plan.keeps_full_params and self.collectives.shard_count > 1:
            make, release = load(TURNS), self._hooks.release_unused
            self._turns = make(self.units, self._schedule, self.collectives, self.device, release)
            self._hooks.compare_ranks_by(self._turns.compare)
        if self._turns is not None or layers is not None:
            self._installed.callback(load(WRAP_GENERATE)(self.model, self.uneven_forwards))

    def _collaborators(self) -> Collaborators:
        units, schedule, hooks = self.units, self._schedule, self._hooks
        return Collaborators(units, schedule, hooks, self.collectives, self.device, lambda: self.scaler.scale)

    def resident(self, unit: Unit, *, writes: bool = False) -> AbstractContextManager[None]:
        """Keep all shards of the unit in memory inside the context; with `writes`, changes are written back at exit."""
        return residence(self.tier, unit, writes=writes)

    def read_offloaded(self, unit: Unit, state: str) -> Callable[[int, int], torch.Tensor] | None:
        """A function that reads elements [start, stop) of an offloaded shard; None if the shard is in memory.

        state: `master` or the name of an optimizer state.
        """
        return self.tier.reader(unit, state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def sum_over_ranks(self, count: int) -> torch.Tensor:
        """The sum of `count` over all ranks, as a 0-dim int64 tensor on the device. Every rank must call it.

        With tensor parallelism, ranks with the same batch count once; with sequence parallelism, each counts its part.
        """
        # Not torch.tensor, which copies from the host and waits for the copy on a GPU.
        return self.collectives.sum_over_data_(torch.full((), count, dtype=torch.int64, device=self.device))

    # ---- forwards without gradients ------------------------------------------------------------------------------

    @contextmanager
    def uneven_forwards(self) -> Iterator[None]:
        """Context without gradients in which each rank may call the model as often as it needs, with any inputs.

        Every rank must enter it, also one that makes no call, and must issue no collective inside but those of the
        model's calls. Ranks that have left it take part in the gathers of the others, and it ends on all together
        (see [Note: gather turns] in generation/). `generate` of the model is inside it already. An error of one rank is
        raised there, and as RankError on the others. With tensor or sequence parallelism, the ranks of a group
        must make the same calls; a divided head returns all logits, and `generate` cannot divide sequences.
        """
        with torch.no_grad(), ExitStack() as stack:
            for division in self._divisions:
                stack.enter_context(division.full_logits())
            if self._turns is not None:
                stack.enter_context(self._turns.running())
            yield

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate` (that of transformers) with its arguments and result, on every rank.

        Prompts, lengths and the number of tokens may differ between the ranks, but not inside a tensor-parallel group;
        see `uneven_forwards`.
        """
        if not callable(getattr(self.model, "generate", None)):
            raise PlanError(
                f"generate: expected a model with a method generate, found {type(self.model).__name__}; call the model "
                "in a loop inside `with runtime.uneven_forwards():`"
            )
        return self.model.generate(*args, **kwargs)  # type: ignore[operator]

    # ---- training step -------------------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Number of steps that updated the parameters, without the skipped ones; the argument of LR schedules."""
        return self.optimizer.updates

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False, last: bool | None = None) -> None:
        """Accumulate the gradients of `loss`, a 0-dim tensor: this rank's share of the objective.

        last: whether the step ends here; None counts up to `settings.micro_batches` calls. A caller that says it for
        each call may make as many as it needs, also after the last. All ranks must agree on it.
        """
        if not self.trains:
            load(REFUSE_TRAINING)("backward")
        self.backwards.check_begin(last)
        self._check_loss(loss)
        self._spent = None if retain_graph else weakref.ref(loss)
        self.backwards.begin(last)
        self._loss += loss.detach()
        try:
            self._hooks.enter(loss)
            with backward_through(self.scaler.scale):
                (loss * self.scaler.scale if self.scaler.scale != 1 else loss).backward(retain_graph=retain_graph)
        except Exception as error:
            if not isinstance(error, RankError):  # of which one may be missing for good: no message is waited for
                self.backwards.abandon()
            raise
        self.backwards.end()

    def _check_loss(self, loss: torch.Tensor) -> None:
        if loss.dim() != 0:
            raise PlanError(
                f"backward: expected a loss of shape [], found {list(loss.shape)}; sum it over the tokens of the batch"
            )
        if not loss.requires_grad:
            raise CallOrderError(
                "backward: expected a loss with a graph, found one without: the forward ran under no_grad, or every "
                "parameter is frozen"
            )
        if self._spent is not None and self._spent() is loss:
            raise CallOrderError(
                "backward: this loss had its backward before and its graph is gone; expected a new forward first, or "
                "retain_graph=True in the call before"
            )

    def backward_reads(self, unit: Unit) -> bool:
        """Whether the first backward read the unit's parameters. It reads frozen ones to pass gradients on."""
        return self._schedule.reads_in_backward(unit)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backwards inside full and unreduced on each rank.

        The next backward outside adds to them and reduces the sum. If the plan shards gradients, this saves
        communication at the cost of memory: full gradients between micro-batches.
        """
        self.backwards.synced = False
        try:
            yield
        finally:
            self.backwards.synced = True

    def step(self, lr: float | Rates) -> StepReport:
        """Clip the gradients, update every parameter once and drop the gradients.

        A parameter that was frozen, unfrozen, added or replaced since the runtime was made is a PlanError.
        Reads the loss and the gradient norm on the host. If fp16 gradients overflow on any rank, all ranks skip the
        step: nothing is updated or counted, and the loss scale changes by its rule. Any other loss or norm that is not
        finite, or an overflow that no smaller scale can prevent, raises NonFiniteError on every rank before anything is
        updated; `find_non_finite` then locates the cause.

        May return while the host still updates offloaded states, so that the update overlaps with the next forward.
        Everything that reads a shard (a gather, `weights_shard`, `states_of`) waits for its update.
        """
        if not self.trains:
            load(REFUSE_TRAINING)("step")
        self._check_step(lr)
        self.collectives.journal.begin("step")
        self.optimizer.begin_step()  # an offload tier may read meanwhile
        report, norm = self._agree()
        # Both numbers are sums over all ranks, so every rank takes the same branches from here on.
        overflow = not math.isfinite(report.grad_norm)
        if overflow or not math.isfinite(report.loss):
            self.optimizer.forget_step()
        if not math.isfinite(report.loss) or (overflow and self.scaler.exhausted):
            self.zero_grad()
            raise NonFiniteError(non_finite.non_finite_message(report, self.updates, self.scaler))
        if not overflow:
            self.optimizer.step(lr, self._grad_scale(norm), self._host_scale(report))
        self.zero_grad()
        if not overflow:
            self._hooks.end_graphs()
            self._schedule.after_step()
        self.scaler = self.scaler.after(overflow=overflow)
        self.collectives.journal.next_step()
        self.renew()  # not in the next forward: a parameter that is read between two steps must have its new value
        return report

    def renew(self) -> None:
        """Start gathering the stale full copies of the units whose full parameters are kept between steps.

        Every rank must call it. Does not block, unless a unit computes in another dtype than it gathers (see
        `Unit.renew`): the next forward, or an earlier read of a parameter, waits for each unit.
        """
        for unit in self._renewal:
            unit.renew()

    def _grad_scale(self, norm: torch.Tensor) -> torch.Tensor:
        """The factor by which the update multiplies the gradients, as a 0-dim fp32 tensor on the device."""
        return clip_coefficient(norm, self.settings.clip_norm) / self.scaler.scale

    def _host_scale(self, report: StepReport) -> torch.Tensor | None:
        """The same factor as a CPU tensor, from the norm in the report; None if no unit is offloaded."""
        if self.tier is NOTHING_OFFLOADED:
            return None
        # From the number that the host has already: a copy of the device's would wait for the device once more.
        return self._grad_scale(torch.tensor(report.grad_norm, dtype=torch.float64))

    def _check_step(self, lr: float | Rates) -> None:
        """Raise CallOrderError or PlanError, before anything is updated, and keep the gradients."""
        self.backwards.check_step()
        self._agreed.check()
        self.optimizer.check_rates(lr)

    def _agree(self) -> tuple[StepReport, torch.Tensor]:
        """Sum the loss, the squared norm, the fingerprints and the stop requests over the ranks.

        All of them travel in one message and are read on the host in one transfer: the only point of a step at which
        the runtime waits for the device. With a watch, raises RankError if the ranks' fingerprints differ. Returns the
        report and the unscaled norm (0-dim fp64 on the device).
        """
        squares = local_sum_of_squares(self.units, self.device)
        asked = self.settings.stop_asked
        # The ranks of a tensor-parallel group compute the same loss, which counts once.
        loss = self._loss if self.collectives.tensor_rank == 0 else torch.zeros_like(self._loss)
        batch = [] if self._batch is None else [self._batch.difference(self.device)]
        numbers = [*self.collectives.fingerprint(), *([] if asked is None else [float(asked())])]
        # Written by the device: a copy from the host's memory would wait for all of the backward.
        own = [torch.full((), number, dtype=torch.float64, device=self.device) for number in numbers]
        sums = self.collectives.sum_over_ranks_(torch.stack([loss, squares, *own, *batch]))
        norm = root64(sums[1]) / self.scaler.scale
        loss_value, norm_value, total, square, *rest = self.settings.read_host(
            torch.cat([torch.stack([sums[0], norm]), sums[2:]])
        )
        self.collectives.check_fingerprints(total, square)
        if self._batch is not None:
            self._batch.check(rest.pop(), self.collectives.gather_objects)
        skipped = not math.isfinite(norm_value)
        return StepReport(loss_value, norm_value, skipped, self.scaler.scale, any(rest)), norm

    def check_weights(self, call: str) -> None:
        """Raise CallOrderError if the runtime has no parameters."""
        if not self.units:
            raise CallOrderError(
                f"{call}: expected a model with parameters, found none: it has none, or the runtime was closed"
            )

    def check_between_steps(self, call: str) -> None:
        """Raise CallOrderError if the step has gradients, which `call` would lose, or the runtime no parameters."""
        self.check_weights(call)
        self._check_no_backwards(call)

    def _check_no_backwards(self, call: str) -> None:
        if self.backwards.count:
            raise CallOrderError(
                f"{call}: expected to be called between two steps, found {self.backwards.count} backward calls since "
                "the last; call it after step()"
            )

    def zero_grad(self) -> None:
        """Drop all gradients since the last step, also those of other runtimes' backwards: the step begins anew."""
        for unit in self.units:
            unit.gradients.free()
        self.backwards.clear()
        self._loss.zero_()

    def find_non_finite(self, backwards: Callable[[], None]) -> str:
        """After NonFiniteError: rerun the backwards without reducing and report which ranks and parameters failed.

        `backwards` must repeat the same forwards and `backward` calls; nothing was updated, so they give the same
        numbers. Every rank must call it. Reads on the host; drops the gradients at the end.
        """
        with self.no_sync():
            backwards()
        findings = self.collectives.gather_objects(non_finite.look(self.units, float(self._loss)))
        self.zero_grad()
        return non_finite.verdict(findings, self.precision)

    # ---- full tensors and traffic --------------------------------------------------------------------------------

    full_params = whole_tensors.full_params
    full_grad = whole_tensors.full_grad
    full_optimizer_state = whole_tensors.full_optimizer_state

    def reset_ledger(self) -> Ledger:
        """The volumes sent since the last call; counting restarts from zero."""
        return self.collectives.ledger.reset()

    def close(self) -> None:
        """Give the model its parameters and free everything else, see [Note: the model afterwards] in closed.py.

        Every rank calls it. All other methods raise afterwards. Idempotent.
        """
        self._hooks.remove()
        self._installed.close()
        self._renewal.clear()
        try:
            hand_back(self.units, self.tier, self.optimizer)
        finally:
            self.collectives.free()  # after the gathers of what is handed back
        retire(
            self,
            "expected an open runtime, found a closed one; make another",
            kept=("close", "check_weights", "check_between_steps"),
        )
