"""From one command line to checked points, each run as a job of real processes, and a report of the numbers.

From Python: `orchestrator.run("zero=stage2")` and `orchestrator.sweep("zero=stage1,stage2")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Record, run, sweep

__all__ = ["Record", "run", "sweep"]


def __getattr__(name: str) -> Any:
    # Lazily: the command line and the ranks import this package for its parts, and want no more than those.
    if name in __all__:
        from orchestrator import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
