"""The dtypes in which a run stores, computes, communicates and sums. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zero_runtime.limits import NO_KEY, Broken, ConfigError, Limits

DType = Literal["fp32", "bf16", "fp16"]
ITEMSIZE_BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_KNOWN = f"one of {', '.join(ITEMSIZE_BYTES)}"
WeightCode = Literal["int8", "int4"]
CODE_BITS: dict[WeightCode, int] = {"int8": 8, "int4": 4}
WEIGHT_BLOCK_NUMEL = 64  # elements of a quantised weight with one scale
_SCALE_BYTES = 4


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes by short name; all but `compute` are settings of the group `precision` (see limits.py).

    param: parameter shards are stored and gathered in this dtype.
    reduce: gradients are reduced over the ranks in this dtype.
    accumulate: gradients of several micro-batches are summed in this dtype (unused with one micro-batch).
    master: the optimizer updates weights of this dtype; if it equals `param`, master and parameter shards are one
        tensor unless only the masters are offloaded.
    compute: forward and backward run in this dtype; None means `param`. fp32 with a 16-bit `param` is for processors
        without 16-bit matrix instructions: parameters are stored and sent in 16 bits and converted for computing.
    weights: for inference only, matrices are stored and gathered as codes of 8 or 4 bits, in blocks of 64 elements with
        an fp32 scale each, and are decoded into `compute` while they are in use. None means not quantised.
    """

    param: DType = "fp32"
    reduce: DType = "fp32"
    accumulate: DType = "fp32"
    master: DType = "fp32"
    compute: DType | None = field(default=None, metadata=NO_KEY)
    weights: WeightCode | None = None

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "precision", dict.fromkeys(vars(self), "fp32"), ["compute", "weights"])
        for name in vars(self):
            if name != "weights":
                limits.must(name, ITEMSIZE_BYTES.__contains__, _KNOWN)
        limits.must("weights", CODE_BITS.__contains__, "int8, int4 or null", None)
        limits.conclude()
        if ITEMSIZE_BYTES[self.master] < ITEMSIZE_BYTES[self.param]:
            fix = f"precision.master={self.param}"
            limits.refuse(f"precision.master must hold precision.param={self.param}", self.master, fix)
        if self.master == "fp16":
            rule = "precision.master must keep updates that fp16 would lose (those below 6e-8)"
            limits.refuse(rule, "fp16", "precision.master=fp32")
        limits.conclude()

    @property
    def computes_as_param(self) -> bool:
        """Whether modules use the gathered parameters themselves, not a copy in another dtype."""
        return self.compute in (None, self.param)

    @property
    def stored_bytes(self) -> float:
        """Bytes of one element of a parameter shard. Quantised shards are a multiple of WEIGHT_BLOCK_NUMEL long."""
        if self.weights is None:
            return ITEMSIZE_BYTES[self.param]
        return CODE_BITS[self.weights] / 8 + _SCALE_BYTES / WEIGHT_BLOCK_NUMEL

    @property
    def stores_as_computed(self) -> bool:
        """Whether a gather writes the full parameters themselves, which need no conversion."""
        return self.computes_as_param and self.weights is None

    def check_training(self) -> None:
        """ConfigError if the weights are to be quantised: an update would be lost in the rounding to codes."""
        if self.weights is not None:
            rule = "precision.weights is for inference: updates are smaller than the distance of two codes"
            raise ConfigError([Broken(rule, f"precision.weights={self.weights}", ("precision.weights=null",))])

    def grad(self, micro_batches: int) -> DType:
        """The dtype in which a gradient is stored between the last backward and the step."""
        return self.accumulate if micro_batches > 1 else self.reduce
