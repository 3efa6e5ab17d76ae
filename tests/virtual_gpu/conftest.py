from harness.virtual_gpu.process import virtual_gpu as virtual_gpu
