"""What an export writes, and the point as its engine's adapter judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator import wings
from orchestrator.config.engine import EngineChoice, EngineKind
from orchestrator.config.schema import Checkpoint, Measure, RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.wings.engines.contract import EngineModule

JSON_FILE, LINES_FILE = "ds_config.json", "loop_parts.py"


@dataclass
class Exported:
    """The files by name, what the other stack does differently, and the lines that the user types or writes."""

    files: dict[str, str]
    notes: list[str] = field(default_factory=list)
    use: str = ""


def refuse(problems: Sequence[str]) -> None:
    if problems:
        raise Refusal(problems)


def trained_by(config: RunConfig, kind: str) -> RunConfig:
    """The point with this engine, and with its native settings if it is the point's own. Refusal: it cannot train it.

    How the point is measured and saved is no part of the written files, so no reason to refuse it.
    """
    asked = config if config.engine.kind == kind else replace(config, engine=EngineChoice(EngineKind(kind)))
    module: EngineModule = wings.load(wings.ENGINES[kind])
    trained = replace(asked, measure=Measure(), checkpoint=Checkpoint())
    refuse([str(problem) for problem in module.problems_of(trained)])
    return asked
