"""One point of an experiment: a checked and resolved configuration, with a short name for people."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import RunConfig


@dataclass(frozen=True)
class Point:
    """A configuration to run. `label`: a short name made of the values that vary, such as "stage2-bf16". `overrides`:
    the arguments that compose the configuration."""

    label: str
    config: RunConfig
    overrides: tuple[str, ...] = ()
