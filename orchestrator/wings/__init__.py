"""The table of the wings: what each adds to the program, by name.

A wing is a folder here that may import the rest of the program (the trunk), and that the trunk never imports: it asks
this table for a name, and the wing's module is imported when the name is used. A feature begins as a wing, and code
moves to the trunk when two wings need it. tests/house/test_reach.py computes what a run and a sweep import without a
wing, and fails if it grows.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

# Modules of what a comparison shows besides the trunk's numbers: orchestrator/report/extras.py says what each has.
EXTRAS = ("orchestrator.wings.profile.extras",)
# Who writes more of a sweep's report: functions that return a ReportPart (orchestrator/report/comparison.py).
REPORT_PARTS = ("orchestrator.wings.page.files:part",)
# Modules of what the page shows of other wings: `section`, `markdown` and `figures` of the points of a report.
REPORT_SECTIONS = ("orchestrator.wings.profile.profile_page",)


def load(place: str) -> Any:
    """The object that "package.module:attribute" names, or the module that "package.module" names."""
    return resolve_name(place)
