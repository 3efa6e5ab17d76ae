"""Initial values follow each module's own rule, are equal at every stage and world size, and fit in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.models import TinySpec, TinyTransformer
from harness.patience import HANG_S
from harness.ranks import run_ranks
from harness.shapes import SHAPES, build_shape
from harness.unsharded import unsharded_peak
from torch import nn

from orchestrator.workloads.models import build_deferred_model, build_meta_model, build_model
from zero_runtime.errors import PlanError
from zero_runtime.initial_values import InitialValues, parameters_on_meta, seed_of
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
}


def born(model: nn.Module, *, seed: int = 0) -> dict[str, torch.Tensor]:
    birth = InitialValues(model, seed=seed)
    return {name: birth.draw(name, param) for name, param in model.named_parameters()}


def runtime_of(model: nn.Module, stage: int = 3, precision: str = "fp32", **settings: Any) -> ZeroRuntime:
    return ZeroRuntime(
        model,
        ZeroPlan.from_stage(stage),
        MixedPrecision(precision),
        AdamWConfig(),
        RuntimeSettings(**settings),
        torch.device("cpu"),
    )


# ---- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SMALL)
def test_drawn_initial_values_follow_the_rules_of_a_normally_built_model(kind: str) -> None:
    """Constant values are equal; random values have the same mean and standard deviation.

    The mean of n normal samples with deviation s is within 6 s/sqrt(n) of the true mean and their deviation within
    6 s/sqrt(2n), except in two of 10^9 cases (six sigma), so two samples differ by at most twice that. These bounds
    distinguish GPT-2's scaled residual projections and the ones of every norm from other weights.
    """
    config = {**SMALL[kind], **({"n_embd": 64, "n_layer": 8} if kind == "gpt2" else {"num_hidden_layers": 3})}
    built = dict(build_model(kind, config, seed=1).named_parameters())
    drawn = born(build_deferred_model(kind, config))
    assert drawn.keys() == built.keys()
    for name, param in built.items():
        values, wanted = drawn[name].double(), param.detach().double()
        if wanted.std() == 0:
            assert torch.equal(values, wanted), name
            continue
        error = 12 * float(wanted.std()) / wanted.numel() ** 0.5
        assert abs(float(values.mean() - wanted.mean())) <= error, name
        assert abs(float(values.std() - wanted.std())) <= error / 2**0.5, name
    if kind == "gpt2":
        assert drawn["transformer.h.0.mlp.c_proj.weight"].std() < 0.5 * drawn["transformer.h.0.mlp.c_fc.weight"].std()


def test_no_two_parameters_are_equal_and_each_is_a_function_of_seed_and_name() -> None:
    first, again, other = (born(build_deferred_model("llama", SMALL["llama"]), seed=seed) for seed in (1, 1, 2))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if value.std() > 0:
            assert not torch.equal(value, other[name])
            assert not any(torch.equal(value, rest) for key, rest in first.items() if key != name)
    deeper = born(build_deferred_model("llama", {**SMALL["llama"], "num_hidden_layers": 3}), seed=1)
    assert all(torch.equal(deeper[name], value) for name, value in first.items()), "more layers move no other value"
    assert seed_of(1, "a") == seed_of(1, "a") != seed_of(1, "b") != seed_of(2, "b")


def test_drawing_initial_values_does_not_change_the_random_state() -> None:
    before = torch.get_rng_state()
    born(build_deferred_model("gpt2", SMALL["gpt2"]))
    assert torch.equal(torch.get_rng_state(), before)


class Parts(nn.Module):
    """Layers of torch whose initialization rules involve more than one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, padding_idx=3)
        self.attention = nn.MultiheadAttention(8, 2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 4)


def test_torch_layers_are_initialized_by_their_own_rules() -> None:
    with parameters_on_meta():
        model = Parts()
    drawn = born(model)
    assert not drawn["embed.weight"][3].any()
    assert drawn["embed.weight"][2].all()
    # MultiheadAttention zeroes the bias of a submodule, and draws its weight by a different rule than Linear.
    assert not drawn["attention.out_proj.bias"].any()
    assert not drawn["layer.self_attn.in_proj_bias"].any()
    assert drawn["layer.linear1.bias"].any()
    bound = (6 / (8 + 24)) ** 0.5  # xavier_uniform of [24, 8]
    assert 0.9 * bound < drawn["attention.in_proj_weight"].abs().max() <= bound
    assert torch.equal(drawn["norm.weight"], torch.ones(8))
    assert 0 < drawn["recurrent.weight_hh_l0"].abs().max() <= 0.5  # 1/sqrt(hidden)


def test_a_module_without_an_initialization_rule_is_refused_by_name_unless_one_is_given() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 3)

    with parameters_on_meta():
        model = Bare()
    with pytest.raises(PlanError, match=r"parameter 'scale' .* no rule sets all of it: expected Bare to have"):
        born(model)

    def rule(module: nn.Module) -> None:
        if isinstance(module, Bare):
            nn.init.constant_(module.scale, 2.0)

    birth = InitialValues(model, seed=0, initialise=rule)
    assert torch.equal(birth.draw("scale", model.scale), torch.full((3,), 2.0))
    assert birth.draw("inner.weight", model.inner.weight).any(), "what the rule passes by keeps its module's own"


def test_an_initialization_rule_that_reads_another_parameter_is_refused_by_name() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.b.weight.copy_(self.a.weight)

    with parameters_on_meta():
        model = Copies()
    with pytest.raises(PlanError, match=r"'b\.weight' cannot be drawn alone: the initialiser of Copies"):
        born(model)


# ---- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [build_deferred_model, build_meta_model], ids=["parameters_on_meta", "meta_device"])
@pytest.mark.parametrize("kind", SMALL)
def test_buffers_equal_those_of_a_normally_built_model(kind: str, build: Any) -> None:
    wanted = dict(build_model(kind, SMALL[kind], seed=1).named_buffers())
    model = build(kind, SMALL[kind])
    InitialValues(model, seed=0).fill_buffers()
    found = dict(model.named_buffers())
    assert found.keys() == wanted.keys()
    assert (kind == "gpt2") == (not wanted)
    for name, buffer in wanted.items():
        assert torch.equal(found[name], buffer), name
        assert found[name].dtype is buffer.dtype
    assert model.state_dict().keys() == build_model(kind, SMALL[kind], seed=1).state_dict().keys()


def test_a_meta_buffer_that_no_rule_can_restore_is_refused_by_name() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(3.0), persistent=False)

    with torch.device("meta"):
        lost = Table()
    with pytest.raises(PlanError, match=r"buffer 'angles' .*inside parameters_on_meta\(\)"):
        InitialValues(lost, seed=0).fill_buffers()
    with parameters_on_meta():
        kept = Table()
    assert torch.equal(kept.angles, torch.arange(3.0))
    with torch.device("meta"):
        norm = nn.BatchNorm1d(4)
    InitialValues(norm, seed=0).fill_buffers()
    assert torch.equal(norm.running_var, torch.ones(4))
    assert norm.num_batches_tracked == 0


def test_a_model_partly_on_the_meta_device_is_refused_by_name() -> None:
    model = TinyTransformer(TinySpec())
    model.head = nn.Linear(20, 37, bias=False, device="meta")
    with pytest.raises(PlanError, match=r"found both: 'embed\.weight' has values and 'head\.weight' is on the meta"):
        InitialValues(model, seed=0)


# ---- equal values at every stage and world size ----------------------------------------------------------------------


def _embeddings(model: Any) -> set[nn.Parameter]:
    """The weights of the input and output embeddings, by identity."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {param for module in ends for param in module.parameters()}


def _born_weights(kind: str, rows: list[tuple[int, int | None]]) -> dict[str, torch.Tensor]:
    """The full initial weights on this rank, after asserting that all `rows` give the same weights."""
    first: dict[str, torch.Tensor] = {}
    for stage, unit_numel in rows:
        runtime = runtime_of(build_deferred_model(kind, SMALL[kind]), stage, seed=7, unit_numel=unit_numel)
        with runtime.full_params() as found:
            first = first or found
            assert all(torch.equal(found[name], value) for name, value in first.items())
        assert len(_embeddings(runtime.model)) == (2 if kind == "llama" else 1)
        assert all(param.device.type == "cpu" for param in runtime.model.parameters())
        runtime.close()
    return first


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(kind, marks=pytest.mark.full) for kind in SMALL if kind != "gpt2")]
)
def test_the_same_seed_gives_the_same_weights_at_every_stage_world_and_unit_size(kind: str) -> None:
    rows = [(0, None), (1, None), (2, None), (3, None), (3, 1), (3, 10**9)]
    wanted = born(build_deferred_model(kind, SMALL[kind]), seed=7)
    for world in (1, 2, 3):
        found = run_ranks(_born_weights, world, kind, rows)[world - 1]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), world


def _trains() -> list[float]:
    """Losses of a model built on the meta device, asserted equal to those of a model passed in with its weights."""
    rank_losses = []
    for hand_over in (False, True):
        model = build_deferred_model("qwen2", SMALL["qwen2"])
        if hand_over:
            values = born(build_deferred_model("qwen2", SMALL["qwen2"]), seed=3)
            model = build_model("qwen2", SMALL["qwen2"], seed=9)
            model.load_state_dict(values, strict=False)
        (held,) = _embeddings(model)  # references taken before the start must stay the trained parameters
        runtime = runtime_of(model, seed=3, precision="bf16")
        assert _embeddings(model) == {held}
        losses = []
        for step in range(3):
            ids = torch.arange(12).reshape(2, 6) + step
            loss = runtime(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum() / 24
            runtime.backward(loss)
            losses.append(runtime.step(1e-2).loss)
        rank_losses.append(losses)
        runtime.close()
    assert rank_losses[0] == rank_losses[1]
    assert rank_losses[0][0] != rank_losses[0][2]
    return rank_losses[0]


def test_a_model_built_on_meta_trains_like_one_passed_in_with_the_same_weights() -> None:
    run_ranks(_trains, 2)


def _handed_over() -> None:
    for kind in SHAPES.values():
        for stage in (0, 3):
            model = build_shape(kind)
            wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
            params = dict(model.named_parameters())
            runtime = runtime_of(model, stage, seed=5)
            with runtime.full_params() as found:
                assert all(torch.equal(found[name], value) for name, value in wanted.items())
            assert all(param is params[name] for name, param in model.named_parameters())
            runtime.close()


def test_a_model_passed_in_with_weights_keeps_them() -> None:
    run_ranks(_handed_over, 2)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _birth_peak() -> tuple[int, int, int]:
    with parameters_on_meta():
        model = TinyTransformer(TinySpec(blocks=8))
    runtime = runtime_of(model, 3)
    with unsharded_peak(runtime.units) as peak:
        peak.look(runtime.units)
    return peak.counts[-1], len(runtime.units), sum(unit.param_shard.nbytes for unit in runtime.units)


def test_no_unit_is_unsharded_after_construction_if_parameters_are_sharded() -> None:
    for whole, units, shard_bytes in run_ranks(_birth_peak, 2):
        assert (whole, units) == (0, 11)
        assert shard_bytes > 0


PROGRAM = """
import resource, sys
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from zero_runtime.initial_values import parameters_on_meta
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.optim.configs import AdamWConfig

WIDTH, BLOCKS, WORLD = 1024, 96, 32
MIB = 2**20
block_bytes = WIDTH * WIDTH * 4
model_bytes = BLOCKS * block_bytes

def build(blocks):
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))
    return model

def give_birth(blocks):
    with parameters_on_meta():
        model = build(blocks)
    return ZeroRuntime(model, ZeroPlan.from_stage(3), MixedPrecision(), AdamWConfig(), RuntimeSettings(),
                       torch.device("cpu"))

torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
give_birth(2).close()  # what the libraries allocate once is allocated
(used,) = (int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
# The shard and its two moments, a unit whole, one parameter being drawn with what its rule and the check of it take,
# and as much again for small things; far less than the model.
shards = 3 * model_bytes // WORLD
allowed = shards + 8 * block_bytes
assert allowed < model_bytes / 4, (allowed, model_bytes)
if sys.argv[1] != "resident":
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, used + allowed))
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
if sys.argv[1] != "built":
    runtime = give_birth(BLOCKS)
    total = sum(unit.layout.numel for unit in runtime.units) * 4
    assert total == model_bytes, total
    values = torch.cat([unit.param_shard for unit in runtime.units])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
    assert grown < allowed, (grown, allowed)
    assert 0.9 < float(values.abs().max()) * WIDTH**0.5 <= 1, "uniform within 1/sqrt(width), as Linear draws it"
else:
    build(BLOCKS)
print("done")
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's size from /proc")
def test_a_model_larger_than_the_memory_limit_can_be_initialized_sharded_but_not_built_normally() -> None:
    """RLIMIT_DATA limits all private writable pages of a separate process, which is the first of 32 ranks.

    The limit includes freed memory that malloc keeps for reuse, so under it malloc returns freed memory to the kernel
    immediately. With the settings of a job, where malloc keeps freed memory, the resident memory has the same bound.
    """
    returns = "glibc.malloc.mmap_threshold=1048576"
    keeps = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"
    born, resident, built = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, how],
            cwd=REPOSITORY,
            env={**os.environ, "GLIBC_TUNABLES": tunables, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        for how, tunables in (("born", returns), ("resident", keeps), ("built", returns))
    )
    assert born.stdout.strip() == "done", born.stderr
    assert resident.stdout.strip() == "done", resident.stderr
    assert built.returncode != 0
    assert "allocate memory" in built.stderr, built.stderr
