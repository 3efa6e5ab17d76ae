"""Holds what `fit --as ENGINE` says that torch's allocator reserves against published reserved bytes.

`python benchmarks/published_reserved.py` prints the table of docs/published.md. The rows of `published/` whose number
is the peak of reserved memory are predicted by their engine's rules with activations counted on fake tensors, and the
tensors of three steps are given to a model of the allocator, with its defaults. Nothing is fitted. What libraries take
is not in a published number, and is not added here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.published_borders import case_of  # noqa: E402
from benchmarks.published_cases import GIB, summary, table  # noqa: E402
from benchmarks.published_peak import Case, case_peak, config_of, trace_at  # noqa: E402
from orchestrator.workloads.models import build_meta_model  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.predict.memory.peer_reserved import peer_reserved  # noqa: E402
from zero_runtime.unit_planner import UnitRules, plan_units  # noqa: E402

TABLES = ("long_sequences.csv", "prime_rl.csv")  # those whose number is reserved, and that tell the batch
INT64 = 8  # bytes of the id of a token, and of its label
HEADER = ("case", "engine", "published, reserved", "predicted, reserved", "error", "predicted, allocated", "error")


class Row(NamedTuple):
    """GiB of a rank."""

    case: Case
    published: float
    reserved: float
    allocated: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of reserved and of allocated bytes, each relative to the published reserved ones."""
        return self.reserved / self.published - 1, self.allocated / self.published - 1


@functools.cache
def unit_numels(model: str) -> tuple[tuple[int, ...], ...]:
    """Elements of each parameter of the units that a trace of the model has, in their order."""
    specs = plan_units(build_meta_model(*config_of(model)), UnitRules(MixedPrecision("bf16")))
    return tuple(tuple(param.numel() for _, param in spec.params) for spec in specs)


def predicted(line: dict[str, str]) -> Row:
    """One row of a table."""
    case = case_of(line)
    peak, inputs = case_peak(case), case.micro * case.seq * 2 * INT64 * case.accumulation
    found = peer_reserved(
        trace_at(case.model, case.seq, case.micro, case.recompute, case.kernels),
        peak.memory,
        unit_numels(case.model),
        micro_batches=case.accumulation,
        other=(inputs // 2, inputs // 2),
    )
    return Row(case, float(line["memory_gib"]), found.reserved / GIB, (peak.allocated + inputs) / GIB)


def report() -> Iterator[str]:
    """Lines of Markdown: all rows, and their errors by engine."""
    rows = [predicted(line) for name in TABLES for line in table(name)]
    yield f"| {' | '.join(HEADER)} |"
    yield "|---" * len(HEADER) + "|"
    for row in rows:
        reserved, allocated = row.errors
        sizes = (f"{row.published:.1f} GiB", f"{row.reserved:.1f} GiB", f"{reserved:+.1%}")
        yield f"| {row.case.case} | {row.case.engine.partition('_')[0]} | {' | '.join(sizes)} | " + (
            f"{row.allocated:.1f} GiB | {allocated:+.1%} |"
        )
    yield ""
    for engine in dict.fromkeys(row.case.engine for row in rows):
        own = [row.errors for row in rows if row.case.engine == engine]
        reserved, allocated = (summary(errors) for errors in zip(*own, strict=True))
        yield f"{engine}, {len(own)} rows: reserved {reserved}; allocated {allocated}"


if __name__ == "__main__":
    print("\n".join(report()))
