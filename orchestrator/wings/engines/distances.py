"""How far the losses and norms of a row are from those of plain PyTorch, step by step. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.report.entry import Entry
from orchestrator.wings.engines.equality import bounds, relative, verdicts

WHAT = ("loss", "norm")


class Distance(NamedTuple):
    """Relative distances of the steps from the first on, None where a step has no number; and their bounds, up to
    which the work counts as equal."""

    far: tuple[float | None, ...]
    bounds: tuple[float, ...]

    @property
    def shares(self) -> list[float | None]:
        """The distances as shares of their bounds; None where a distance is not judged."""
        pairs = zip(self.far, self.bounds, strict=True)
        return [None if far is None or math.isinf(bound) else far / bound if bound else far for far, bound in pairs]

    @property
    def nearest_to_bound(self) -> int | None:
        """The step, from 0, whose distance is the largest share of its bound; None without one."""
        known = [(share, step) for step, share in enumerate(self.shares) if share is not None]
        return max(known)[1] if known else None


def distances_of(entries: Sequence[Entry]) -> dict[str, dict[str, Distance]]:
    """Of each row that is compared with another: the distances of its `loss` and its `norm`, by its label."""
    works = {entry.label: (entry.result or {}).get("work") for entry in entries}
    configs = {entry.label: entry.config for entry in entries}
    found = {}
    for label, verdict in verdicts(entries).items():
        own, basis = works[label], works.get(verdict.basis)
        if own and basis:
            found[label] = {what: _distance(own, basis, configs[label], what) for what in WHAT}
    return found


def _distance(own: Mapping[str, Any], basis: Mapping[str, Any], config: Mapping[str, Any], what: str) -> Distance:
    pairs = list(zip(own["steps"], basis["steps"], strict=False))
    far = tuple(relative(one.get(what), other.get(what)) for one, other in pairs)
    return Distance(far, tuple(bounds(config, basis, what)[: len(pairs)]))
