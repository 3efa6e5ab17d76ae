"""`zero_runtime.deepspeed.comm`, as a name of zero_runtime.comm."""

import sys

from zero_runtime import comm

sys.modules[__name__] = comm
