"""The predicted peak of one published case: the byte rules of its engine, and activations counted on fake tensors.

`case_peak` is the only place where a peak is computed; another model of the step replaces its body.

[Note: activations of a deep model]
Five of a model's blocks are traced (predict/memory/repeated_blocks.py), with one sequence, or with two and three.
The sizes of its storages are linear in the number of sequences, and without scores in their length (see `LinearTrace`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from benchmarks.published_peers import model_of_numels, nanotron
from orchestrator.wings.pretrained.adapters import add_lora, lora_config
from orchestrator.workloads.models import build_meta_model, model_config, token_losses
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.initial_values import parameters_on_meta
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory import peers
from zero_runtime.predict.memory.activation_count import LinearTrace, Trace
from zero_runtime.predict.memory.activation_trace import trace_step
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.peer_deepspeed import DeepSpeedSettings, deepspeed
from zero_runtime.predict.memory.peers import PeerMemory, PeerModel, PeerTerm
from zero_runtime.predict.memory.short_model import short_copy
from zero_runtime.unit_planner import UnitRules, block_modules

MODELS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).with_name("published") / "models.yaml").read_text(encoding="utf-8")
)
MICRO = (2, 3)  # torch treats dimensions of one differently
LAYER_KEYS = ("num_hidden_layers", "n_layer")
LORA_RANK, LORA_ALPHA = 8, 16.0
LONG_SEQ = (8192, 16384)  # traced for longer ones: without scores, bytes are linear in the sequence
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """One row of a table in `published/`; `micro` sequences of `seq` tokens, `accumulation` micro-batches a step."""

    case: str
    engine: str
    zero: int
    model: str
    world: int
    micro: int
    seq: int
    accumulation: int
    recompute: str
    kernels: str

    def with_micro(self, micro: int) -> Case:
        return replace(self, micro=micro)


@dataclass(frozen=True)
class CasePeak:
    """Bytes: the engine's terms, the activations, the peak that torch allocates, and what libraries add to it."""

    memory: PeerMemory
    activations: int
    allocated: int
    overhead: int

    @property
    def used(self) -> int:
        return self.allocated + self.overhead


def case_peak(case: Case) -> CasePeak:
    """The peak of a case. ValueError, with the reason, if it cannot be modelled."""
    if case.model not in MODELS:
        raise ValueError("encoders and encoder-decoders are not traced")
    memory = engine_memory(case)
    autocasts = case.engine == "ddp"
    activations = activation_bytes(case.model, case.seq, case.micro, case.recompute, case.kernels, autocasts)
    allocated = memory.peak(activations, micro_batches=case.accumulation)
    return CasePeak(memory, activations, allocated, overhead_bytes(case))


def overhead_bytes(case: Case) -> int:
    """The middle of the range of what libraries take on the device (device_overhead.py)."""
    overhead = DeviceOverhead.on_cuda(case.world, case.world if case.zero else 1)
    return (overhead.least + overhead.most) // 2


def engine_memory(case: Case) -> PeerMemory:
    """The terms of the case's engine. ValueError if its rules are not known."""
    model, plan = peer_model(case.model), ZeroPlan.from_stage(case.zero)
    if case.engine == "nanotron":
        return nanotron(model, plan, case.world)
    if case.engine == "deepspeed":
        return deepspeed(model, plan, case.world)
    if case.engine == "deepspeed_optimizer_on_host":
        return deepspeed(model, plan, case.world, DeepSpeedSettings(optimizer_on_host=True))
    if case.engine == "deepspeed_all_on_host":
        return deepspeed(model, plan, case.world, _auto_settings(case.model))
    if case.engine == "fsdp2":
        return peers.fsdp2(model, case.world)
    if case.engine == "ddp":
        return peers.ddp(model, views=False)
    if case.engine == "paper":
        shard = -(-model.numel // case.world)
        terms = (PeerTerm("parameters and gradients, 4P", 4 * model.numel), PeerTerm("states, 12P/N", 12 * shard))
        return PeerMemory("the paper's closed form", terms)
    if case.engine == "half":  # all in 16 bits; the adapter alone is trained
        adapter = lora_numel(case.model)
        terms = (PeerTerm("frozen parameters, 2P", 2 * model.numel), PeerTerm("adapter, 8 bytes each", 8 * adapter))
        return PeerMemory("16-bit parameters with an adapter", terms)
    raise ValueError(f"the byte rules of {case.engine} are not modelled")


def _auto_settings(model: str) -> DeepSpeedSettings:
    """Both offloads, and buckets of "auto" as Hugging Face's integration sets them from the hidden size."""
    hidden = next(MODELS[model][key] for key in ("hidden_size", "n_embd") if key in MODELS[model])
    return DeepSpeedSettings(
        reduce_bucket_size=hidden * hidden,
        prefetch_bucket_size=int(0.9 * hidden * hidden),
        param_persistence_threshold=10 * hidden,
        optimizer_on_host=True,
        params_on_host=True,
    )


def config_of(model: str, layers: int | None = None) -> tuple[str, dict[str, Any]]:
    """The model type and the arguments of its configuration, with another number of layers if given."""
    config = {key: value for key, value in MODELS[model].items() if key not in ("type", "lora")}
    if layers is not None:
        config |= {key: layers for key in LAYER_KEYS if key in config}
    if "max_position_embeddings" not in config and "n_positions" not in config:
        config["max_position_embeddings"] = 1 << 18
    return MODELS[model]["type"], config


def layer_count(model: str) -> int:
    return next(MODELS[model][key] for key in LAYER_KEYS if key in MODELS[model])


@functools.cache
def peer_model(model: str) -> PeerModel:
    """The parameters of the model, without adapters, from a copy with one block."""
    meta = build_meta_model(*config_of(model, 2))
    blocks = [tuple(param.numel() for param in block.parameters()) for block in block_modules(meta)]
    inside = {id(param) for block in block_modules(meta) for param in block.parameters()}
    others = tuple(param.numel() for param in meta.parameters() if id(param) not in inside)
    return model_of_numels((blocks[0],) * layer_count(model), others)


def lora_numel(model: str) -> int:
    """Elements of square adapters on q_proj and v_proj: two matrices of rank 8 each."""
    return layer_count(model) * len(MODELS[model]["lora"]) * 2 * LORA_RANK * MODELS[model]["hidden_size"]


@functools.cache
def activation_bytes(model: str, seq: int, micro: int, recompute: str, kernels: str, autocasts: bool = False) -> int:
    """Peak bytes of one micro-batch's activations; see [Note: activations of a deep model]. ValueError if the kernels
    are not known."""
    return trace_at(model, seq, micro, recompute, kernels, autocasts).total().peak


def trace_at(model: str, seq: int, micro: int, recompute: str, kernels: str, autocasts: bool = False) -> Trace:
    """The trace of a long sequence or of several sequences, from two smaller ones."""
    if seq > LONG_SEQ[1] and kernels.startswith("flash"):
        ends = [trace_at(model, one, micro, recompute, kernels, autocasts) for one in LONG_SEQ]
        return linear(ends[0], ends[1], Fraction(seq - LONG_SEQ[0], LONG_SEQ[1] - LONG_SEQ[0]))
    if micro == 1 or kernels.endswith("liger"):  # the size of Liger's tiles depends on the micro-batch
        return traced(model, seq, micro, recompute, kernels, autocasts=autocasts)
    ends = [traced(model, seq, one, recompute, kernels, autocasts=autocasts) for one in MICRO]
    return linear(ends[0], ends[1], Fraction(micro - MICRO[0], MICRO[1] - MICRO[0]))


def linear(low: Trace, high: Trace, steps: Fraction) -> Trace:
    """The trace whose sizes are `steps` times as far from those of `low` as those of `high`. ValueError if the two
    create other storages."""
    if not low.same_steps(high):
        raise ValueError("the steps of two sizes differ")
    sizes = [int(one + (other - one) * steps) for one, other in zip(low.sizes, high.sizes, strict=True)]
    return replace(low, sizes=sizes)


@functools.cache
def traced(
    model: str, seq: int, micro: int, recompute: str, kernels: str, *, whole: bool = False, autocasts: bool = False
) -> Trace:
    """The trace of one step in bf16; fp16 has the same sizes. whole: all blocks are traced. autocasts: the forward is
    under torch.autocast."""
    if kernels == "fused":
        raise ValueError("Megatron's fused softmax is not traced")
    rules, rule = UnitRules(MixedPrecision("bf16")), RecomputeRule(kind=recompute)  # type: ignore[arg-type]  # a word
    ids = torch.zeros((micro, seq), dtype=torch.int64)
    tile = liger_tile(model, micro * seq) if kernels.endswith("liger") else None

    def trace(built: nn.Module) -> Trace:
        return trace_step(
            built,
            rules,
            rule,
            [ids, ids.clone()],
            lambda model, ids, labels: token_losses(model, ids, labels, tile),
            on_cuda=True,
            autocast=torch.bfloat16 if autocasts else None,
        )

    if not whole:
        built = build_for_trace(model, kernels)
        short = short_copy(built, rules, rule)
        if short is not None:
            traced = LinearTrace.of_one(1, trace(short.model))
            found = short.left.complete(traced)
            if found is not None:
                return found.trace
    return trace(build_for_trace(model, kernels))


def liger_tile(model: str, tokens: int) -> int:
    """Tokens whose logits Liger's loss holds at a time (Liger-Kernel, ops/fused_linear_cross_entropy.py)."""
    chunks = -(-MODELS[model]["vocab_size"] // MODELS[model]["hidden_size"])
    return 1 << (-(-tokens // chunks) - 1).bit_length()


def build_for_trace(model: str, kernels: str) -> nn.Module:
    """The model on the meta device. `kernels`: `eager` attention keeps its scores, and `eager_dropout` has the
    architecture's dropout; `flash` attention does not; `flash_norm` also has a fused RMSNorm, `flash_norm_liger` also
    Liger's loss."""
    kind, config = config_of(model)
    settings = model_config(kind, config)
    if kernels == "eager_dropout":
        settings = transformers.CONFIG_MAPPING[kind](**config, use_cache=False)
    attention = "eager" if kernels.startswith("eager") else "sdpa"
    with parameters_on_meta():
        built: nn.Module = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation=attention)
    if "lora" in MODELS[model]:
        built = add_lora(built, lora_config(LORA_RANK, LORA_ALPHA, MODELS[model]["lora"]))
    if kernels.startswith("flash_norm"):
        for module in built.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = functools.partial(_fused_norm, module)
    return built.train()


class _FusedNorm(torch.autograd.Function):
    """The storages of RMSNorm as one kernel, without its values: it keeps its input and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, rows)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


def _fused_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = _FusedNorm.apply(hidden, module.weight)
    return normed
