"""Says that DeepSpeed's engine is taken, where a script imports zero_runtime and leaves the rest to accelerate.

[Note: the Trainer's own engine]
`import zero_runtime as deepspeed` changes what a script calls, not what transformers' Trainer and accelerate import:
with `deepspeed=` in its arguments they take the package deepspeed, if it is installed. Just before, accelerate sets a
variable and looks for the package. The finder hears of it there, and finds nothing itself.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

TOLD = "ACCELERATE_USE_DEEPSPEED"
_MESSAGE = """accelerate takes the engine of the package deepspeed: zero_runtime is imported, but does not train. \
For the Trainer of transformers, import these two from here instead:
    from zero_runtime.integrations.transformers import Trainer
    from zero_runtime.integrations.transformers import TrainingArguments
A loop of your own calls zero_runtime.initialize, not Accelerator(deepspeed_plugin=...); see docs/transformers.md"""


class OtherEngineFinder(MetaPathFinder):
    """Warns once when accelerate, told to use DeepSpeed, looks for that package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Always None: the module is found by others."""
        if fullname == "deepspeed" and os.environ.get(TOLD, "").lower() == "true":
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            warnings.warn(_MESSAGE, stacklevel=2)
