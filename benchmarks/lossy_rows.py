"""What benchmarks/lossy_margins.py trains: each lossy setting, its exact forms, and plain PyTorch on the same batches.

[Note: the task]
The text is that of this Python's standard library, one token per byte, as `data=stdlib` reads it; the model is a Llama
of 0.12 M parameters in two blocks. A step's batch has 8 sequences of 64 tokens, of which each rank takes its part. The
learning rate rises over 20 steps and falls by a cosine to a tenth. The seed decides the initial weights and the order
of the text, and nothing else does: a row and plain PyTorch with the same seed start from the same weights and read the
same batches.

[Note: the oracle]
Plain PyTorch: one process, torch.optim.AdamW in fp32, gradients of the whole batch, torch's own clipping. 1-bit Adam
cannot clip and needs beta2 near 1, so its rows have an oracle of their own with these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from orchestrator.workloads.data import TokenBatch, TokenData, load_data
from orchestrator.workloads.models import build_model, token_losses
from zero_runtime.optim.configs import AdamW8bitConfig, AdamWConfig, OneBitAdamConfig, OptimizerConfig
from zero_runtime.plan import OuterSharding, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch
from zero_runtime.wire import EXACT, Wire

SEQ, GLOBAL, RATE, WARMUP = 64, 8, 3e-3, 20
TOKENS = SEQ * GLOBAL
VOCABULARY = 256
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ,
}
ADAMW = AdamWConfig(0.9, 0.95, 1e-8, 0.1)
LONG_MEMORY = AdamWConfig(0.9, 0.999, 1e-8, 0.1)
BF16, FP32 = MixedPrecision("bf16"), MixedPrecision()
PURE = MixedPrecision("bf16", reduce="bf16", accumulate="bf16", master="bf16")


# Margins, as shares of what the oracle learns. Three kinds of rows lose something that nothing gives back: bf16 masters
# the updates below half of their spacing, 4 bits without feedback what is below 1/14 of a block's largest gradient, and
# signs all sizes but one.
FINE, COARSE = 0.01, 0.03


@dataclass(frozen=True)
class LossyRow:
    """One row: what it sets besides `zero=stage3 precision=bf16`, and what it must stay close to.

    words: as typed on the command line. sends: the formula of its bytes in docs/less.md. share: its margin, as a share
    of what the oracle learns. rate: factor of the learning rate, for the control.
    """

    words: str
    sends: str
    share: float = FINE
    optimizer: OptimizerConfig = ADAMW
    wire: Wire = EXACT
    precision: MixedPrecision = BF16
    stage: int = 3
    world: int = 2
    shard_ranks: int | None = None
    outer_sharding: OuterSharding | None = None
    rate: float = 1.0

    @property
    def oracle(self) -> str:
        """The name of its oracle in ORACLES."""
        return "beta2 0.999, no clipping" if vars(self.optimizer)["beta2"] == LONG_MEMORY.beta2 else "AdamW"

    @property
    def plan(self) -> ZeroPlan:
        return ZeroPlan.from_stage(self.stage, shard_ranks=self.shard_ranks, outer_sharding=self.outer_sharding)


@dataclass(frozen=True)
class LossyTask:
    """One seed. See [Note: the task]. validation_batches: of GLOBAL sequences each; 32 are 16,384 tokens."""

    seed: int = 0
    steps: int = 300
    validation_batches: int = 32

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        falls = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
        return RATE * min(1.0, (step + 1) / WARMUP) * falls

    def data(self) -> TokenData:
        return load_data("stdlib", None, seq=SEQ, seed=self.seed, vocab_size=VOCABULARY, validation_fraction=0.05)

    def model(self) -> nn.Module:
        """In fp32, with initial values that the seed decides."""
        return build_model("llama", LLAMA, seed=self.seed)


ORACLES: dict[str, tuple[AdamWConfig, float | None]] = {
    "AdamW": (ADAMW, 1.0),
    "beta2 0.999, no clipping": (LONG_MEMORY, None),
}

SHARDED = "(N-1)·({} + {})·S"
Q8, Q4 = Wire("int8", "int8"), Wire("int8", "int4")


def onebit(warmup: int) -> OneBitAdamConfig:
    """The constants of LONG_MEMORY; signs after `warmup` updates."""
    return OneBitAdamConfig(0.9, 0.999, 1e-8, 0.1, warmup_updates=warmup)


def one_bit_row(warmup: int) -> LossyRow:
    words = f"zero=stage1 optimizer=onebitadam optimizer.warmup_updates={warmup}"
    return LossyRow(words, "(N-1)·(2·S + 2·(S/8 + 4))", COARSE, onebit(warmup), stage=1)


ROWS: dict[str, LossyRow] = {
    "exact, fp32": LossyRow("precision=fp32", SHARDED.format("2·4", "4"), precision=FP32),
    "exact, bf16": LossyRow("", SHARDED.format("2·2", "4")),
    "exact, outer sharding": LossyRow(
        "resources.ranks=4 zero.shard_ranks=2 zero.outer_sharding=optim",
        "(G-1)·(2·2 + 4)·S + (N/G-1)·(2 + 4)·S·G/N",
        world=4,
        shard_ranks=2,
        outer_sharding="optim",
    ),
    "bf16 states": LossyRow(
        "optimizer.state_dtype=bf16", SHARDED.format("2·2", "4"), FINE, replace(ADAMW, state_dtype="bf16")
    ),
    "bf16 masters": LossyRow("precision=bf16_pure", SHARDED.format("2·2", "2"), COARSE, precision=PURE),
    "bf16 masters and states": LossyRow(
        "precision=bf16_pure optimizer.state_dtype=bf16",
        SHARDED.format("2·2", "2"),
        COARSE,
        replace(ADAMW, state_dtype="bf16"),
        precision=PURE,
    ),
    "8-bit states": LossyRow(
        "optimizer=adamw8bit", SHARDED.format("2·2", "4"), FINE, AdamW8bitConfig(0.9, 0.95, 1e-8, 0.1)
    ),
    "int8 gathers (qwZ)": LossyRow("zero.gather_dtype=int8", SHARDED.format("2·q8", "4"), wire=Wire("int8")),
    "int8 reductions": LossyRow("zero.reduce_dtype=int8", SHARDED.format("2·2", "q8"), wire=Wire(None, "int8")),
    "int8 reductions, feedback": LossyRow(
        "zero.reduce_dtype=int8 zero.error_feedback=true",
        SHARDED.format("2·2", "q8"),
        wire=Wire(None, "int8", error_feedback=True),
    ),
    "int4 reductions (qgZ)": LossyRow(
        "zero.reduce_dtype=int4", SHARDED.format("2·2", "q4"), COARSE, wire=Wire(None, "int4")
    ),
    "int4 reductions, feedback": LossyRow(
        "zero.reduce_dtype=int4 zero.error_feedback=true",
        SHARDED.format("2·2", "q4"),
        wire=Wire(None, "int4", error_feedback=True),
    ),
    "int4 reductions, 4 ranks": LossyRow(
        "resources.ranks=4 zero.reduce_dtype=int4",
        SHARDED.format("2·2", "q4"),
        COARSE,
        wire=Wire(None, "int4"),
        world=4,
    ),
    "qwZ + qgZ": LossyRow(
        "zero.gather_dtype=int8 zero.reduce_dtype=int4", SHARDED.format("2·q8", "q4"), COARSE, wire=Q4
    ),
    "qwZ + qgZ, groups": LossyRow(
        "resources.ranks=4 zero.shard_ranks=2 zero.gather_dtype=int8 zero.reduce_dtype=int4",
        "(G-1)·(2·q8 + q4)·S + 2·(N/G-1)·4·S·G/N",
        COARSE,
        wire=Q4,
        world=4,
        shard_ranks=2,
    ),
    "bf16 states + int8 both": LossyRow(
        "optimizer.state_dtype=bf16 zero.gather_dtype=int8 zero.reduce_dtype=int8",
        SHARDED.format("2·q8", "q8"),
        FINE,
        replace(ADAMW, state_dtype="bf16"),
        Q8,
    ),
    "8-bit states + qwZ + qgZ": LossyRow(
        "optimizer=adamw8bit zero.gather_dtype=int8 zero.reduce_dtype=int4",
        SHARDED.format("2·q8", "q4"),
        COARSE,
        AdamW8bitConfig(0.9, 0.95, 1e-8, 0.1),
        Q4,
    ),
    "exact, beta2 0.999": LossyRow(
        "zero=stage1 optimizer.beta2=0.999 optimizer.clip_norm=null",
        SHARDED.format("2", "4"),
        FINE,
        LONG_MEMORY,
        stage=1,
    ),
    **{f"1-bit Adam after {warmup}": one_bit_row(warmup) for warmup in (30, 75, 150)},
    "control: a tenth of the rate": LossyRow("optimizer.lr=3e-4", SHARDED.format("2·2", "4"), rate=0.1),
}


# ---- training --------------------------------------------------------------------------------------------------------

Trained = dict[str, Any]  # losses by step, validation; of a row also the bytes that rank 0 sent in the last step


def train_oracle(name: str, task: LossyTask) -> Trained:
    """See [Note: the oracle]."""
    config, clip_norm = ORACLES[name]
    torch.set_num_threads(1)
    data, model = task.data(), task.model()
    params = list(model.parameters())
    groups = [
        {"params": [one for one in params if one.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [one for one in params if one.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(config.beta1, config.beta2), eps=config.eps)
    losses = []
    for step in range(task.steps):
        for group in adamw.param_groups:
            group["lr"] = task.rate(step)
        loss = _loss(model, data.train_batch(step * GLOBAL, GLOBAL)) / TOKENS
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, clip_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        total = sum(
            float(_loss(model, data.validation_batch(index * GLOBAL, GLOBAL)))
            for index in range(task.validation_batches)
        )
    return {"losses": losses, "validation": total / (task.validation_batches * TOKENS)}


def train_row(name: str, task: LossyTask, watch: RankWatch | None = None) -> Trained:
    """Trains a row on the ranks of its world; every rank has the same losses. Needs the process group."""
    torch.set_num_threads(1)
    row, data = ROWS[name], task.data()
    _, clip_norm = ORACLES[row.oracle]
    settings = RuntimeSettings(clip_norm=clip_norm, wire=row.wire, watch=watch)
    runtime = ZeroRuntime(task.model(), row.plan, row.precision, row.optimizer, settings, torch.device("cpu"))
    micro = GLOBAL // row.world
    first = runtime.collectives.rank * micro
    losses = []
    for step in range(task.steps):
        runtime.reset_ledger()
        batch = data.train_batch(step * GLOBAL + first, micro)
        runtime.backward(_loss(runtime.model, batch) / TOKENS)
        losses.append(runtime.step(task.rate(step) * row.rate).loss)
    sent = sum(volume.bytes for volume in runtime.reset_ledger().data.values())
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for index in range(task.validation_batches):
            total += _loss(runtime.model, data.validation_batch(index * GLOBAL + first, micro))
    validation = float(runtime.collectives.sum_over_data_(total)) / (task.validation_batches * TOKENS)
    padded = [unit.layout.padded_numel for unit in runtime.units]
    runtime.close()
    return {"losses": losses, "validation": validation, "sent": sent, "formula": sent_bytes(row, padded)}


def _loss(model: nn.Module, batch: TokenBatch) -> torch.Tensor:
    """The cross entropy, summed over the tokens of the batch."""
    return token_losses(model, torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels))


def sent_bytes(row: LossyRow, padded: Sequence[int]) -> int:
    """The bytes that a rank sends in a step, by the formulas of docs/less.md, of units of `padded` elements."""
    ranks, group = row.world, row.shard_ranks or row.world
    item = {"fp32": 4, "bf16": 2}
    gathers = 2 if row.stage == 3 else 1
    total = 0.0
    for numel in padded:
        shard = numel // group
        gather = _codes(shard, row.wire.gather) or item[row.precision.param] * shard
        reduction = _codes(shard, row.wire.reduce) or item[row.precision.reduce] * shard
        across = shard * (1 - group / ranks)
        if isinstance(row.optimizer, OneBitAdamConfig):
            total += (ranks - 1) * (gathers * gather + 2 * (numel / ranks / 8 + 4))
            continue
        total += (group - 1) * (gathers * gather + reduction)
        if row.outer_sharding is not None:
            total += across * (item[row.precision.reduce] + item[row.precision.param])
        else:
            total += 2 * across * item[row.precision.reduce]
    return round(total)


def _codes(numel: int, dtype: str | None) -> float:
    """Bytes of codes and scales; 0 if nothing is quantised."""
    bits = {None: 0, "int8": 8, "int4": 4}[dtype]
    return bits and numel * bits / 8 + 4 * math.ceil(numel / 256)
