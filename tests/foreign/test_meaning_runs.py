"""Keys of DeepSpeed that change numbers, on two ranks against a plain loop; "auto" comes from arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec, TinyTransformer, batch
from harness.plain_optimizers import Adam, AdamW
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import initialize_quietly
from torch import nn
from torch.nn import functional as F

from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import AdamWConfig, OneBitAdamConfig, OptimizerConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.wire import Wire

SPEC = TinySpec()
STEPS = 3
ARGS = SimpleNamespace(
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    weight_decay=0.1,
    adam_beta1=0.8,
    adam_beta2=0.95,
    adam_epsilon=1e-6,
    max_grad_norm=0.01,
    max_steps=STEPS,
    warmup_steps=0,
    bf16=False,
    fp16=False,
)
AUTO_BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
AUTO_ADAM = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
FP32_UNIT, BF16_UNIT = 2.0**-24, 2.0**-8  # unit roundoffs
Weights = dict[str, torch.Tensor]


def mean_loss(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
    ids, labels = batch(SPEC, step, rank, micro)
    return F.cross_entropy(model(ids).reshape(-1, SPEC.vocab), labels.clamp(min=0).reshape(-1))


def plain_gradients(model: nn.Module, step: int, accumulation: int, *, each_micro: bool) -> list[torch.Tensor]:
    """Gradients of the mean loss of a step, by manual data parallelism. each_micro: averaged after each backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = [torch.zeros_like(param) for param in model.parameters()]
    for micro in range(accumulation):
        (mean_loss(model, step, rank, micro) / accumulation / world).backward()
        for grad, param in zip(total, model.parameters(), strict=True):
            assert param.grad is not None
            if each_micro:
                dist.all_reduce(param.grad)
            grad += param.grad
            param.grad = None
    if not each_micro:
        for grad in total:
            dist.all_reduce(grad)
    return total


def plain_weights(make: Callable[[Any], Any], accumulation: int, *, each_micro: bool, steps: int = STEPS) -> Weights:
    model = TinyTransformer(SPEC)
    optimizer = make(model.parameters())
    for step in range(steps):
        gradients = plain_gradients(model, step, accumulation, each_micro=each_micro)
        for grad, param in zip(gradients, model.parameters(), strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def engine_weights(config: dict[str, Any], steps: int = STEPS) -> Weights:
    engine, *_ = initialize_quietly(args=ARGS, model=TinyTransformer(SPEC), config=config)
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(mean_loss(engine, step, dist.get_rank(), micro))
            engine.step()
    with engine.runtime.full_params() as full:
        weights = {name: value.clone() for name, value in full.items()}
    engine.destroy()
    return weights


def differing(first: Weights, second: Weights) -> list[str]:
    return [name for name in first if not torch.equal(first[name], second[name])]


CONSTANTS: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6}


def adam_configurations() -> list[str]:
    """Accumulation, decoupled and coupled decay, learning rate, betas and eps from the arguments; bit for bit."""
    wrong = []
    for level, kind, params, plain in (
        (1, "AdamW", {}, AdamW),
        (2, "Adam", {}, AdamW),
        (3, "Adam", {"adam_w_mode": False}, Adam),
    ):
        config = {
            **AUTO_BATCH,
            "zero_optimization": {"stage": level, "reduce_bucket_size": "auto"},
            "optimizer": {"type": kind, "params": {**AUTO_ADAM, **params}},
            "gradient_clipping": 0.0,
        }
        each_micro = level >= 2
        expected = plain_weights(
            lambda given, plain=plain: plain(given, weight_decay=0.1, **CONSTANTS), 2, each_micro=each_micro
        )
        other = plain_weights(lambda given: AdamW(given, weight_decay=0.0, **CONSTANTS), 2, each_micro=each_micro)
        found = engine_weights(config)
        wrong += [f"{level} {kind}: {name}" for name in differing(expected, found)]
        assert len(differing(other, found)) > len(found) // 2  # the decay is seen
    return wrong


def test_auto_batch_and_adam_are_the_plain_loop_bit_for_bit() -> None:
    assert run_ranks(adam_configurations, 2) == [[], []]


def sgd_config(**more: Any) -> dict[str, Any]:
    sgd = {"type": "SGD", "params": {"lr": "auto"}}
    return {**AUTO_BATCH, "optimizer": sgd, "gradient_clipping": 0.0, **more}


def clipped() -> list[bool]:
    """One update w - lr c g: the factor c has the relative error of a norm, a sum of n squares in any order."""
    found = engine_weights(sgd_config(gradient_clipping="auto", zero_optimization={"stage": 2}), steps=1)
    start = {name: param.detach() for name, param in TinyTransformer(SPEC).named_parameters()}
    model = TinyTransformer(SPEC)
    gradients = plain_gradients(model, 0, 2, each_micro=True)
    norm = torch.sqrt(sum(grad.double().square().sum() for grad in gradients))
    count = sum(grad.numel() for grad in gradients)
    factor = ARGS.max_grad_norm / float(norm)
    assert factor < 0.1  # it clips
    within = []
    for (name, old), grad in zip(start.items(), gradients, strict=True):
        update = ARGS.learning_rate * factor * grad.double()
        # count / 2 roundings of the sum under the root, and one each for root, quotient, two products and the sum.
        bound = update.abs() * (count / 2 + 5) * FP32_UNIT + 2 * FP32_UNIT * old.double().abs()
        within.append(bool(((old.double() - update - found[name].double()).abs() <= bound).all()))
    return within


def test_auto_clipping_is_the_plain_norm_of_all_ranks() -> None:
    for within in run_ranks(clipped, 2):
        assert within
        assert all(within)


def accumulated_in_bf16() -> tuple[list[bool], int]:
    found = engine_weights(sgd_config(data_types={"grad_accum_dtype": "bf16"}), steps=1)
    exact = engine_weights(sgd_config(), steps=1)
    rank, within = dist.get_rank(), []
    model = TinyTransformer(SPEC)
    parts = []
    for micro in range(2):
        (mean_loss(model, 0, rank, micro) / 4).backward()
        parts.append([param.grad.double().abs() for param in model.parameters() if param.grad is not None])
        model.zero_grad(set_to_none=True)
    for (name, value), first, second in zip(exact.items(), *parts, strict=True):
        sizes = first + second
        dist.all_reduce(sizes)
        # Each of two gradients and their sum is rounded to bf16 once, with a relative error of a unit each.
        bound = ARGS.learning_rate * sizes * (3 * BF16_UNIT) + 4 * FP32_UNIT * value.double().abs()
        within.append(bool(((value.double() - found[name].double()).abs() <= bound).all()))
    return within, len(differing(exact, found))


def test_grad_accum_dtype_bf16_rounds_each_sum_once() -> None:
    for within, rounded in run_ranks(accumulated_in_bf16, 2):
        assert all(within)
        assert rounded > 0  # it is not fp32


SCALE = 2.0**14
TINY_LOSS = 2.0**-20  # whose fp16 gradients vanish without a scale


def half_model() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(8, 4)


def scaled() -> list[bool]:
    """fp16 with fp32 masters and a fixed scale, against a loop that scales by hand; factors of 2 do not round."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))

    def run(scale: float) -> list[torch.Tensor]:
        fp16 = {"enabled": True, "loss_scale": scale}
        config = {"train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0.0, "fp16": fp16}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 1000.0}}
        engine, *_ = initialize_quietly(model=half_model(), config=config)
        for _ in range(STEPS):
            engine.backward(engine(rows.half()).float().square().mean() * TINY_LOSS)
            engine.step()
        with engine.runtime.full_params() as full:
            found = [value.clone() for value in full.values()]
        engine.destroy()
        return found

    masters, model = [param.detach().clone() for param in half_model().parameters()], half_model().half()
    for _ in range(STEPS):
        (model(rows.half()).float().square().mean() * TINY_LOSS * SCALE / world).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None
            grad = param.grad.float()
            dist.all_reduce(grad)
            master -= 1000.0 * (grad / SCALE)
            param.data.copy_(master)
            param.grad = None
    right = [torch.equal(a, b) for a, b in zip(run(SCALE), masters, strict=True)]
    vanished = [torch.equal(a, b) for a, b in zip(run(1.0), run(SCALE), strict=True)]
    return [*right, not all(vanished)]


def test_loss_scale_is_that_of_a_loop_that_scales_by_hand() -> None:
    for right in run_ranks(scaled, 2):
        assert all(right)


Sent = dict[str, tuple[int, int]]  # calls and bytes of each kind of collective


def trained_with_ledger(runtime: ZeroRuntime, update: Callable[[int], None], steps: int) -> tuple[Weights, list[Sent]]:
    sent = []
    for step in range(steps):
        runtime.reset_ledger()
        update(step)
        sent.append({kind: (one.calls, one.bytes) for kind, one in runtime.reset_ledger().data.items()})
    with runtime.full_params() as full:
        return {name: value.clone() for name, value in full.items()}, sent


def engine_messages(config: dict[str, Any], steps: int) -> tuple[Weights, list[Sent]]:
    """The weights after some steps of the drop-in, and what this rank sent in each."""
    engine, *_ = initialize_quietly(model=TinyTransformer(SPEC), config=config)

    def update(step: int) -> None:
        engine.backward(mean_loss(engine, step, dist.get_rank(), 0))
        engine.step()

    found = trained_with_ledger(engine.runtime, update, steps)
    engine.destroy()
    return found


def runtime_messages(plan: ZeroPlan, optimizer: OptimizerConfig, wire: Wire, steps: int) -> tuple[Weights, list[Sent]]:
    """The same by the runtime, with settings of its own."""
    settings = RuntimeSettings(wire=wire)
    runtime = ZeroRuntime(TinyTransformer(SPEC), plan, MixedPrecision(), optimizer, settings, torch.device("cpu"))

    def update(step: int) -> None:
        runtime.backward(mean_loss(runtime.model, step, dist.get_rank(), 0) / dist.get_world_size())
        runtime.step(CONSTANTS["lr"])

    found = trained_with_ledger(runtime, update, steps)
    runtime.close()
    return found


PLAIN_ADAM: dict[str, Any] = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0}
ADAM_PARAMS: dict[str, Any] = {"lr": CONSTANTS["lr"], "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}


def quantised_messages() -> list[tuple[bool, bool, float, float]]:
    """For qwZ and qgZ alone: whether weights and messages are those of the runtime's own setting, and the bytes of
    gathers and reductions as shares of the exact ones."""
    adamw = AdamWConfig(0.8, 0.95, 1e-6, 0.1, no_decay=False)
    _, exact = runtime_messages(ZeroPlan.from_stage(3), adamw, Wire(), STEPS)
    found = []
    for key, wire in (("zero_quantized_weights", Wire("int8")), ("zero_quantized_gradients", Wire(None, "int4"))):
        config = PLAIN_ADAM | {"optimizer": {"type": "AdamW", "params": ADAM_PARAMS}}
        weights, sent = engine_messages(config | {"zero_optimization": {"stage": 3, key: True}}, STEPS)
        own, own_sent = runtime_messages(ZeroPlan.from_stage(3), adamw, wire, STEPS)
        gathers, sums = (one / other for one, other in zip(bytes_of(sent[-1]), bytes_of(exact[-1]), strict=True))
        found.append((differing(own, weights) == [], sent == own_sent, gathers, sums))
    return found


def bytes_of(sent: Sent) -> tuple[int, int]:
    """Bytes of gathers, and of all else."""
    gathers = sum(nbytes for kind, (_, nbytes) in sent.items() if kind == "all_gather")
    return gathers, sum(nbytes for _, nbytes in sent.values()) - gathers


def test_zero_plus_plus_is_int8_gathers_and_int4_reductions() -> None:
    """Exact messages have 4 bytes an element; a scale of 4 bytes for each 256 elements, or fewer in a small unit."""
    for weights, gradients in run_ranks(quantised_messages, 2):
        assert weights[:2] == gradients[:2] == (True, True)
        assert 1 / 4 < weights[2] < 1 / 3
        assert weights[3] == 1.0
        assert gradients[2] == 1.0
        assert 1 / 8 < gradients[3] < 1 / 6


def one_bit_messages() -> list[tuple[list[str], bool, list[bool]]]:
    """By level: differing weights, whether messages are those of the runtime's own setting, and which steps send
    signs."""
    found = []
    params = {**ADAM_PARAMS, "freeze_step": 2, "cuda_aware": False}
    for level in (0, 1):
        config = PLAIN_ADAM | {"optimizer": {"type": "OneBitAdam", "params": params}}
        weights, sent = engine_messages(config | {"zero_optimization": {"stage": level}}, 4)
        own, own_sent = runtime_messages(
            ZeroPlan.from_stage(level),
            OneBitAdamConfig(0.8, 0.95, 1e-6, 0.1, warmup_updates=2, no_decay=False),
            Wire(),
            4,
        )
        signs = ["sign_all_to_all" in step and not {"reduce_scatter", "all_reduce"} & {*step} for step in sent]
        found.append((differing(own, weights), sent == own_sent, signs))
    return found


def test_one_bit_adam_sends_signs_after_freeze_step() -> None:
    for found in run_ranks(one_bit_messages, 2):
        assert found == [([], True, [False, False, True, True])] * 2


def frozen_with_quantised_gathers() -> str:
    section = {"stage": 3, "zero_quantized_weights": True}
    with pytest.raises(PlanError) as caught:
        initialize_quietly(
            model=nn.Linear(4, 4).requires_grad_(False), config=PLAIN_ADAM | {"zero_optimization": section}
        )
    return str(caught.value)


def test_quantised_gathers_of_a_frozen_model_are_refused_by_their_key() -> None:
    told = run_alone(frozen_with_quantised_gathers)
    assert told.startswith("zero_optimization: zero_quantized_weights: expected a model that is trained")


def refused_without_arguments() -> str:
    with pytest.raises(PlanError) as caught:
        initialize_quietly(model=nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": "auto", "bf16": {}})
    return str(caught.value)


def filled_and_told() -> tuple[Any, ...]:
    import warnings

    import zero_runtime

    config = {
        **AUTO_BATCH,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 1,
            "sub_group_size": "auto",
            "max_live_parameters": 10,
            "reduce_bucket_size": "auto",
        },
        "steps_per_print": float("inf"),
        "compile": {"deepcompile": False},
        "_comment": "a note",
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = zero_runtime.initialize(args=ARGS, model=nn.Linear(4, 4), config=config)
    told = str(caught[-1].message)
    read = engine.config
    engine.destroy()
    return told, read.batch.micro, read.batch.accumulation, read.clip_norm, read.precision.param


def test_initialize_says_what_auto_became() -> None:
    assert '"auto" is filled in from TrainingArguments, and none that say it were given as args' in run_alone(
        refused_without_arguments
    )
    told, *read = run_alone(filled_and_told)
    assert read == [3, 2, 0.01, "fp32"]
    assert "auto: train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2, gradient_clipping=0.01" in told
    assert "zero_optimization.sub_group_size" in told
