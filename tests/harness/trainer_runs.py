"""Runs of the Trainer on ranks, and the same training in one process of plain PyTorch, on the batches that they saw."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.plain_optimizers import AdamW

ROWS, LENGTH, VOCAB = 20, 12, 64  # with 2 ranks and micro-batches of 2: epochs of 5 micro-batches
STEPS = 6
LR, DECAY = 1e-2, 0.1
CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def tiny_llama(hidden: int = 16) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 32, "max_position_embeddings": 32}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers))


def training_rows() -> list[dict[str, Any]]:
    """Rows of token ids, with the first labels masked so that rows have unequal numbers of targets."""
    return _rows(ROWS, 1, 0)


def evaluation_rows() -> list[dict[str, Any]]:
    """The same, numbered from ROWS, so that a collator's record tells them apart."""
    return _rows(4, 2, ROWS)


def _rows(count: int, seed: int, first: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for row in range(count):
        ids = torch.randint(1, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: row % 5] = -100
        made.append({"input_ids": ids, "labels": labels, "row": first + row})
    return made


@dataclass
class Seen:
    """A collator that records the rows of each batch of training."""

    batches: list[list[int]] = field(default_factory=list)

    def __call__(self, chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        numbers = [row["row"] for row in chosen]
        self.batches += [numbers] if max(numbers) < ROWS else []
        return {key: torch.stack([row[key] for row in chosen]) for key in ("input_ids", "labels")}


@dataclass(frozen=True)
class TrainerCase:
    """One way to train. `zero`: the section zero_optimization; None trains with transformers alone."""

    zero: dict[str, Any] | None
    accumulation: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def as_launched() -> None:
    """Set the variables that torchrun and `zlab launch` set, for a forked rank whose group exists already."""
    rank, world = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})


def make_trainer(case: TrainerCase, folder: str, model: Any = None, **more: Any) -> Any:
    """A Trainer of `case`, whose checkpoints are in `folder`."""
    # Where DeepSpeed is installed, accelerate imports it, and so MLflow, to ask whether a model is its engine: three
    # seconds of each rank. The examples are run with it in sight.
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # it is not found
    from zero_runtime.integrations.transformers import Trainer, TrainingArguments

    given = {} if case.zero is None else {"deepspeed": {**CONFIG, "zero_optimization": case.zero, **case.config}}
    batches = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": STEPS}
    rates = {"learning_rate": LR, "weight_decay": DECAY, "max_grad_norm": 0}
    times = {"logging_steps": 1, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    settings: dict[str, Any] = {"output_dir": folder, "gradient_accumulation_steps": case.accumulation}
    settings |= batches | rates | times | {"report_to": [], "disable_tqdm": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(**{**settings, **case.arguments, **given})
    collator = Seen()
    data = {"train_dataset": training_rows(), "eval_dataset": evaluation_rows(), "data_collator": collator}
    arguments.remove_unused_columns = False
    return Trainer(model=model or tiny_llama(), args=arguments, **{**data, **more})


def logged(trainer: Any, name: str) -> list[float]:
    """The values of a logged number, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights_in(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder that save_model wrote."""
    from safetensors.torch import load_file

    return load_file(str(Path(folder, "model.safetensors")))


@dataclass
class PlainTraining:
    """What plain PyTorch gives: the loss of each step, evaluations before it and every 3 steps, the final weights."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def plain_training(
    seen: list[list[list[int]]], accumulation: int, *, by_rank: bool, steps: int = STEPS
) -> PlainTraining:
    """Train on the batches that each rank saw, with the sums in the order of the runtime.

    by_rank: a rank's micro-batches are added first, then the ranks, as where gradients are reduced once a step; else
    the ranks of each micro-batch first. With two ranks both orders are complete: additions commute.
    """
    from transformers import get_scheduler

    model, data = tiny_llama(), training_rows()
    model.train()
    decayed = [param for name, param in model.named_parameters() if "norm" not in name]
    rest = [param for name, param in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=LR)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    found = PlainTraining(evaluations=[_evaluated(model)])
    per_epoch = ROWS // (2 * len(seen))
    for step in range(steps):
        micros = _micros(step, per_epoch, accumulation)
        chosen = [[[data[row] for row in rank[micro]] for micro in micros] for rank in seen]
        total = sum((row["labels"][1:] != -100).sum() for rank in chosen for micro in rank for row in micro)
        parts = [[_gradients(model, micro, total) for micro in rank] for rank in chosen]
        order = parts if by_rank else [list(ranks) for ranks in zip(*parts, strict=True)]
        for param, gradients in zip(model.parameters(), zip(*map(_summed, order), strict=True), strict=True):
            param.grad = _chain(list(gradients))
        found.losses.append(float(_chain([_chain([loss for loss, _ in rank]) for rank in parts])))
        optimizer.step()
        schedule.step()
        if (step + 1) % 3 == 0:
            found.evaluations.append(_evaluated(model))
    found.weights = {name: param.detach() for name, param in model.named_parameters()}
    return found


def _micros(step: int, per_epoch: int, accumulation: int) -> range:
    """The numbers of the micro-batches of a step; the last step of an epoch may have fewer."""
    per_epoch_steps = -(-per_epoch // accumulation)
    epoch, place = divmod(step, per_epoch_steps)
    start = epoch * per_epoch
    return range(start + place * accumulation, start + min((place + 1) * accumulation, per_epoch))


def _gradients(model: Any, chosen: list[dict[str, Any]], total: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    batch = {key: torch.stack([row[key] for row in chosen]) for key in ("input_ids", "labels")}
    loss = model(**batch, num_items_in_batch=total).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def _summed(parts: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> list[torch.Tensor]:
    return [_chain(list(gradients)) for gradients in zip(*(own for _, own in parts), strict=True)]


def _chain(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@torch.no_grad()
def _evaluated(model: Any) -> float:
    """The Trainer's eval_loss: each rank's batch counts by its rows, its loss by the targets of all ranks."""
    data = evaluation_rows()
    total = sum((row["labels"][1:] != -100).sum() for row in data)
    model.eval()
    losses = []
    for chosen in (data[:2], data[2:]):
        batch = {key: torch.stack([row[key] for row in chosen]) for key in ("input_ids", "labels")}
        losses += [float(model(**batch, num_items_in_batch=total).loss * 2)] * 2
    model.train()
    return float(np.array(losses, dtype=np.float32).mean())
