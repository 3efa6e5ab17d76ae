"""A small transformer in plain torch for the runtime's tests, with options for tied, frozen and recomputed blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class TinySpec:
    """Sizes are odd on purpose: every unit needs padding and no parameter ends at a shard's border."""

    vocab: int = 37
    width: int = 20
    blocks: int = 3
    tied: bool = False
    frozen: bool = False  # one full block, through which gradients must pass, and a part of the next
    recomputed: bool = False
    seed: int = 0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.cumsum(self.mix(self.norm(x)), dim=1) / x.shape[1]
        return x + self.down(F.gelu(self.up(x + mixed)))


class TinyTransformer(nn.Module):
    """Token logits [batch, tokens, vocab] from token ids [batch, tokens]; causal by a running mean."""

    def __init__(self, spec: TinySpec) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self.embed = nn.Embedding(spec.vocab, spec.width)
            self.blocks = nn.ModuleList(Block(spec.width) for _ in range(spec.blocks))
            self.norm = nn.LayerNorm(spec.width)
            self.head = nn.Linear(spec.width, spec.vocab, bias=False)
        if spec.tied:
            self.head.weight = self.embed.weight
        if spec.frozen:
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.requires_grad_(False)
        self.recomputed = spec.recomputed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(self.norm(x))


IGNORED = -100


def token_loss_sum(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses in fp32 over the labels that are not masked; 0 with a graph when all are."""
    logits = model(ids)
    return F.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def batch(spec: TinySpec, step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [3, 11]: counting modulo the vocabulary with a tenth of noise, so there is something to learn.

    Masks differ by rank, and in step 1 the first micro-batch of every rank but 0 is fully masked.
    """
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    ids = (torch.randint(spec.vocab, (3, 1), generator=generator) + torch.arange(12)) % spec.vocab
    noise = torch.rand(ids.shape, generator=generator) < 0.1
    ids = torch.where(noise, torch.randint(spec.vocab, ids.shape, generator=generator), ids)
    labels = ids[:, 1:].clone()
    labels[:, : 2 + 3 * rank] = IGNORED
    if step == 1 and micro == 0 and rank > 0:
        labels[:] = IGNORED
    return ids[:, :-1], labels
