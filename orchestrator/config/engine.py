"""The group that chooses the library that trains a point: zero-lab's own runtime, or another engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.config.strict import Limits, Word
from orchestrator.text.paths import expanded


class EngineKind(Word):
    zero = "zero"
    deepspeed = "deepspeed"
    fsdp2 = "fsdp2"
    ddp = "ddp"
    plain = "plain"


@dataclass(frozen=True)
class EngineChoice:
    """The library that trains, and the Python environment of its ranks.

    `kind`: zero is zero-lab's own runtime; plain is PyTorch in one process, whose losses the others are compared with.
    `deepspeed`, `fsdp2`, `ddp`: settings of that engine in its own words, which override what follows from the other
    groups; an engine ignores those of the others. `python`: the interpreter of another virtual environment for the
    ranks; null = this one. As an axis of a sweep it makes two versions of a library take turns. `versions`: of the
    engine's packages there, filled in. `counted`: count the work of a run (weights, tokens, updates, messages), filled
    in where a sweep compares engines.
    """

    kind: EngineKind = EngineKind.zero
    python: str | None = None
    deepspeed: dict[str, Any] = field(default_factory=dict)
    fsdp2: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    counted: bool = False

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "engine")
        limits.must("python", bool, "the interpreter of a virtual environment, or null", None)
        limits.conclude()

    def located(self) -> EngineChoice:
        """With the absolute path of `python`. Its links stay: they lead out of the virtual environment."""
        return replace(self, python=self.python and str(expanded(self.python).absolute()))

    @property
    def is_own(self) -> bool:
        """Whether zero-lab's own runtime trains."""
        return self.kind is EngineKind.zero

    @property
    def native(self) -> dict[str, Any]:
        """The settings in the engine's own words."""
        found: dict[str, Any] = getattr(self, self.kind, {})
        return found
