"""The versions to report with a problem."""

import torch
import transformers

import zero_runtime as deepspeed

print(f"torch: {torch.__version__}")
print(f"transformers: {transformers.__version__}")
print(f"deepspeed: {deepspeed.__version__}")
