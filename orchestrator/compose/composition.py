"""The points of a command line as plain data, before their values are checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.compose.sweep_file import SweepFile


@dataclass(frozen=True)
class Composed:
    """One point. `values` is its configuration as plain data, `choices` the option chosen in each group.

    `overrides` are the arguments that compose it again: flags for folders first, then overrides.
    """

    values: dict[str, Any]
    choices: dict[str, str | None]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Composition:
    """The points of a command line. `axes` are the keys with more than one value, in the order of the sweep.

    `sweep`: the sweep file, for its settings other than points; the defaults if no declared sweep is used.
    """

    points: tuple[Composed, ...]
    is_sweep: bool
    axes: tuple[str, ...]
    sweep: SweepFile = field(default_factory=SweepFile)
