"""Settings that cannot be combined with tensor parallelism. Standard library only.

[Note: blocks and slices]
Quantised messages, codes of weights and signs have one scale for many elements, among them those of slices, which
differ between the ranks of a tensor-parallel group. A replicated parameter would be rounded by another scale on each of
them, and its copies would drift apart. (The blocks of 8-bit states begin with a parameter, so its replicas keep equal
bits.)
"""

from __future__ import annotations

from zero_runtime.limits import Limits
from zero_runtime.optim.config_base import OptimizerConfig
from zero_runtime.optim.configs import OneBitAdamConfig
from zero_runtime.precision import MixedPrecision
from zero_runtime.wire import Wire


def check_divided(degree: int, optimizer: OptimizerConfig | None, precision: MixedPrecision, wire: Wire) -> None:
    """Raise ConfigError, with every broken rule, if a setting does not know divided parameters; a no-op for degree 1.

    optimizer: None for inference. See [Note: blocks and slices].
    """
    if degree == 1:
        return
    limits, alone = Limits({}, "parallel"), "parallel.tp=1"
    if optimizer is not None and optimizer.matrix_patterns is not None:
        rule = f"optimizer.kind={optimizer.kind} updates whole matrices, of which these ranks hold slices"
        limits.refuse(rule, f"parallel.tp={degree}", "optimizer=adamw", alone)
    if isinstance(optimizer, OneBitAdamConfig):
        rule = f"optimizer.kind={optimizer.kind} gives replicated and divided parameters one scale"
        limits.refuse(rule, f"parallel.tp={degree}", "optimizer=adamw", alone)
    for key, value in (("gather_dtype", wire.gather), ("reduce_dtype", wire.reduce)):
        if value is not None:
            rule = f"zero.{key}={value} gives replicated and divided parameters one scale"
            limits.refuse(rule, f"parallel.tp={degree}", f"zero.{key}=null", alone)
    if precision.weights is not None:
        rule = f"precision.weights={precision.weights} quantises whole parameters"
        limits.refuse(rule, f"parallel.tp={degree}", "precision.weights=null", alone)
    limits.conclude()
