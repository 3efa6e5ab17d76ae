"""The files of a sweep's comparison: report.md and results.csv. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape

from orchestrator.report import extras, named_apart
from orchestrator.report.cautions import failures, reused, warnings, without_place
from orchestrator.report.entry import Entry
from orchestrator.report.ranking import (
    DEFAULT_METRIC,
    Ranked,
    clock,
    conclusion,
    made_with,
    peak_bytes,
    rule,
    sent_bytes,
    speed,
    states_bytes,
    tables,
)
from orchestrator.report.summary import PHASES, Table, run_command
from orchestrator.report.varied import ABSENT_VALUE, varied_keys
from orchestrator.rounds.recorded import used_rounds


def markdown(table_: Table) -> str:
    """The table in Markdown."""
    lines = [table_.header, tuple("---" if index < table_.names else "---:" for index in range(len(table_.header)))]
    return "\n".join(f"| {' | '.join(_escaped(row))} |" for row in [*lines, *table_.rows])


def _escaped(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in row]


def report_md(name: str, ranked: Sequence[Ranked]) -> str:
    """The complete report of a sweep."""
    parts = [
        f"# Sweep {name}",
        *(
            f"## {name[:1].upper()}{name[1:]}\n\n{markdown(one)}" if name else markdown(one)
            for name, one in tables(ranked).items()
        ),
        f"{rule(ranked[0].metric if ranked else DEFAULT_METRIC)}.",
        *(f"{line}." for line in (*reused(ranked), *without_place(ranked))),
        f"**{conclusion(ranked)}.**",
        *(f"{line}." for line in named_apart.lines(ranked)),
    ]
    parts += [f"Warning: {warning}" for warning in warnings(ranked)]
    if lost := failures(ranked):
        parts.append("Without a result:\n\n" + "\n".join(f"- {line}" for line in lost))
    commands = [f"- {row.entry.label}: `{run_command(row.entry.overrides)}`" for row in ranked]
    parts.append("Commands:\n\n" + "\n".join(commands))
    return "\n\n".join(parts) + "\n"


def html(table_: Table) -> str:
    """The table as an element of a page."""
    aligned = [
        "left" if at < table_.names or name in table_.texts else "right" for at, name in enumerate(table_.header)
    ]
    rows = [
        "".join(
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>' for side, cell in zip(aligned, row, strict=True)
        )
        for tag, row in [("th", table_.header), *(("td", row) for row in table_.rows)]
    ]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def plain(table_: Table) -> str:
    """The table as lines of text, in full width."""
    lines = [table_.header, *table_.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [
        str.ljust if at < table_.names or name in table_.texts else str.rjust for at, name in enumerate(table_.header)
    ]
    cells = [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in lines]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def results_csv(ranked: Sequence[Ranked]) -> str:
    """`result_rows` as a file."""
    rows = result_rows(ranked)
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else ["place"])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def result_rows(ranked: Sequence[Ranked]) -> list[dict[str, object]]:
    """One row per point; numbers unrounded and in base units, named by their column. Each setting that differs between
    points has a column with its key."""
    entries = [row.entry for row in ranked]
    settings = varied_keys([entry.overrides for entry in entries])
    return [
        _csv_row(row, {key: _value_of(key, values[number], row.entry) for key, values in settings.items()}, entries)
        for number, row in enumerate(ranked)
    ]


def _value_of(key: str, typed: str, entry: Entry) -> object:
    """The value of a setting in a point: as typed, else that of its configuration; empty if it is an option's name."""
    if typed != ABSENT_VALUE:
        return typed
    value: object = entry.config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if isinstance(value, Mapping) else value


def _csv_row(ranked: Ranked, settings: Mapping[str, object], entries: Sequence[Entry]) -> dict[str, object]:
    entry, result = ranked.entry, ranked.entry.result
    steps = result["throughput"] if result else {}
    known = speed(result) if result else None
    row: dict[str, object] = {
        "place": ranked.place,
        "tied": ranked.tied,
        "label": entry.label,
        **settings,
        "state": entry.state,
        "message": entry.message,
        "measured_at": clock(entry, "%Y-%m-%d %H:%M:%S") if result else None,
        "reused": entry.is_reused,
        "made_with": ", ".join(made_with(entry)) or None,
        "others_share": ("unknown" if entry.others_share is None else entry.others_share) if result else None,
    }
    for name in ("median", "p10", "p90"):
        row[f"tokens_per_second_{name}"] = steps["tokens_per_second"][name] if result else None
        row[f"step_ms_{name}"] = steps["step_ms"][name] if result else None
    row |= {
        "rounds": len(used_rounds(result)) if result else None,
        "tokens_per_second_low": known.low if known else None,
        "tokens_per_second_high": known.high if known else None,
    }
    row |= {f"{phase}_ms": result["phases_ms"][phase] if result else None for phase, _ in PHASES}
    row |= {
        "states_measured_bytes": states_bytes(result) if result else None,
        "activations_bytes": result["memory"]["activations_bytes"] if result else None,
        "activations_predicted_bytes": result["memory"].get("activations_predicted_bytes") if result else None,
        "peak_bytes": peak_bytes(result) if result else None,
        "sent_bytes_per_step": sent_bytes(result) if result else None,
        "loss_first": result["loss"]["first"] if result else None,
        "loss_last": result["loss"]["last"] if result else None,
        "loss_validation": result["loss"]["validation"] if result else None,
        **extras.cells(entry, entries),
        "data_hash": result["data"]["hash"] if result else None,
        "world": result["world"] if result else None,
        "folder": entry.folder,
        "command": run_command(entry.overrides),
    }
    return row
