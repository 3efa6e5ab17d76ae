"""What a kept answer was made with that a run of now would not be: versions, the processor, the choice of kernels.

None of it is part of a point's identity: an upgrade would measure everything again, unasked. Hence it is told.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from orchestrator.machine import hardware, provenance
from orchestrator.records.record_file import read_or_warn
from orchestrator.records.record_shapes import PROVENANCE, RESULT
from orchestrator.records.run_record import AttemptPaths

KERNELS = "ZLAB_KERNELS"
Differing = Mapping[str, Mapping[str, str]]  # by name: its text `then` and `now`


def differing(attempt: AttemptPaths, config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What differs between the attempt and a run of now, by its name: then and now. What was not recorded, or is not
    used by the configuration, is left out."""
    then = _recorded(attempt)
    now = {name: found for name in _names(config) if name in then and (found := _here(name)) is not None}
    return {name: {"then": then[name], "now": found} for name, found in now.items() if found != then[name]}


def words(found: Differing) -> str:
    """The differences in a sentence; empty if there are none."""
    return ", ".join(f"{name} {both['then']} (now {both['now']})" for name, both in found.items())


def _names(config: Mapping[str, Any]) -> list[str]:
    on_cuda = config["resources"]["device"] == "cuda"
    adapted = (config.get("adapter") or {}).get("kind", "none") != "none"
    here = (config.get("cluster") or {}).get("kind", "local") == "local"
    own = {"peft": adapted, "triton": on_cuda, "processor": here and not on_cuda}
    return ["torch", "transformers", "python", KERNELS, *(name for name, used in own.items() if used)]


def _recorded(attempt: AttemptPaths) -> dict[str, str]:
    made = read_or_warn(attempt.provenance, PROVENANCE) or {}
    by_rank = (read_or_warn(attempt.result, RESULT) or {}).get("environment") or {}
    found = {**(made.get("packages") or {}), "python": made.get("python")}
    found |= {"torch": by_rank.get("torch") or found.get("torch"), "processor": by_rank.get("cpu")}
    if (variables := made.get("variables")) is not None:
        found[KERNELS] = variables.get(KERNELS, "auto")
    return {name: str(value) for name, value in found.items() if value is not None}


def _here(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    if name == "processor":
        return hardware.described_cpu()
    return os.environ.get(name, "auto") if name == KERNELS else provenance.version_of(name)
