"""Turns one command line into checked points, runs each as a job of real processes, and reports the measurements.

From Python: `orchestrator.run("zero=stage2")` and `orchestrator.sweep("zero=stage1,stage2")`; `orchestrator.plan` shows
what a sweep would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Record, SweepPlan, SweepResults, plan, run, sweep

__all__ = ["Record", "SweepPlan", "SweepResults", "plan", "run", "sweep"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line and the ranks import submodules of this package and need nothing of api.
    if name in __all__:
        from orchestrator import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
