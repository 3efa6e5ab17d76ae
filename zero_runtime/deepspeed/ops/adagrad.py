"""DeepSpeed's DeepSpeedCPUAdagrad: torch.optim.Adagrad, whose constants `initialize` reads."""

from torch.optim import Adagrad as DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
