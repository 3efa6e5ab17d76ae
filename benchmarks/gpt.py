"""A GPT-2-like model in plain torch, which the benchmarks train so that they do not need transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

STD = 0.02  # standard deviation of initial weights, as in GPT-2


@dataclass(frozen=True)
class GptSize:
    """Layers, width, heads, vocabulary and sequence of the model, and the sequences of one micro-batch."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    vocab: int = 8192
    seq: int = 256
    micro: int = 2


class Block(nn.Module):
    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Maps ids [batch, seq] to logits [batch, seq, vocab]; the head is tied to the token embedding.

    Its initial values are GPT-2's. torch's defaults are unsuitable for measurements: embeddings of N(0, 1), tied to the
    head, give logits in the hundreds, so that softmax computes with denormal numbers, for which a CPU takes several
    times as long.
    """

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.seq, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init_weights)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _init_weights(self, module: nn.Module) -> None:
        """Sets initial values. Hugging Face's name, by which the rule is also found if parameters are drawn later."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()  # 1 and 0
        if isinstance(module, Block):  # the block's rule runs after those of its layers
            for residual in (module.project, module.down):
                nn.init.normal_(residual.weight, std=STD / math.sqrt(2 * self.size.layers))


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses in fp32."""
    return F.cross_entropy(model(ids).float().flatten(0, 1), labels.flatten(), reduction="sum")


def draw_tokens(size: GptSize, seed: int) -> torch.Tensor:
    """Random ids [micro, seq + 1]; the same seed always gives the same ids."""
    return torch.randint(size.vocab, (size.micro, size.seq + 1), generator=torch.Generator().manual_seed(seed))


def starting_loss(size: GptSize, tokens: int) -> tuple[float, float]:
    """The mean loss that an untrained Gpt should have on `tokens` random tokens, and the allowed deviation.

    [Note: the starting loss]
    The last LayerNorm's output h has |h|^2 = width, and the head's rows are independent of it with STD in each
    component, so a logit is N(0, s^2) with s^2 = width * STD^2. Then the sum of V exponentials is V * exp(s^2 / 2),
    a random label's logit is 0 on average, and the loss is ln V + s^2 / 2.
    The input token's own row is not independent of h, since the head is tied. Its logit is at most
    s^2 / (standard deviation of the residual stream). The MLPs alone give that stream a variance of s^4 / 2: each adds
    4 * width * E[gelu(u)^2] * STD^2 / (2 * layers) with u of N(0, s^2), and E[gelu(u)^2] >= s^2 / 4. So that logit is
    at most sqrt(2), which adds less than exp(sqrt 2) / V to the loss.
    Two quantities scatter: the mean of the labels' logits, by s / sqrt(tokens), and the sum of exponentials, by
    sqrt((exp(s^2) - 1) / V). Six standard deviations are allowed. Rounding to bf16 changes logits of size s by 2^-9 of
    their size, up and down, which is far within these.
    """
    variance = size.width * STD**2
    scatter = math.sqrt(variance / tokens + math.expm1(variance) / size.vocab)
    return math.log(size.vocab) + variance / 2, 6 * scatter + math.exp(math.sqrt(2)) / size.vocab


def starting_loss_trouble(size: GptSize, tokens: int, losses: dict[str, float]) -> str | None:
    """A message to the user that names the rows whose first losses are wrong; None if all of them are right."""
    expected, allowed = starting_loss(size, tokens)
    wrong = {name: loss for name, loss in losses.items() if not abs(loss - expected) <= allowed}  # NaN is wrong too
    if not wrong:
        return None
    found = ", ".join(f"{name} {loss:.4f}" for name, loss in wrong.items())
    return (
        f"expected a starting loss of {expected:.4f} +- {allowed:.4f} (ln V + s^2 / 2), found {found}: these rows do "
        "not start from the model's first values, so no result is written; look at their initialization"
    )
