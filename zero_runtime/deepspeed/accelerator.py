"""`zero_runtime.deepspeed.accelerator`, as a name of zero_runtime.accelerator."""

import sys

from zero_runtime import accelerator

sys.modules[__name__] = accelerator
