"""DeepSpeed's `checkpoint`: the helper that accelerate imports."""

from zero_runtime.deepspeed.absent import lazy_modules

__getattr__ = lazy_modules(__name__, "utils")
