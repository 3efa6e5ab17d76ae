"""The operations and bytes of a model's segments, counted while a step is traced. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zero_runtime.predict.timing.segments import SegmentTable


class Work(NamedTuple):
    """What a segment computes.

    product_flops, attention_flops: operations of matrix products, and of attention kernels, where a multiplication and
    an addition are two. A causal kernel counts half of the scores. Attention that is composed of matrix products counts
    among those, in full. product_bytes: read and written by both. other_bytes: read and written by all other
    operations but views. kernels: operations of both kinds, each of which starts at least one kernel.
    """

    product_flops: int = 0
    attention_flops: int = 0
    product_bytes: int = 0
    other_bytes: int = 0
    kernels: int = 0


@dataclass(frozen=True)
class LinearWork:
    """The work of all micro-batches from `low` to `high`, whose steps are the same operations.

    Each operation is linear in the micro-batch: one of the dimensions of its tensors grows with it. So two traces
    determine the work of those between.
    """

    low: int
    high: int
    least: SegmentTable[Work]
    most: SegmentTable[Work]

    def at(self, micro: int) -> SegmentTable[Work]:
        """The work of one micro-batch from low to high."""
        if not self.low <= micro <= self.high:
            raise ValueError(f"micro-batch {micro}: expected {self.low} to {self.high}")
        more, span = micro - self.low, max(self.high - self.low, 1)

        def between(small: Work, large: Work) -> Work:
            return Work(*(one + (other - one) * more // span for one, other in zip(small, large, strict=True)))

        table = self.least.combined(self.most, between)
        assert table is not None, "the same step has the same segments at every micro-batch"
        return table

    def plain(self) -> dict[str, Any]:
        """As plain data for JSON; `of_plain` is the inverse."""
        return {"low": self.low, "high": self.high, "least": self.least.plain(), "most": self.most.plain()}

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> LinearWork:
        least, most = (SegmentTable.of_plain(data[name]).map(Work._make) for name in ("least", "most"))
        return cls(data["low"], data["high"], least, most)
