"""Which collectives send block-quantised values. Standard library only.

[Note: quantised collectives]
Values are sent as codes of 8 or 4 bits with one fp32 scale for each 256 elements (kernels/wire_format.py), codes and
scales in one message. A gather sends each rank's shard, and every rank, the owner included, computes with the values
that were read back from the codes: all ranks have the same parameters, and the masters stay exact. A reduction is an
all-to-all: each rank quantises its gradient of every other rank's shard, and the owner of a shard adds what it receives
in fp32, in the order of the ranks, with its own gradient unquantised. Each gradient is so rounded once, whatever the
number of ranks. With error feedback a rank keeps what the rounding took from each gradient and adds it to the next one
(arXiv 1901.09847); that is one fp32 number for every element of the model on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zero_runtime.errors import PlanError
from zero_runtime.limits import Limits, keyed
from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.precision import MixedPrecision

BITS = {"int8": 8, "int4": 4}
BLOCK_NUMEL = 256  # elements of a scale
ERROR_BYTES = 4  # of an element's error feedback
_EXACT_WORDS = "zero.gather_dtype=null zero.reduce_dtype=null zero.error_feedback=false"


@dataclass(frozen=True)
class Wire:
    """The dtypes of quantised collectives; None sends the dtype of `precision`. See [Note: quantised collectives]."""

    gather: Literal["int8"] | None = field(default=None, metadata=keyed("gather_dtype"))
    reduce: Literal["int8", "int4"] | None = field(default=None, metadata=keyed("reduce_dtype"))
    error_feedback: bool = False

    def __post_init__(self) -> None:
        limits = Limits.of(self, "zero")
        limits.must("gather_dtype", ("int8",).__contains__, "int8, or null for the dtype of the parameters", None)
        limits.must("reduce_dtype", BITS.__contains__, "int8 or int4, or null for precision.reduce", None)
        if self.error_feedback and self.reduce is None:
            fixes = ("zero.error_feedback=false", "zero.reduce_dtype=int8")
            limits.refuse("zero.error_feedback needs zero.reduce_dtype=int8 or int4", "null", *fixes)
        limits.conclude()

    def check_plan(self, plan: ZeroPlan) -> None:
        """Raise ConfigError if nothing is sharded: then nothing is gathered, and every rank needs the whole sum, which
        would be quantised twice. Also with outer sharding, whose messages across groups are exact."""
        limits = Limits({}, "zero")
        if self != EXACT and plan.optimizer is Partition.REPLICATED:
            key = "gather_dtype" if self.gather else "reduce_dtype"
            rule = f"zero.{key} needs sharded optimizer states: without them every rank sums the full gradients"
            limits.refuse(rule, "replicated ones", _EXACT_WORDS)
        elif self != EXACT and plan.outer_sharding is not None:
            rule = "zero.outer_sharding sends exact messages: zero.gather_dtype and zero.reduce_dtype must be null"
            limits.refuse(rule, f"{self.gather or 'null'} and {self.reduce or 'null'}", _EXACT_WORDS)
        limits.conclude()

    def check_inference(self) -> None:
        """Raise ConfigError if anything is quantised: a gather would change the weights that are evaluated."""
        limits = Limits({}, "zero")
        if self != EXACT:
            key, found = ("gather_dtype", self.gather) if self.gather else ("reduce_dtype", self.reduce)
            rule = f"zero.{key} is for training: inference sends exact weights"
            limits.refuse(rule, f"zero.{key}={found}", _EXACT_WORDS)
        limits.conclude()

    def check_precision(self, plan: ZeroPlan, precision: MixedPrecision) -> None:
        """Raise ConfigError if a gather would overwrite the only exact copy of the parameters."""
        limits = Limits({}, "zero")
        if self.gather and plan.keeps_full_params and precision.master == precision.param:
            rule = "zero.gather_dtype needs sharded parameters, or masters apart from those that it overwrites"
            found = f"precision.master={precision.master}, the parameters themselves"
            limits.refuse(rule, found, "zero.gather_dtype=null", "precision=bf16")
        limits.conclude()

    def gathers(self, plan: ZeroPlan, *, trainable: bool) -> bool:
        """Whether the gathers of a unit are quantised. Frozen parameters that every rank keeps are not: a gather would
        overwrite their only copy."""
        return self.gather is not None and (trainable or not plan.keeps_full_params)

    def aligned_numel(self, tensor_degree: int) -> int:
        """Elements of the blocks at which parameters and shards must begin: with tensor parallelism those of a scale.

        A replicated parameter then shares no scale with slices, which differ between the ranks of a group: its copies
        are rounded alike. (For slices themselves it would not matter.)
        """
        return BLOCK_NUMEL if tensor_degree > 1 and self != EXACT else 1

    def error_bytes(self, plan: ZeroPlan) -> int:
        """Bytes of error feedback for each element of the model on every rank."""
        return ERROR_BYTES if self.error_feedback and plan.optimizer is Partition.SHARDED else 0


EXACT = Wire()


def check_scaled(wire: Wire, *, scales_loss: bool) -> None:
    """Raise PlanError for error feedback with a loss scale: a change of the scale would leave errors of another one."""
    if wire.error_feedback and scales_loss:
        raise PlanError(
            "zero.error_feedback: expected a run without a loss scale, found one with it (precision=fp16): the errors "
            "that are kept would have another scale than the next gradients; use precision=bf16, or "
            "zero.error_feedback=false"
        )
