"""Sequence-to-sequence generation at stage 3 with offload, each rank with a prompt of its own."""

import os
import sys

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
from zero_runtime.integrations.transformers import HfDeepSpeedConfig

import zero_runtime as deepspeed

model_name, rounds = sys.argv[1:]
local_rank = int(os.getenv("LOCAL_RANK", "0"))
world_size = int(os.getenv("WORLD_SIZE", "1"))
deepspeed.get_accelerator().set_device(local_rank)  # torch.cuda.set_device needs a GPU
deepspeed.init_distributed()

width = AutoConfig.from_pretrained(model_name).d_model
prefetch = 0.9 * width * width
ds_config = {
    "fp16": {"enabled": False},
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(prefetch) if rounds == "rounded" else prefetch,
        "stage3_param_persistence_threshold": 10 * width,
    },
    "steps_per_print": 2000,
    "train_batch_size": world_size,
    "train_micro_batch_size_per_gpu": 1,
    "wall_clock_breakdown": False,
}
dschf = HfDeepSpeedConfig(ds_config)
model = AutoModelForSeq2SeqLM.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)
rank = torch.distributed.get_rank()
text_in = ("Is this review positive or negative? Review: a pan for life", "Is this review positive or negative?")[rank]
inputs = tokenizer.encode(text_in, return_tensors="pt")
plain = model.eval().generate(inputs, max_new_tokens=6 + 6 * rank)

ds_engine = deepspeed.initialize(model=model, config_params=ds_config)[0]
ds_engine.module.eval()
with torch.no_grad():
    outputs = ds_engine.module.generate(inputs.to(ds_engine.device), synced_gpus=True, max_new_tokens=6 + 6 * rank)
print(f"rank{rank}: in={text_in}")
print(f"rank{rank}: out={tokenizer.decode(outputs[0], skip_special_tokens=True)!r}")
print(f"rank{rank}: tokens of the model in one process: {outputs.tolist() == plain.tolist()}")
