"""Without the Trainer: a model with weights, which initialize shards."""

import sys

import torch
from transformers import AutoModel
from zero_runtime.integrations.transformers import HfDeepSpeedConfig

import zero_runtime as deepspeed

ds_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
dschf = HfDeepSpeedConfig(ds_config)
model = AutoModel.from_pretrained(sys.argv[1])
ids = torch.arange(6)[None]
with torch.no_grad():
    plain = model(ids).last_hidden_state
engine, *_ = deepspeed.initialize(model=model, config_params=ds_config)
with torch.no_grad():
    same = torch.equal(engine(ids).last_hidden_state, plain)
print(f"stage {dschf.get_value('zero_optimization.stage')}, the numbers of the model in one process: {same}")
