"""DeepSpeed's `ops`: optimizers by its names. The runtime has kernels of its own (kernels/)."""

from zero_runtime.deepspeed.absent import lazy_modules

__getattr__ = lazy_modules(__name__, "adagrad", "adam", "lamb", "lion")
