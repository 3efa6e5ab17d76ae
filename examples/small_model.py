"""A model and a text that need no download: a small Llama with random weights, and the bytes of this repository's
license."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
LENGTH = 64  # tokens of a row; a token is a byte


def small_llama() -> LlamaForCausalLM:
    """The same weights in every process."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": LENGTH}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers, bos_token_id=None, eos_token_id=None))


def rows_of(text: Path = TEXT) -> list[dict[str, torch.Tensor]]:
    """Rows of token ids, which are their own labels: the model shifts them."""
    ids = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in ids.split(LENGTH) if len(row) == LENGTH]
