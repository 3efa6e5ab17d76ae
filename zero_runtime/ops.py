"""`zero_runtime.ops`, as a name of zero_runtime.deepspeed.ops."""

import sys
from importlib import import_module

from zero_runtime.deepspeed import ops

for _name in ops.MODULES:  # each is one module under both names: `isinstance` asks for its classes
    sys.modules[f"{__name__}.{_name}"] = import_module(f"{ops.__name__}.{_name}")
sys.modules[__name__] = ops
