"""Without the Trainer: a model without weights; every rank gets those of rank 0."""

import sys

import torch
from transformers import AutoConfig, AutoModel
from zero_runtime.integrations.transformers import HfDeepSpeedConfig

import zero_runtime as deepspeed

ds_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
dschf = HfDeepSpeedConfig(ds_config)
torch.manual_seed(deepspeed.comm.get_rank())
model = AutoModel.from_config(AutoConfig.from_pretrained(sys.argv[1])).eval()
engine, *_ = deepspeed.initialize(model=model, config_params=ds_config)
with torch.no_grad():
    total = engine(torch.arange(6)[None]).last_hidden_state.sum()
others = [torch.zeros(()) for _ in range(deepspeed.comm.get_world_size())]
deepspeed.comm.all_gather(others, total)
print(f"one model on {len(others)} ranks: {len({float(one) for one in others}) == 1}")
