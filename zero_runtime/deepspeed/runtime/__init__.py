"""DeepSpeed's `runtime`: the modules that scripts import by their path."""

from zero_runtime.deepspeed.absent import lazy_modules

__getattr__ = lazy_modules(__name__, "config", "dataloader", "engine", "lr_schedules", "utils", "zero")
