"""The dtypes in which a run stores, computes, communicates and sums. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zero_runtime.limits import NO_KEY, Limits

DType = Literal["fp32", "bf16", "fp16"]
ITEMSIZE_BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_KNOWN = f"one of {', '.join(ITEMSIZE_BYTES)}"
WeightCode = Literal["int8", "int4"]
CODE_BITS: dict[WeightCode, int] = {"int8": 8, "int4": 4}
CODED_NUMEL, SCALE_BYTES = 64, 2  # elements of a code block, which share one bf16 scale


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
    weights: frozen matrices of the repeated blocks are stored and gathered as codes of 8 or 4 bits, and are read back
        into `compute` while they are in use; see [Note: weight codes] in kernels/weight_codes.py. None: no codes.
    """

    param: DType = "fp32"
    reduce: DType = "fp32"
    accumulate: DType = "fp32"
    master: DType = "fp32"
    compute: DType | None = field(default=None, metadata=NO_KEY)
    weights: WeightCode | None = None

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "precision", dict.fromkeys(vars(self), "fp32"), ["compute", "weights"])
        for name in vars(self).keys() - {"weights"}:
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
        """Bytes of one element of a parameter shard; with its part of a scale if it is a code."""
        if self.weights is not None:
            return CODE_BITS[self.weights] / 8 + SCALE_BYTES / CODED_NUMEL
        return ITEMSIZE_BYTES[self.param]

    def grad(self, micro_batches: int) -> DType:
        """The dtype in which a gradient is stored between the last backward and the step."""
        return self.accumulate if micro_batches > 1 else self.reduce
