"""`zero_runtime.utils`, as a name of zero_runtime.deepspeed.utils."""

import sys

from zero_runtime.deepspeed import utils

sys.modules[__name__] = utils
