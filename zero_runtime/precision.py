"""The dtypes of one run: what is computed with, sent, summed and kept. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from zero_runtime.errors import PlanError

ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class MixedPrecision:
    """Five dtypes by short name.

    param: parameter shards are kept and gathered in it.
    reduce: gradients cross the ranks in it.
    accumulate: gradients of several micro-batches are summed in it (unused with one micro-batch).
    master: the optimizer updates weights of this dtype; where it equals `param` they are one tensor.
    compute: forward and backward run in it; None means `param`. fp32 beside a 16-bit `param` is for processors
        without 16-bit matrix instructions: what is kept and sent stays 16 bits, what is computed is not.
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
        """Whether the gathered parameters are what the modules see, or a copy of them in another dtype is."""
        return self.compute in (None, self.param)

    def grad(self, micro_batches: int) -> str:
        """The dtype in which a gradient rests between the last backward and the step."""
        return self.accumulate if micro_batches > 1 else self.reduce
