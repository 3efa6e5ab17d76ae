"""Small transformers of many shapes, trained with tensor or sequence parallelism, and by plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.plain_optimizers import plain_optimizer
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.offload.copy_streams import Copies
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.optim.configs import OptimizerConfig, SgdConfig
from zero_runtime.parallel.sequence.axis import SequenceAxis
from zero_runtime.parallel.sequence.division import SequenceParallel
from zero_runtime.parallel.tensor.cross_entropy import vocabulary_cross_entropy
from zero_runtime.parallel.tensor.division import TensorParallel, head_of
from zero_runtime.plan import OuterSharding, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.settings import NO_OFFLOAD
from zero_runtime.wire import EXACT, Wire

CPU = torch.device("cpu")
SGD = SgdConfig()
VOCABULARY, WIDTH, BLOCKS, HEADS = 37, 24, 2, 4  # no degree above 1 divides the vocabulary
MICRO, SEQ, LR, TRAINED_STEPS = 2, 12, 0.1, 3
PROMPT = 4  # tokens of a sequence without a label, in runs with parts of sequences: most of the first of two parts
IGNORED = -100
NO_RECOMPUTATION = RecomputeRule()
HOST = OffloadPlan(optimizer=Tier.HOST, copies=Copies)
HOST_PARAMS = OffloadPlan(Tier.HOST, Tier.HOST, copies=Copies)

# By kind: the architecture, and what differs from the sizes above.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {"num_key_value_heads": 2}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "neox": ("gpt_neox", {}),
    "t5": ("t5", {}),
}
# Odd shapes: a head of another size than width / heads, widths that leave odd slices, biases, other ties.
ODD_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_biased": (
        "llama",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "intermediate_size": 38},
    ),
    "llama_wide_heads": ("llama", {"num_key_value_heads": 4, "head_dim": 10, "vocab_size": 3}),
    "qwen2_untied": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False, "intermediate_size": 46}),
    "neox_tied": ("gpt_neox", {"tie_word_embeddings": True, "use_parallel_residual": False}),
    "t5_gated_untied": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 5}),
}
# Further architectures of which sequences are divided, with their own defaults that these sizes need.
PART_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}),
    "granite": ("granite", {"num_key_value_heads": 2, "embedding_multiplier": 1.5, "logits_scaling": 2.0}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "olmo2": ("olmo2", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"num_key_value_heads": 2, "sliding_window": None, "pad_token_id": 0}),
    "smollm3": ("smollm3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2, "pad_token_id": 0}),
}


def model_of(kind: str, **others: Any) -> nn.Module:
    """A small model with values, the same in each call. others: of its configuration."""
    import transformers as library

    architecture, own = (KINDS | ODD_KINDS | PART_KINDS)[kind]
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": BLOCKS}
    sizes |= {"intermediate_size": 40, "num_attention_heads": HEADS}
    if architecture == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    if architecture == "t5":
        sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 6, "d_ff": 40, "num_layers": BLOCKS}
        sizes |= {"num_heads": HEADS, "dropout_rate": 0.0}
    config = library.AutoConfig.for_model(architecture, **sizes | own | others)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if architecture == "t5":
            return library.T5ForConditionalGeneration(config)
        return library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """The model with adapters by PEFT that have an effect from the beginning."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        wrapped = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))  # type: ignore[arg-type]
        for name, param in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.05)
    return wrapped


def batch_of(model: nn.Module, step: int, data_rank: int, micro: int = 0) -> torch.Tensor:
    """Token ids [MICRO, SEQ]."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * data_rank + micro)
    return torch.randint(model.config.vocab_size, (MICRO, SEQ), generator=generator)


def labels_of(ids: torch.Tensor, *, prompt: int = 0) -> torch.Tensor:
    """The token after each of `ids`, without the first `prompt` ones."""
    return ids.roll(-1, 1).index_fill(1, torch.arange(prompt), IGNORED)


def loss_sum(
    model: nn.Module,
    ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    sequence: SequenceAxis | None = None,
    tile: int | None = None,
) -> torch.Tensor:
    """The sum of the token losses, by the loss that the head's logits need; of this rank's part of the sequences. tile:
    the tokens whose logits exist at a time."""
    if tile is not None:
        from orchestrator.workloads.models import token_losses

        return token_losses(model, ids, labels_of(ids) if labels is None else labels, tile, head_of(model), sequence)
    is_encoder_decoder = model.config.is_encoder_decoder
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if is_encoder_decoder else {})
    logits, labels = model(**given, use_cache=False).logits, labels_of(ids) if labels is None else labels
    labels = labels if sequence is None else sequence.part(labels)
    head = head_of(model)
    if head is not None:
        return vocabulary_cross_entropy(logits, labels, head.axis, vocabulary=head.vocabulary)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="sum")


@dataclass(frozen=True)
class DividedRun:
    """One way to train a model with tensor parallelism of `degree`, or with sequences in `parts`."""

    kind: str
    stage: int = 0
    degree: int = 2
    parts: int = 1
    gathers_logits: bool = True
    micro_batches: int = 1
    clip_norm: float | None = None
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    offload: OffloadPlan = NO_OFFLOAD
    optimizer: OptimizerConfig = SGD
    recompute: RecomputeRule = NO_RECOMPUTATION
    shard_ranks: int | None = None
    outer_sharding: OuterSharding | None = None
    wire: Wire = EXACT
    tile: int | None = None
    adapter_rank: int = 0  # of LoRA on all linear layers but the head, which are frozen; 0: none

    def model(self) -> nn.Module:
        """The model with values, and its adapters; the same in each call."""
        return adapted(model_of(self.kind), self.adapter_rank) if self.adapter_rank else model_of(self.kind)

    def runtime(self, model: nn.Module | None = None) -> ZeroRuntime:
        settings = RuntimeSettings(
            micro_batches=self.micro_batches,
            clip_norm=self.clip_norm,
            offload=self.offload,
            tensor_parallel=TensorParallel(self.degree, gathers_logits=self.gathers_logits),
            sequence_parallel=SequenceParallel(self.parts),
            wire=self.wire,
        )
        given = model or self.model()
        plan = ZeroPlan.from_stage(self.stage, shard_ranks=self.shard_ranks, outer_sharding=self.outer_sharding)
        Recomputation(given, self.recompute)
        return ZeroRuntime(given, plan, self.precision, self.optimizer, settings, CPU)


Result = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]  # (loss, norm) by step, and the weights by name


def one_step(runtime: ZeroRuntime, step: int, tile: int | None = None) -> tuple[float, float]:
    """Train one step on this rank's batches; returns loss and norm."""
    micros, sequence = runtime.settings.micro_batches, runtime.sequence
    batches = [batch_of(runtime.model, step, runtime.collectives.batch_rank, micro) for micro in range(micros)]
    labels = [labels_of(ids, prompt=PROMPT if sequence.degree > 1 else 0) for ids in batches]
    tokens = runtime.sum_over_ranks(sum(int((sequence.part(one) != IGNORED).sum()) for one in labels))
    for ids, own in zip(batches, labels, strict=True):
        runtime.backward(loss_sum(runtime.model, ids, own, sequence, tile) / tokens)
    report = runtime.step(LR)
    return report.loss, report.grad_norm


def weights_of(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    """Copies of the full weights. A collective."""
    with runtime.full_params() as values:
        return {name: value.clone() for name, value in values.items()}


def divided_results(runs: list[DividedRun]) -> list[Result]:
    """What this rank has after each run."""
    found = []
    for run in runs:
        runtime = run.runtime()
        steps = [one_step(runtime, step, run.tile) for step in range(TRAINED_STEPS)]
        found.append((steps, weights_of(runtime)))
        runtime.close()
    return found


def plain_result(run: DividedRun, data_world: int, dtype: torch.dtype) -> Result:
    """The same run in plain PyTorch: parameters of `dtype`, with masters and sums of gradients in fp32 or fp64."""
    model, steps, prompt = run.model().to(dtype), [], PROMPT if run.parts > 1 else 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters = {name: param.detach().to(wide) for name, param in run.model().named_parameters()}
    optimizer = plain_optimizer(run.optimizer, masters, LR)
    for step in range(TRAINED_STEPS):
        total = 0.0
        for name, param in model.named_parameters():
            param.data.copy_(masters[name])
        for rank in range(data_world):
            for micro in range(run.micro_batches):
                ids = batch_of(model, step, rank, micro)
                loss = loss_sum(model, ids, labels_of(ids, prompt=prompt))
                loss = loss / (MICRO * (SEQ - prompt) * run.micro_batches * data_world)
                loss.backward()
                total += float(loss.detach())
                _move_gradients(model, masters)
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), run.clip_norm or torch.inf)
        steps.append((total, float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return steps, masters


def _move_gradients(model: nn.Module, masters: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        if param.grad is not None:
            own = param.grad.to(masters[name].dtype)
            held = masters[name].grad
            masters[name].grad = own if held is None else held + own
            param.grad = None


def check_against_plain(by_rank: list[list[Result]], runs: list[DividedRun]) -> None:
    """Both a divided and a plain run of the same dtype differ from one in fp64 by rounding alone.

    The bound is eight times the distance of the plain run of that dtype, over all weights, and over the losses and
    norms of all steps; in fp32 it is at least 64 roundings of a loss of at most 4. A divided sum has as many roundings
    as a plain one, in another order, and a head has 3 more. A lost or doubled term changes a gradient by a part of
    itself: in fp32 10**4 times as much as this bound, in bf16 about 10 times.
    """
    for results in by_rank:
        assert [steps for steps, _ in results] == [steps for steps, _ in by_rank[0]]
    for run, (steps, weights) in zip(runs, by_rank[0], strict=True):
        data_world, dtype = len(by_rank) // (run.degree * run.parts), TORCH_DTYPE[run.precision.param]
        exact_steps, exact = plain_result(run, data_world, torch.float64)
        own_steps, own = plain_result(run, data_world, dtype)
        least = 64 * 4 * 2.0**-24 if dtype == torch.float32 else 0.0
        for place in (0, 1):  # losses; norms
            wanted, plain, found = ([step[place] for step in one] for one in (exact_steps, own_steps, steps))
            allowed = max(8 * _distance(plain, wanted), least)
            assert _distance(found, wanted) <= allowed, (run, place, found, wanted, allowed)
        allowed = 8 * max(float((own[name] - value).abs().max()) for name, value in exact.items())
        for name, value in exact.items():
            assert float((weights[name] - value).abs().max()) <= allowed, (run, name)


def _distance(ones: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ones, others, strict=True))
