"""Whether a configuration is valid, tried with a model of one layer."""

import sys

import torch

import zero_runtime as deepspeed

engine, _, _, _ = deepspeed.initialize(model=torch.nn.Linear(10, 10), config=sys.argv[1])
print(f"micro-batches of {engine.train_micro_batch_size_per_gpu()}, fp16 {engine.fp16_enabled()}")
