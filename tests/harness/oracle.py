"""The oracle: one process of plain PyTorch that computes the result that all ranks together must have.

It runs each rank's micro-batches in rank order, divides by the tokens of the global batch as the runtime does, and
sums in the order of the accumulation class: full gradients are summed over micro-batches first and over ranks
last; sharded ones are summed over the ranks in each micro-batch, then over micro-batches. Sums over the ranks are
sums over the shard groups of the sums in each group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from harness.models import IGNORED, TinySpec, TinyTransformer, batch, token_loss_sum
from harness.plain_optimizers import plain_optimizer
from harness.read_back import LARGEST_CODES, read_back
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.optim.configs import AdamWConfig, OptimizerConfig
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.plan import OuterSharding
from zero_runtime.precision import MixedPrecision

LR = 1e-2
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
ADAMW = AdamWConfig(*BETAS, EPS, WEIGHT_DECAY)


@dataclass(frozen=True)
class Case:
    """One cell of the parity matrix."""

    world: int
    micro_batches: int = 1
    steps: int = 20
    clip_norm: float | None = None
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    loss_scale: LossScaleRule = UNSCALED
    no_sync: bool = False  # reduce at the step's last backward only
    shard_ranks: int | None = None
    outer_sharding: OuterSharding | None = None
    model: TinySpec = field(default_factory=TinySpec)


@dataclass
class Trace:
    """Results of a run: losses and norms by step; final fp32 weights and the first step's gradients, by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    first_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    abs_grad_sum: dict[str, torch.Tensor] = field(default_factory=dict)
    first_update: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


def step_tokens(case: Case, step: int) -> int:
    """Unmasked tokens of the global batch."""
    labels = (
        batch(case.model, step, rank, micro)[1] for rank in range(case.world) for micro in range(case.micro_batches)
    )
    return sum(int((part != IGNORED).sum()) for part in labels)


@dataclass(frozen=True)
class Nudge:
    """Changes that make a run round differently but correctly, to measure how far two correct runs drift apart."""

    reversed_ranks: bool = False
    clip_factor: float = 1.0


@dataclass(frozen=True)
class Start:
    """Where a run resumes: the number of completed steps, and full states by `state/name` (`master/...`, ...)."""

    step: int
    states: dict[str, torch.Tensor]


def oracle(
    case: Case,
    *,
    reduces_every_backward: bool,
    nudge: Nudge | None = None,
    optimizer: OptimizerConfig = ADAMW,
    start: Start | None = None,
) -> Trace:
    """Run the case with AdamW on fp32 masters, or with another `optimizer`: see plain_optimizers.py.

    `start`: resume from there and run `case.steps` more steps. The optimizer must name its states as torch's does, and
    no earlier step may have been skipped.
    """
    nudge = nudge or Nudge()
    torch.set_num_threads(1)
    model = TinyTransformer(case.model)
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    codes = case.precision.weights
    if codes is not None:
        for name, param in model.named_parameters():
            if name not in masters and param.dim() > 1 and name.startswith("blocks."):
                param.data = read_back(param.data, LARGEST_CODES[codes])
    frozen = {name: p.detach() for name, p in model.named_parameters() if name not in masters}
    first = 0 if start is None else start.step
    if start is not None:
        masters = {name: start.states[f"master/{name}"].clone() for name in masters}
    plain = plain_optimizer(optimizer, masters, LR)
    if start is not None:
        _go_on(plain, masters, start)
    trace = Trace([], [], masters)
    scaler = case.loss_scale.start()
    for step in range(first, first + case.steps):
        parts, loss = _rank_gradients(case, model, masters | frozen, step, scaler.scale)
        order = range(case.world)[::-1] if nudge.reversed_ranks else range(case.world)
        grads = {name: _sum(case, parts, name, order, reduces_every_backward) for name in masters}
        for name, master in masters.items():
            master.grad = grads[name].to(torch.float32) / scaler.scale  # a power of two: exact
        norm = torch.nn.utils.get_total_norm([m.grad for m in masters.values() if m.grad is not None])
        if case.clip_norm is not None:
            coefficient = (case.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for master in masters.values():
                assert master.grad is not None
                master.grad.mul_(coefficient * nudge.clip_factor)
        trace.losses.append(loss)
        trace.norms.append(float(norm))
        trace.scales.append(scaler.scale)
        overflow = not bool(torch.isfinite(norm))
        trace.skipped.append(overflow)
        scaler = scaler.after(overflow=overflow)
        if overflow:
            continue
        before = {name: master.clone() for name, master in masters.items()} if step == first else {}
        plain.step()
        if step == first:
            trace.first_grads = grads
            trace.abs_grad_sum = _abs_sum(parts)
            trace.first_update = {name: masters[name] - before[name] for name in masters}
    return trace


def _go_on(plain: torch.optim.Optimizer, masters: dict[str, torch.Tensor], start: Start) -> None:
    for key, values in start.states.items():
        state, name = key.split("/")
        if state != "master":
            plain.state[masters[name]].setdefault("step", torch.tensor(float(start.step)))
            plain.state[masters[name]][state] = values.clone()


Parts = dict[tuple[int, int], dict[str, torch.Tensor]]  # gradients by (rank, micro-batch), by name


def _rank_gradients(
    case: Case, model: TinyTransformer, masters: dict[str, torch.Tensor], step: int, scale: float
) -> tuple[Parts, float]:
    """The gradients of each rank and micro-batch in compute dtype, times the loss scale; and the global loss."""
    tokens = torch.tensor(step_tokens(case, step))
    parts: Parts = {}
    loss_sum = 0.0
    _take_values(case, model, masters)
    for rank in range(case.world):
        for micro in range(case.micro_batches):
            ids, labels = batch(case.model, step, rank, micro)
            loss = token_loss_sum(model, ids, labels) / tokens
            (loss * scale).backward()
            loss_sum += float(loss.detach())
            parts[rank, micro] = {
                name: p.grad if p.grad is not None else torch.zeros_like(p)
                for name, p in model.named_parameters()
                if p.requires_grad
            }
            model.zero_grad(set_to_none=True)
    return parts, loss_sum


def _abs_sum(parts: Parts) -> dict[str, torch.Tensor]:
    names = next(iter(parts.values()))
    return {name: torch.stack([part[name].double().abs() for part in parts.values()]).sum(0) for name in names}


def _take_values(case: Case, model: TinyTransformer, masters: dict[str, torch.Tensor]) -> None:
    """Gives the model the values of the masters in compute dtype, and those of frozen parameters, rounded the same;
    what was stored as codes is rounded to the compute dtype alone."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            coded = case.precision.weights and not param.requires_grad and param.dim() > 1
            dtype = torch.float32 if coded else TORCH_DTYPE[case.precision.param]
            kept = masters[name].detach().to(dtype, copy=True)
            param.data = kept.to(TORCH_DTYPE[case.precision.compute or case.precision.param])


def _sum(case: Case, parts: Parts, name: str, ranks: range, reduces_every_backward: bool) -> torch.Tensor:
    """The gradient of the step in the dtype in which it is stored, summed in the order of the accumulation class."""
    reduce = TORCH_DTYPE[case.precision.reduce]
    rest = TORCH_DTYPE[case.precision.grad(case.micro_batches)]
    micros = range(case.micro_batches)
    if reduces_every_backward and not case.no_sync:
        return _in_order(_over_ranks(case, [parts[r, m][name].to(reduce) for r in ranks]).to(rest) for m in micros)
    local = [_in_order(parts[r, m][name].to(rest) for m in micros) for r in ranks]
    return _over_ranks(case, [grad.to(reduce) for grad in local]).to(rest)


def _over_ranks(case: Case, terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' terms, by shard groups. Every group is replicated: of stage 0, one rank is a group."""
    group = case.shard_ranks or case.world
    return _in_order(_in_order(terms[start : start + group]) for start in range(0, case.world, group))


def _in_order(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *others = terms
    total = first.clone()
    for term in others:
        total += term
    return total
