"""Settings that cannot be combined with tensor parallelism. Standard library only.

[Note: blocks and slices]
Signs have one scale for all elements of a unit, among them those of slices, which differ between the ranks of a
tensor-parallel group. A replicated parameter would be rounded by another scale on each of them, and its copies would
drift apart. The blocks of 8-bit states begin with a parameter, and so do those of quantised messages if layers are
divided (`Wire.aligned_numel`): a block then has elements of one parameter, and replicas keep equal bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from zero_runtime.limits import Broken, ConfigError
from zero_runtime.optim.config_base import OptimizerConfig

ALONE = "parallel.tp=1"


def check_divided(degree: int, optimizer: OptimizerConfig | None) -> None:
    """Raise ConfigError, with every broken rule, if a setting does not know divided parameters; a no-op for degree 1.

    optimizer: None for inference. See [Note: blocks and slices].
    """
    if degree == 1:
        return
    broken = list(refused_optimizer(degree, optimizer))
    if broken:
        raise ConfigError(broken)


def refused_optimizer(degree: int, optimizer: OptimizerConfig | None) -> Iterator[Broken]:
    """The rule that an optimizer breaks which gives slices and replicated parameters one scale."""
    if degree > 1 and optimizer is not None and optimizer.compresses_in(sys.maxsize):
        why = "sends signs with one scale for slices and replicated parameters"
        yield Broken(f"optimizer.kind={optimizer.kind} {why}", f"parallel.tp={degree}", ("optimizer=adamw", ALONE))
