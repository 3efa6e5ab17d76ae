"""The oracle: one process of plain PyTorch that does what all ranks together should have done.

It runs each rank's micro-batches in rank order, divides by the tokens of the global batch as the runtime does, and
sums in the order of the accumulation class: gradients that are kept whole are summed over micro-batches first and
over ranks last; sharded ones are summed over the ranks in each micro-batch, then over micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from harness.models import IGNORED, TinySpec, TinyTransformer, batch, token_loss_sum
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.precision import MixedPrecision

LR = 1e-2
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Case:
    """One cell of the parity matrix."""

    world: int
    micro_batches: int = 1
    steps: int = 20
    clip_norm: float | None = None
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    model: TinySpec = field(default_factory=TinySpec)


@dataclass
class Trace:
    """What a run leaves: losses and norms by step, final fp32 weights, the first step's gradient, by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    first_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    abs_grad_sum: dict[str, torch.Tensor] = field(default_factory=dict)


def step_tokens(case: Case, step: int) -> int:
    """Unmasked tokens of the global batch."""
    labels = (
        batch(case.model, step, rank, micro)[1] for rank in range(case.world) for micro in range(case.micro_batches)
    )
    return sum(int((part != IGNORED).sum()) for part in labels)


def oracle(case: Case, *, reduces_every_backward: bool) -> Trace:
    """Run the case with torch.optim.AdamW (foreach=False) on fp32 masters."""
    torch.set_num_threads(1)
    masters = {name: p.detach().clone() for name, p in TinyTransformer(case.model).named_parameters()}
    optimizer = torch.optim.AdamW(
        list(masters.values()), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False
    )
    trace = Trace([], [], masters)
    for step in range(case.steps):
        grads, loss = global_gradient(case, masters, step, trace, reduces_every_backward=reduces_every_backward)
        for name, master in masters.items():
            master.grad = grads[name].to(torch.float32)
        norm = torch.nn.utils.get_total_norm([m.grad for m in masters.values() if m.grad is not None])
        if case.clip_norm is not None:
            coefficient = (case.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for master in masters.values():
                assert master.grad is not None
                master.grad.mul_(coefficient)
        trace.losses.append(loss)
        trace.norms.append(float(norm))
        optimizer.step()
    return trace


def global_gradient(
    case: Case,
    masters: dict[str, torch.Tensor],
    step: int,
    trace: Trace | None = None,
    *,
    reduces_every_backward: bool,
) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient of one step in the dtype in which it rests, and the global loss."""
    tokens = torch.tensor(step_tokens(case, step))
    parts: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    losses = []
    for rank in range(case.world):
        for micro in range(case.micro_batches):
            model = _working_copy(case, masters)
            ids, labels = batch(case.model, step, rank, micro)
            loss = token_loss_sum(model, ids, labels) / tokens
            loss.backward()
            losses.append(float(loss.detach()))
            parts[rank, micro] = {
                name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()
            }
    grads = {name: _sum(case, parts, name, reduces_every_backward) for name in masters}
    if trace is not None and not trace.first_grads:
        trace.first_grads = grads
        trace.abs_grad_sum = {
            name: torch.stack([part[name].to(torch.float64).abs() for part in parts.values()]).sum(0)
            for name in masters
        }
    return grads, sum(losses)


def _working_copy(case: Case, masters: dict[str, torch.Tensor]) -> TinyTransformer:
    model = TinyTransformer(case.model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.data = masters[name].to(TORCH_DTYPE[case.precision.param], copy=True)
    return model


def _sum(
    case: Case, parts: dict[tuple[int, int], dict[str, torch.Tensor]], name: str, reduces_every_backward: bool
) -> torch.Tensor:
    reduce = TORCH_DTYPE[case.precision.reduce]
    rest = TORCH_DTYPE[case.precision.grad(case.micro_batches)]
    ranks, micros = range(case.world), range(case.micro_batches)
    if reduces_every_backward:
        return _in_order(_in_order(parts[r, m][name].to(reduce) for r in ranks).to(rest) for m in micros)
    local = (_in_order(parts[r, m][name].to(rest) for m in micros) for r in ranks)
    return _in_order(grad.to(reduce) for grad in local).to(rest)


def _in_order(terms):  # type: ignore[no-untyped-def]
    total = None
    for term in terms:
        total = term.clone() if total is None else total + term
    return total
