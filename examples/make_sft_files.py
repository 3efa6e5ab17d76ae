"""Makes small files for `experiment=sft_qwen`: a model folder of Qwen2's architecture and train.json with 64 pairs.

    python examples/make_sft_files.py FOLDER
    python run.py experiment=sft_qwen model.path=FOLDER/model data.path=FOLDER/train.json resources.ranks=2 batch.seq=64

The model has random weights, 2 layers and a tokenizer of its own with Qwen's chat template in short, so it trains in
seconds on a CPU. With the folder of the real model and your pairs the command is the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported: nothing is downloaded

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END, OPENS, CLOSES = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 384
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pairs() -> list[dict[str, str]]:
    """64 sums, written out."""
    sums = [(first, second) for first in range(8) for second in range(8)]
    return [{"prompt": f"What is {a} plus {b}?", "response": f"{a} plus {b} is {a + b}."} for a, b in sums]


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on the texts, with Qwen's special tokens and chat template."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = [END, OPENS, CLOSES]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token=END, pad_token=END, extra_special_tokens=special[1:]
    )
    made.chat_template = TEMPLATE
    return made


def main(folder: Path) -> None:
    """Writes both; existing files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.json").write_text(json.dumps(pairs(), indent=1) + "\n", encoding="utf-8")
    tokenizer = tokenizer_of([text for pair in pairs() for text in pair.values()])
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    print(f"{folder}: model/ and train.json with {len(pairs())} pairs")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
