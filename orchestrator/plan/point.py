"""One point of an experiment: a checked, resolved configuration and the short name that people read."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import RunConfig


@dataclass(frozen=True)
class Point:
    """`label` is short and made of what varies ("stage2-bf16"); `overrides` are the words that made it."""

    label: str
    config: RunConfig
    overrides: tuple[str, ...] = ()
