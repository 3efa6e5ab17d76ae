"""A training loop without a Trainer."""

import sys

import torch
from harness.seed_loop import TEXTS, Words, tiny_llama

import zero_runtime as deepspeed

ds_config, steps = sys.argv[1], int(sys.argv[2])
tokenizer, model = Words(), tiny_llama(torch_dtype=torch.float16)
dataloader = [{"text": list(TEXTS)}] * steps

deepspeed.init_distributed()
engine, optimizer, loader, scheduler = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=ds_config, dist_init_required=True
)
for step, batch in enumerate(dataloader):
    inputs = tokenizer(batch["text"], return_tensors="pt", padding=True).to(engine.device)
    outputs = engine(**inputs, labels=inputs["input_ids"])
    loss = outputs.loss
    engine.backward(loss)
    engine.step()
    if torch.distributed.get_rank() == 0:
        mem = torch.cuda.memory_allocated() / (1024**3)
        print(f"Step: {step}, Loss: {loss.item():.4f}, GPU Mem: {mem:.2f}GB")

if engine.global_rank == 0:
    print(f"Max allocated: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
