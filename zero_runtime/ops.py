"""`zero_runtime.ops`, as a name of zero_runtime.deepspeed.ops."""

import sys

from zero_runtime.deepspeed import ops

sys.modules[__name__] = ops
