"""DeepSpeed's `runtime.engine`: the class of the engine that initialize returns."""

from zero_runtime.deepspeed.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
