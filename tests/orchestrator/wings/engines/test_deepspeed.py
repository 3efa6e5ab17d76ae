"""DeepSpeed's adapter: its losses and weights are those of a plain loop of torch in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from points import config_of_line
from torch import nn

from orchestrator.config.engine import EngineChoice, EngineKind
from orchestrator.config.schema import RunConfig
from orchestrator.wings.engines import deepspeed, materialise
from orchestrator.wings.engines.contract import Task
from orchestrator.wings.engines.foreign_runtime import bytes_by_dtype
from orchestrator.worker.setup import build_data, build_deferred
from orchestrator.workloads.data import IGNORED_LABEL, slice_for_rank
from orchestrator.workloads.models import token_losses
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.initial_values import InitialValues
from zero_runtime.optim.lr_schedule import Rates

CPU, STEPS = torch.device("cpu"), 20
LLAMA = (
    "model=llama_tiny model.config.num_hidden_layers=2 model.config.hidden_size=48 model.config.intermediate_size=64 "
    "model.config.num_attention_heads=4 model.config.num_key_value_heads=2 model.config.vocab_size=261 batch.seq=16 "
    "batch.micro=2 measure=quick measure.validation_batches=0 seed=5 tracking=none resources.device=cpu "
    "resources.ranks=2 resources.threads=1 optimizer.lr=0.002 optimizer.weight_decay=0.1 "
)
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install '.[deepspeed]'"
)
# By name of the work: words of the command line. 261 tokens x 48 are an odd number of rows for the ranks.
WORKS = {
    "plain": "precision=fp32 optimizer.clip_norm=null",
    "sums": "precision=fp32 batch.accumulation=4 optimizer.clip_norm=0.5 model.config.tie_word_embeddings=true",
    "lora": "precision=fp32 adapter=lora batch.accumulation=2 recompute=full",
}


class Trained(NamedTuple):
    """held: bytes by component and dtype between the last backward and the step. first: masters before any step."""

    losses: list[float]
    norms: list[float | None]
    weights: dict[str, torch.Tensor]
    held: dict[str, dict[str, int]]
    scales: list[float]
    first: dict[str, torch.Tensor]


def config_of(words: str, stage: int = 0, **native: Any) -> RunConfig:
    """Also where DeepSpeed is not installed."""
    config = config_of_line(f"{LLAMA} {words} zero=stage{stage}")
    return deepspeed.meaning(replace(config, engine=EngineChoice(EngineKind.deepspeed, deepspeed=native)))


def task_of(config: RunConfig) -> Task:
    model, initialise = build_deferred(config)
    Recomputation(model, config.recompute, CPU)
    values = InitialValues(model, seed=config.seed, initialise=initialise)
    values.fill_buffers()
    return Task(config, model, values.draw, CPU)


def micro_batches(config: RunConfig, step: int, rank: int, world: int) -> tuple[list[tuple[Any, Any]], int]:
    """A rank's part of the global batch, and the number of labels of the whole."""
    data, size, micro = build_data(config), config.batch.global_size, config.batch.micro
    _, every = data.train_batch(step * size, size)
    offset, count = slice_for_rank(size, rank, world)
    ids, labels = (torch.from_numpy(one) for one in data.train_batch(step * size + offset, count))
    return list(zip(ids.split(micro), labels.split(micro), strict=True)), int((every != IGNORED_LABEL).sum())


def by_deepspeed(configs: Sequence[RunConfig], fp16_here: bool = False) -> list[Trained]:
    """On each rank: the steps that a worker makes, of each point in turn."""
    if fp16_here:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
    return [_trained(config) for config in configs]


def _trained(config: RunConfig) -> Trained:
    engine = deepspeed.build(task_of(config))
    found = Trained([], [], {}, {}, [], {name: value.clone() for name, value in engine.parameters()})
    for step in range(STEPS):
        batches, tokens = micro_batches(config, step, dist.get_rank(), dist.get_world_size())
        total = torch.zeros((), dtype=torch.float64)
        for index, (ids, labels) in enumerate(batches):
            engine.before_micro_batch(last=index == len(batches) - 1)
            loss = token_losses(engine.module, ids, labels) / tokens
            engine.backward(loss)
            total += loss.detach()
        found.held.update(bytes_by_dtype(engine.held()))
        updated = engine.step(Rates(config.optimizer.lr))
        dist.all_reduce(total)
        found.losses.append(float(total))
        found.norms.append(None if updated.norm is None else float(updated.norm))
        found.scales.append(updated.loss_scale)
    found.weights.update({name: value.clone() for name, value in engine.parameters()})
    engine.close()
    return found


def by_torch(config: RunConfig) -> Trained:
    """The whole global batch in one process: fp32, or 16-bit weights with fp32 masters and sums."""
    model, rule = materialise.whole(task_of(config)), config.optimizer.rule
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    for param in model.parameters():
        param.data = param.data.to(TORCH_DTYPE[config.precision.dtypes.param])  # the buffers stay as they are
    groups = [
        {"params": [one for one in masters.values() if one.ndim >= 2]},
        {"params": [one for one in masters.values() if one.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(
        groups, config.optimizer.lr, betas=(rule.beta1, rule.beta2), eps=rule.eps, weight_decay=rule.decay
    )
    found = Trained([], [], {}, {}, [], {name: one.detach().clone() for name, one in masters.items()})
    for step in range(STEPS):
        batches, tokens = micro_batches(config, step, 0, 1)
        found.losses.append(0.0)
        for ids, labels in batches:
            loss = token_losses(model, ids, labels) / tokens
            loss.backward()
            found.losses[-1] += float(loss.detach())
            for name, param in params.items():
                grad = param.grad.float()
                masters[name].grad = grad if masters[name].grad is None else masters[name].grad + grad
                param.grad = None
        limit = config.optimizer.clip_norm or float("inf")
        found.norms.append(float(nn.utils.clip_grad_norm_(masters.values(), limit)))
        adam.step()
        adam.zero_grad()
        for name, param in params.items():
            param.data.copy_(masters[name].data)
    found.weights.update({name: one.detach() for name, one in masters.items()})
    return found


def farthest(found: Sequence[float | None], expected: Sequence[float | None]) -> float:
    """The largest relative difference of two series."""
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


@needs_deepspeed
@pytest.mark.full
def test_fp32_losses_norms_and_weights_are_those_of_one_process() -> None:
    rows = [(work, stage) for work in WORKS for stage in range(4)]
    trained = run_ranks(by_deepspeed, 2, [config_of(WORKS[work], stage) for work, stage in rows])[0]
    plain = {work: by_torch(config_of(words)) for work, words in WORKS.items()}
    for (work, stage), found in zip(rows, trained, strict=True):
        expected = plain[work]
        # Sums in another order differ by some units of 2^-24 = 6e-8; 20 steps of this size do not amplify them.
        assert farthest(found.losses, expected.losses) < 1e-6, (work, stage)
        # A sum of n squares in fp32 is off by about sqrt(n) roundings, each of 2^-24 at most.
        numel = sum(one.numel() for one in expected.weights.values())
        tells = (
            stage > 0 and work != "plain"
        )  # stage 0 clips without telling the norm; one that is not used is not made
        assert not tells or farthest(found.norms, expected.norms) < numel**0.5 * 2**-24, (work, stage)
        # An update is at most about one learning rate for an element, and where a gradient is about 0 its sign is that
        # of the rounding. No element may miss a whole update.
        for name, weight in expected.weights.items():
            assert (found.weights[name] - weight).abs().max() < 0.002 / 10, (work, stage, name)


@needs_deepspeed
@pytest.mark.full
def test_bf16_begins_with_the_fp32_masters_of_one_process_and_stays_beside_it() -> None:
    words = "precision=bf16 batch.accumulation=2 optimizer.clip_norm=1.0"
    configs = [config_of(words, stage) for stage in (1, 2, 3)] + [
        config_of(words + " offload.optimizer=cpu", 1),
        config_of(words + " offload.optimizer=cpu offload.params=cpu recompute=full", 3),
        config_of(words, 0),  # last: from its autocast on, other engines of the process have it too
    ]
    plain = by_torch(configs[0])
    for found, config in zip(run_ranks(by_deepspeed, 2, configs)[0], configs, strict=True):
        assert all(torch.equal(found.first[name], value) for name, value in plain.first.items())
        # Equal weights and batches: the losses of the first step differ by the order of fp32 sums. Not with autocast,
        # which rounds the results of other operations.
        assert config.zero.stage == 0 or farthest(found.losses[:1], plain.losses[:1]) < 1e-6
        # Later the weights differ by at most one rounding to bf16, 2^-8; a loss moves by less than its weights do.
        assert farthest(found.losses, plain.losses) < 2**-8


# By words and stage: bytes of a rank of 2 by component and dtype, in elements of P = 48,096 parameters, N = 2.
@needs_deepspeed
@pytest.mark.full
def test_each_stage_holds_its_shards_between_backward_and_step() -> None:
    whole = {"exp_avg": {"fp32": 4}, "exp_avg_sq": {"fp32": 4}}
    half = {"exp_avg": {"fp32": 2}, "exp_avg_sq": {"fp32": 2}}
    cases: dict[tuple[str, int], dict[str, dict[str, int]]] = {
        ("fp32", 0): {"params": {"fp32": 4}, "grads": {"fp32": 4}, **whole},
        ("fp32", 1): {"params": {"fp32": 4}, "master": {"fp32": 2}, "grads": {"fp32": 2}, **half},
        ("fp32", 3): {"params": {"fp32": 2}, "master": {"fp32": 2}, "grads": {"fp32": 2}, **half},
        ("bf16", 1): {"params": {"bf16": 2}, "master": {"fp32": 2}, "grads": {"fp32": 4}, **half},
        ("bf16", 2): {"params": {"bf16": 2}, "master": {"fp32": 2}, "grads": {"fp32": 2}, **half},
        ("bf16", 3): {"params": {"bf16": 1}, "master": {"fp32": 2}, "grads": {"fp32": 2}, **half},
        ("bf16", 0): {"master": {"fp32": 4}, "grads": {"fp32": 4}, **whole},
    }
    none_persists = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    configs = [config_of(f"precision={precision}", stage, **none_persists) for precision, stage in cases]
    for found, (case, expected) in zip(run_ranks(by_deepspeed, 2, configs)[0], cases.items(), strict=True):
        numel = sum(one.numel() for one in found.first.values())
        in_elements = {
            name: {dtype: round(size / numel, 2) for dtype, size in sizes.items()} for name, sizes in found.held.items()
        }
        assert in_elements == expected, case


@needs_deepspeed
@pytest.mark.full
def test_fp16_has_the_loss_scales_of_the_points_rule() -> None:
    config = config_of("precision=fp16 precision.initial_scale_power=30 precision.loss_scale_window=3", 2)
    found = run_ranks(by_deepspeed, 2, [config], True)[0][0]
    scaler, expected = config.precision.scale.start(), []
    for norm in found.norms:
        expected.append(scaler.scale)
        scaler = scaler.after(overflow=norm == float("inf"))
    assert found.scales == expected
    assert {norm == float("inf") for norm in found.norms} == {True, False}
    assert found.losses[-1] < found.losses[0]


REFUSED = {
    "precision=fp16": (0, {"zero=stage1", "precision=bf16"}),
    "precision=bf16 offload.optimizer=cpu": (0, {"zero=stage1"}),
    "precision=bf16 offload.optimizer=cpu offload.ratio=0.5": (2, {"offload.ratio=1.0"}),
    "precision=bf16 zero.shard_ranks=1": (3, {"zero.shard_ranks=null"}),
    "precision=bf16_pure": (2, {"precision=bf16"}),
    "optimizer=muon": (2, {"optimizer=adamw"}),
    "optimizer=adamw8bit": (2, {"optimizer=adamw"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_do_is_refused_with_the_nearest_thing(words: str) -> None:
    stage, fixes = REFUSED[words]
    assert {fix for rule in deepspeed.problems_of(config_of(words, stage)) for fix in rule.fix} == fixes


ZERO = "engine.deepspeed.zero_optimization"
KEYS: dict[str, tuple[dict[str, Any], str, str]] = {  # the native keys; the rule and what is found; the fix
    "misspelt": (
        {"gradient_cliping": 1.0},
        "engine.deepspeed has the keys of DeepSpeed's configuration, found gradient_cliping",
        "engine.deepspeed.gradient_clipping",
    ),
    "misspelt in a section": (
        {"zero_optimization": {"overlap_com": True}},
        f"{ZERO} has the keys of DeepSpeed's configuration, found overlap_com",
        f"{ZERO}.overlap_comm",
    ),
    "of another section": (
        {"overlap_comm": True},
        "engine.deepspeed has the keys of DeepSpeed's configuration, found overlap_comm",
        f"{ZERO}.overlap_comm",
    ),
    "in the third level": (
        {"zero_optimization": {"offload_optimizer": {"pin_memry": True}}},
        f"{ZERO}.offload_optimizer has the keys of DeepSpeed's configuration, found pin_memry",
        f"{ZERO}.offload_optimizer.pin_memory",
    ),
    "of another kind": (
        {"zero_optimization": {"overlap_comm": "yes"}},
        f"{ZERO}.overlap_comm must be true or false, found yes",
        f"~{ZERO}.overlap_comm",
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_deepspeed_has_not_are_refused_before_its_ranks_start(case: str) -> None:
    native, told, fix = KEYS[case]
    (rule,) = deepspeed.problems_of(config_of("", 2, **native))
    assert str(rule) == f"{told}      fix: {fix}"


def test_keys_that_deepspeed_has_are_not_refused() -> None:
    native = {"zero_optimization": {"stage3_max_live_parameters": 1e6, "round_robin_gradients": True, "zenflow": {}}}
    more = {"timers": {"throughput": {"enabled": True}}, "torch_autocast": {"enabled": False}, "steps_per_print": 10}
    assert deepspeed.problems_of(config_of("", 2, **native, **more)) == []


NORMS = {  # of words and stage: whether DeepSpeed is asked for a norm; None: it has no say
    ("precision=fp32 optimizer.clip_norm=null", 1): False,
    ("precision=bf16 optimizer.clip_norm=null", 2): False,
    ("precision=bf16 optimizer.clip_norm=1.0", 2): None,
    ("precision=bf16 optimizer.clip_norm=null", 1): None,  # BF16_Optimizer
    ("precision=bf16 optimizer.clip_norm=null", 3): None,
    ("precision=bf16 optimizer.clip_norm=null offload.optimizer=cpu", 2): None,
    ("precision=fp16 optimizer.clip_norm=null", 2): None,
}


@pytest.mark.parametrize(("words", "stage"), NORMS)
def test_a_norm_that_nothing_uses_is_left_out_or_noted(words: str, stage: int) -> None:
    config = config_of(words, stage)
    assert deepspeed.settings_of(config)["zero_optimization"].get("compute_grad_norm") is NORMS[words, stage]
    unused = "null" in words and "fp16" not in words and NORMS[words, stage] is None
    assert ("the norm is computed, but not used" in deepspeed.notes_of(config)) is unused
    clips = config_of(words, stage, gradient_clipping=1.0)  # DeepSpeed refuses to clip without a norm
    assert "compute_grad_norm" not in deepspeed.settings_of(clips)["zero_optimization"]


def test_defaults_that_are_not_the_configurations_are_set_and_native_keys_replace_them() -> None:
    native = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000}}
    config = config_of("precision=bf16 optimizer.clip_norm=null", 2, **native)
    assert deepspeed.settings_of(config) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_allreduce_op": "sum",
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_bucket_size": 1000,
            "compute_grad_norm": False,
        },
        "bf16": {"enabled": True, "check_grad_overflow": False, "immediate_grad_update": True},
    }
