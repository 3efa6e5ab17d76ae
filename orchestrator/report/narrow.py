"""Tables on a narrow terminal: columns are left out before a name or a number would be cut. Pure."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.report.summary import Table
from orchestrator.text.units import ABSENT

GAP = 2  # characters between columns
TEXT_WIDTH = 34  # characters that a column of sentences needs at least: they wrap


class Narrowed(NamedTuple):
    """A table, and the names of the columns that it lacks, in the table's order. fits: without wrapping its names."""

    table: Table
    left_out: tuple[str, ...] = ()
    fits: bool = True


def narrowed(table: Table, width: int) -> Narrowed:
    """The table with as many columns as fit into `width` characters.

    Columns are left out in the order of `table.drops`, then from the right, and before all others those that have no
    value. Those of `table.kept`, the names and the first number stay; names that are too long wrap.
    """
    kept = list(range(len(table.header)))
    order = [table.header.index(name) for name in table.drops if name in table.header]
    order += [at for at in reversed(range(table.names + 1, len(table.header))) if at not in order]
    for at in sorted(order, key=lambda at: any(row[at] != ABSENT for row in table.rows)):
        if _needed(table, kept) > width and table.header[at] not in table.kept:
            kept.remove(at)
    header, *rows = (tuple(row[at] for at in kept) for row in (table.header, *table.rows))
    left_out = tuple(name for at, name in enumerate(table.header) if at not in kept)
    return Narrowed(table._replace(header=header, rows=tuple(rows)), left_out, fits=_needed(table, kept) <= width)


def _needed(table: Table, columns: list[int]) -> int:
    """The characters of a line with these columns."""
    widths = [max(len(row[at]) for row in (table.header, *table.rows)) for at in columns]
    texts = [table.header[at] in table.texts for at in columns]
    least = [min(width, TEXT_WIDTH) if is_text else width for width, is_text in zip(widths, texts, strict=True)]
    return sum(least) + GAP * (len(columns) - 1)
