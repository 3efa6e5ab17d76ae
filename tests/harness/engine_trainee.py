"""Trains small models with each engine, and with a plain loop of PyTorch in one process, on the same values and tokens.

Functions for `run_ranks`; tests/orchestrator/wings/engines/test_parity.py compares what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from harness.trainee import full_tensors
from orchestrator import wings
from orchestrator.config.engine import EngineChoice, EngineKind
from orchestrator.config.optimizer import Optimizer
from orchestrator.config.schema import Device, Model, ResolvedBatch, ResolvedResources, RunConfig
from orchestrator.config.state_groups import Offload, Precision, Zero
from orchestrator.wings.engines.contract import Task
from orchestrator.wings.engines.foreign_runtime import ForeignRuntime
from orchestrator.workloads.models import build_deferred_model
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.initial_values import InitialValues, parameters_on_meta
from zero_runtime.offload_plan import Tier
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch

RANKS, MICRO, TOKENS, VOCAB, SEED = 2, 2, 12, 61, 5
RATES = Rates(1e-3)
RULE = AdamWConfig(beta2=0.95, weight_decay=0.1)
SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, **HEADS, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "tied": {"model_type": "llama", **SIZES, **HEADS, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "neox": {"model_type": "gpt_neox", **SIZES, **HEADS, "tie_word_embeddings": False},
}
MODELS["lora"] = MODELS["llama"]


@dataclass(frozen=True)
class Work:
    """What is computed: whatever the engine, equal work has equal results."""

    model: str = "llama"
    precision: str = "fp32"
    accumulation: int = 1
    clip_norm: float | None = None
    steps: int = 20

    @property
    def dtypes(self) -> Precision:
        """fp16 has a fixed loss scale, which does not overflow: the exact run skips no updates either."""
        own = MixedPrecision(self.precision)  # type: ignore[arg-type]
        return Precision(own, compute=own.param, scale=LossScaleRule(static=2.0**10))

    @property
    def scale(self) -> LossScaleRule:
        return self.dtypes.scale if self.dtypes.scales_loss else UNSCALED


@dataclass(frozen=True)
class Row:
    """An engine that does the work. offload: all model states rest in host memory. fault: a key of FAULTS."""

    engine: str
    stage: int
    work: Work = Work()
    shard_ranks: int | None = None
    offload: bool = False
    fault: str = ""

    def config(self, ranks: int) -> RunConfig:
        samples = RANKS * MICRO * self.work.accumulation
        rest = Tier.HOST if self.offload else Tier.DEVICE
        return RunConfig(
            model=Model(self.work.model),
            engine=EngineChoice(EngineKind(self.engine)),
            zero=Zero(self.stage, shard_ranks=self.shard_ranks),
            precision=self.work.dtypes,
            offload=Offload(params=rest, optimizer=rest) if self.offload else Offload(),
            optimizer=Optimizer(lr=1e-3, rule=RULE, clip_norm=self.work.clip_norm),
            batch=ResolvedBatch(
                micro=samples // ranks // self.work.accumulation,
                accumulation=self.work.accumulation,
                global_size=samples,
                seq=TOKENS,
            ),
            resources=ResolvedResources(device=Device.cpu, ranks=ranks, threads=1),
        )


@dataclass
class Trace:
    """Losses, norms and skipped updates by step (a norm that an engine does not compute is NaN), and the trained
    weights after the last step, by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def micro_batch(work: Work, step: int, rank: int, micro: int) -> Batch:
    """The model's inputs and the labels [MICRO, TOKENS]: counting modulo the vocabulary, so there is something to
    learn. The labels of a rank's first tokens are masked, so ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    starts = torch.randint(VOCAB, (MICRO, 1), generator=generator)
    strides = torch.randint(1, 4, (MICRO, 1), generator=generator)
    ids = (starts + strides * torch.arange(TOKENS + 1)) % VOCAB
    labels = ids[:, 1:].clone()
    labels[:, : 2 + 3 * rank] = -100
    if work.model == "t5":
        return {"input_ids": ids[:, :6], "decoder_input_ids": ids[:, :-1]}, labels
    return {"input_ids": ids[:, :-1]}, labels


def loss_sum(module: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    logits = module(**inputs).logits
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def tokens_of(work: Work, step: int) -> int:
    labels = (micro_batch(work, step, rank, micro)[1] for rank in range(RANKS) for micro in range(work.accumulation))
    return sum(int((one != -100).sum()) for one in labels)


# ---- models ----------------------------------------------------------------------------------------------------------


def deferred(work: Work) -> tuple[nn.Module, InitialValues]:
    """The model on the meta device, and its first values."""
    initialise: Callable[[nn.Module], None] | None = None
    if work.model == "t5":
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        with parameters_on_meta():
            model: nn.Module = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes)).train()  # type: ignore[arg-type]
    else:
        settings = dict(MODELS[work.model])
        model = build_deferred_model(settings.pop("model_type"), settings)
    if work.model == "lora":
        from orchestrator.wings.pretrained import adapters

        wrapped = adapters.add_lora(model, adapters.lora_config(4, 8.0, []))
        model, initialise = wrapped.train(), adapters.first_values(wrapped)
    values = InitialValues(model, seed=SEED, initialise=initialise)
    values.fill_buffers()
    return model, values


def with_values(work: Work) -> nn.Module:
    """The model with its first values, without an engine."""
    model, values = deferred(work)
    drawn = {
        id(param): nn.Parameter(values.draw(name, param), param.requires_grad)
        for name, param in model.named_parameters()
    }
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False)):
            setattr(module, key, drawn[id(param)])
    return model


# ---- engines ---------------------------------------------------------------------------------------------------------


def train_all(rows: Sequence[Row]) -> dict[Row, Trace]:
    """Every row in turn, in the process group that is there."""
    return {row: train(row) for row in rows}


def train(row: Row) -> Trace:
    runtime, weights = (_own if row.engine == "zero" else _foreign)(row)
    work, ranks = row.work, dist.get_world_size()
    trace = Trace()
    for step in range(work.steps):
        tokens = tokens_of(work, step)
        for micro in range(work.accumulation):
            # One rank computes the micro-batches of both as one.
            parts = [micro_batch(work, step, rank, micro) for rank in range(RANKS)]
            inputs, labels = parts[dist.get_rank()] if ranks == RANKS else joined(parts)
            runtime.backward(loss_sum(runtime.model, inputs, labels) / tokens)
        report = runtime.step(RATES)
        trace.losses.append(report.loss)
        trace.norms.append(report.grad_norm)
        trace.skipped.append(report.skipped)
    trace.weights = weights()
    runtime.close()
    return trace


def joined(parts: Sequence[Batch]) -> Batch:
    inputs = {key: torch.cat([one[key] for one, _ in parts]) for key in parts[0][0]}
    return inputs, torch.cat([labels for _, labels in parts])


def _mean_for_sum(engine: Any) -> None:
    backward = engine.backward
    engine.backward = lambda loss: backward(loss / dist.get_world_size())


def _last_micro_batch_alone(engine: Any) -> None:
    before = engine.before_micro_batch

    def drops(*, last: bool) -> None:
        before(last=last)
        if last:
            engine._update.optimizer.zero_grad()

    engine.before_micro_batch = drops


def _decayed_norms(engine: Any) -> None:
    for group in engine._update.optimizer.param_groups:
        group["weight_decay"] = RULE.weight_decay


FAULTS: dict[str, Callable[[Any], None]] = {
    "mean for sum": _mean_for_sum,
    "last micro-batch alone": _last_micro_batch_alone,
    "decayed norms": _decayed_norms,
}


def _foreign(row: Row) -> tuple[Any, Callable[[], dict[str, torch.Tensor]]]:
    model, values = deferred(row.work)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    config, cpu = row.config(dist.get_world_size()), torch.device("cpu")
    module: Any = wings.load(wings.ENGINES[row.engine])
    assert not module.problems_of(config), module.problems_of(config)
    # A watch of this rank alone watches nothing: run_ranks has a limit of time.
    runtime = ForeignRuntime(config, cpu, RankWatch(dist.HashStore(), 0, 1), None)
    runtime.start(module.build(Task(module.meaning(config), model, values.draw, cpu)))
    if row.fault:
        FAULTS[row.fault](runtime.engine)
    return runtime, lambda: {name: one.float().clone() for name, one in runtime.engine.parameters() if name in trained}


def _own(row: Row) -> tuple[Any, Callable[[], dict[str, torch.Tensor]]]:
    config = row.config(dist.get_world_size())
    model, values = deferred(row.work)
    settings = RuntimeSettings(
        micro_batches=row.work.accumulation,
        clip_norm=row.work.clip_norm,
        loss_scale=row.work.scale,
        seed=SEED,
        initialise=values._initialise,
        offload=config.offload.plan(),
    )
    runtime = ZeroRuntime(model, config.zero.plan, config.precision.mixed, RULE, settings, torch.device("cpu"))
    return runtime, lambda: full_tensors(runtime, "master_shard")


# ---- plain PyTorch ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """One of the ways in which plain PyTorch may compute the same work.

    backwards: ranks and micro-batches are summed from the last to the first. together: all of a step is one batch.
    autocast: a 16-bit precision casts fp32 weights for each operation, and holds none in 16 bits but what is frozen, as
    users of PEFT load it. exact: in fp64, whatever the precision.
    """

    backwards: bool = False
    together: bool = False
    autocast: bool = False
    exact: bool = False


def plain_all(loops: Sequence[tuple[Work, Order]]) -> dict[tuple[Work, Order], Trace]:
    """Plain loops in this process alone; the ranks share them out."""
    own = loops[dist.get_rank() :: dist.get_world_size()]
    return {(work, order): plain(work, order) for work, order in own}


def plain(work: Work, order: Order) -> Trace:
    """The loop that everybody writes: sums of token losses, divided by the tokens of the step; torch.optim.AdamW."""
    model, scaler = with_values(work), work.scale.start()
    wide = torch.float64 if order.exact else torch.float32
    narrow = None if work.precision == "fp32" or order.autocast or order.exact else TORCH_DTYPE[work.precision]
    model.to(wide)
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = named if narrow is None else {name: one.detach().clone() for name, one in named.items()}
    model.to(narrow)
    for param in model.parameters() if order.autocast else ():
        param.data = param.data if param.requires_grad else param.data.to(TORCH_DTYPE[work.precision])
    optimizer = _optimizer(list(masters.values()))
    trace = Trace()
    for step in range(work.steps):
        sums, loss = _gradients(work, order, model, named, step, scaler.scale)
        for name, master in masters.items():
            master.grad = sums[name].to(wide) / scaler.scale
        grads = [one.grad for one in masters.values() if one.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        overflow = not bool(norm.isfinite())
        if work.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(list(masters.values()), work.clip_norm, norm)
        if not overflow:
            optimizer.step()
        optimizer.zero_grad()
        for name, param in named.items() if narrow is not None else ():
            param.data.copy_(masters[name])
        scaler = scaler.after(overflow=overflow)
        trace.losses.append(loss)
        trace.norms.append(float(norm))
        trace.skipped.append(overflow)
    trace.weights = {name: one.detach().clone() for name, one in masters.items()}
    return trace


def _optimizer(masters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [one for one in masters if one.dim() > 1], "weight_decay": RULE.weight_decay},
        {"params": [one for one in masters if one.dim() <= 1], "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    return torch.optim.AdamW(kept, lr=1e-3, betas=(RULE.beta1, RULE.beta2), eps=RULE.eps, foreach=False)


def _gradients(
    work: Work, order: Order, model: nn.Module, named: dict[str, nn.Parameter], step: int, scale: float
) -> tuple[dict[str, torch.Tensor], float]:
    """The sums of the gradients of a step, times the loss scale, in fp32 or wider; and the step's loss."""
    tokens, loss_of_step = tokens_of(work, step), 0.0
    sums: dict[str, torch.Tensor] = {}
    half = TORCH_DTYPE[work.precision]
    for inputs, labels in _batches(work, order, step):
        with torch.autocast("cpu", half) if order.autocast else nullcontext():
            loss = loss_sum(model, inputs, labels) / tokens
        (loss * scale).backward()
        loss_of_step += loss.item()
        for name, param in named.items():
            assert param.grad is not None
            grad = param.grad if order.exact else param.grad.float()
            sums[name] = sums[name] + grad if name in sums else grad.clone()
        model.zero_grad(set_to_none=True)
    return sums, loss_of_step


def _batches(work: Work, order: Order, step: int) -> Iterator[Batch]:
    parts = [micro_batch(work, step, rank, micro) for micro in range(work.accumulation) for rank in range(RANKS)]
    if order.together:
        yield joined(parts)
    else:
        yield from reversed(parts) if order.backwards else parts
