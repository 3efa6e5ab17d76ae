"""Finds where the backward of a loss enters the calls of a model, by the numbers of autograd's nodes.

The nodes of a call are those numbered from its beginning to its end. A loss enters a call at the nodes that are reached
from it through nodes outside of all calls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from zero_runtime.unit import Unit


class CallNodes(NamedTuple):
    """Those of a call that is in the graph, first to last, and the units that it read."""

    first: int
    last: int
    units: Sequence[Unit]
    is_outermost: bool


def units_entered(node: Any, spans: Sequence[CallNodes], found: Collection[int]) -> list[Unit]:
    """The units of the calls that the backward of a node enters past their outputs.

    found: the numbers of the nodes of outputs, whose gradients are heard.
    """
    # A script may take features that a hook or an attribute kept, and drop the output: then no gradient of an output
    # may arrive before inner nodes read parameters. The nodes outside of all calls, which are followed, are few: the
    # loss's.
    outer = [span for span in spans if span.is_outermost]
    entries, nodes, seen = set(), [node], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        if any(span.first <= number <= span.last for span in outer):
            entries.add(number)
        elif outer and number > outer[0].first:
            nodes += [one for one, _ in node.next_functions]
    missed = [
        number
        for number in entries.difference(found)
        if not any(span.first <= number <= span.last and span.last in entries for span in outer)
    ]
    if not missed:
        return []
    return [unit for span in spans if any(span.first <= one <= span.last for one in missed) for unit in span.units]
