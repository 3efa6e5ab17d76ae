"""The dtypes in which a run stores, computes, communicates and sums. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from zero_runtime.errors import PlanError

ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class MixedPrecision:
    """Five dtypes by short name.

    param: parameter shards are stored and gathered in this dtype.
    reduce: gradients are reduced over the ranks in this dtype.
    accumulate: gradients of several micro-batches are summed in this dtype (unused with one micro-batch).
    master: the optimizer updates weights of this dtype; if it equals `param`, master and parameter shards are one
        tensor unless only the masters are offloaded.
    compute: forward and backward run in this dtype; None means `param`. fp32 with a 16-bit `param` is for processors
        without 16-bit matrix instructions: parameters are stored and sent in 16 bits and converted for computing.
    """

    param: str = "fp32"
    reduce: str = "fp32"
    accumulate: str = "fp32"
    master: str = "fp32"
    compute: str | None = None

    def __post_init__(self) -> None:
        for field, name in vars(self).items():
            if name not in ITEMSIZE_BYTES and not (field == "compute" and name is None):
                raise PlanError(f"precision.{field}: expected one of {sorted(ITEMSIZE_BYTES)}, found {name!r}")
        if ITEMSIZE_BYTES[self.master] < ITEMSIZE_BYTES[self.param]:
            raise PlanError(
                f"precision.master={self.master} is narrower than precision.param={self.param}: every update would "
                f"be rounded away; set precision.master={self.param}"
            )
        if self.master == "fp16":
            raise PlanError(
                "precision.master=fp16: updates below 6e-8 vanish in it; set precision.master=fp32 (or bf16 throughout)"
            )

    @property
    def computes_as_param(self) -> bool:
        """Whether modules use the gathered parameters themselves, not a copy in another dtype."""
        return self.compute in (None, self.param)

    def grad(self, micro_batches: int) -> str:
        """The dtype in which a gradient is stored between the last backward and the step."""
        return self.accumulate if micro_batches > 1 else self.reduce
