"""DeepSpeed's path of names that zero_runtime.zero has."""

import sys

from zero_runtime.deepspeed import zero

sys.modules[__name__] = zero
