"""fp16 whose loss scale must fall. A rank's gradient is 0.1 * size^2: 0.9 fits at some scale, 100,000 at none."""

import sys

import torch

import zero_runtime as deepspeed
from zero_runtime.errors import NonFiniteError

ds_config = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": int(sys.argv[1]),
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
}
size = float(sys.argv[2])
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 0.1)
engine, *_ = deepspeed.initialize(model=model, config_params=ds_config)
inputs = torch.full((1, 1), size, dtype=torch.float16)
try:
    for _ in range(40):
        engine.backward(engine(inputs).square().mean())
        engine.step()
    print(f"skipped {engine.skipped_steps} of {engine.global_steps} steps, loss scale {engine.loss_scale():.0f}")
except NonFiniteError as error:
    print(f"skipped {engine.skipped_steps} steps, then: {error}")
