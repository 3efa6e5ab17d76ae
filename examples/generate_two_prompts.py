"""Sequence-to-sequence generation with parameters sharded over the ranks: each rank answers another prompt.

torchrun --nproc-per-node 2 examples/generate_two_prompts.py
torchrun --nproc-per-node 2 examples/generate_two_prompts.py --model FOLDER_OF_A_T5

This is the T0 script of the Transformers documentation on DeepSpeed, with its import changed. Without --model it builds
a small T5 with random weights, one token for each byte, so its answers mean nothing; they are those of plain
Transformers in one process, which --plain prints.
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

import zero_runtime as deepspeed

PROMPTS = (
    "Is this review positive or negative? Review: this is the best cast iron skillet you will ever buy",
    "Is this review positive or negative? Review: this is the worst restaurant ever",
)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
}
FIRST_BYTE = 3  # the ids before it are T5's special tokens: padding, end and unknown
NEW_TOKENS = (24, 9)  # of each prompt: the ranks need not generate equally many


def small_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(5)
    config = T5Config(vocab_size=FIRST_BYTE + 256, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4)
    config.decoder_start_token_id = config.pad_token_id
    config.tie_word_embeddings = False
    model = T5ForConditionalGeneration(config)
    for param in model.parameters():  # initial weights are so small that every answer would repeat the first token
        param.data.mul_(2)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder with a T5 and its tokenizer")
    parser.add_argument("--plain", action="store_true", help="plain Transformers in one process, for comparison")
    asked = parser.parse_args()
    model = small_t5() if asked.model is None else AutoModelForSeq2SeqLM.from_pretrained(asked.model)
    tokenizer = None if asked.model is None else AutoTokenizer.from_pretrained(asked.model)
    if asked.plain:
        for rank in range(len(PROMPTS)):
            answer(rank, model.eval(), tokenizer, torch.device("cpu"), synced=False)
        return
    deepspeed.init_distributed()
    model.requires_grad_(False)  # frozen parameters: the engine has weights, no masters, gradients and states
    engine = deepspeed.initialize(model=model, config_params=CONFIG)[0]
    engine.module.eval()  # inference
    answer(engine.global_rank, engine.module, tokenizer, engine.device, synced=True)
    torch.distributed.barrier()  # so that no rank leaves while another still prints
    engine.destroy()
    torch.distributed.destroy_process_group()


def answer(rank, model, tokenizer, device, *, synced) -> None:
    """Print the greedy answer to the prompt of this rank."""
    prompt = PROMPTS[rank % len(PROMPTS)]
    ids = [FIRST_BYTE + byte for byte in prompt.encode()] if tokenizer is None else tokenizer.encode(prompt)
    inputs = torch.tensor([ids], device=device)
    with torch.no_grad():
        outputs = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NEW_TOKENS[rank % len(PROMPTS)],
            do_sample=False,
            synced_gpus=synced,  # as the documentation asks for; here it may be left out
        )
    tokens = outputs[0].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else f"tokens {tokens}"
    print(f"rank{rank}:\n   in={prompt}\n  out={text}", flush=True)


if __name__ == "__main__":
    main()
