"""What is printed after a training to an end: how it ended, and the commands that use what it made."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.schema import AdapterKind, DataKind
from orchestrator.plan.point import Point
from orchestrator.report.summary import Row, many_epochs, run_command, without_key
from orchestrator.text.paths import program, shown
from orchestrator.text.units import loss

LONGER = 2  # times as long, in the command that goes on


def rows(point: Point, result: Mapping[str, Any]) -> list[Row]:
    """One line with the end, then the next commands: weights as a folder, text from them, training that goes on."""
    training = result["training"]
    validation, best = result["loss"]["validation"], training.get("best")
    said = f"trained {result['steps']:,} steps ({many_epochs(training['epochs'])}), loss {loss(result['loss']['last'])}"
    if validation is not None:
        said += f", validation {loss(validation)}"
    if best is not None and best["step"] != result["steps"]:
        said += f", best {loss(best['loss'])} after step {best['step']:,}"
    last = training.get("last_checkpoint")
    if last is None:
        again = run_command([*without_key(point.overrides, "checkpoint"), "checkpoint=sharded"])
        return [Row("done", f"{said}; nothing was saved (checkpoint=none)"), Row("next", f"{again}     (saves it)")]
    chosen = Path((best or {}).get("checkpoint") or last)
    return [Row("done", f"{said}: {shown(chosen)}"), *_using(point, chosen), Row("go on", _longer(point, last))]


def _using(point: Point, checkpoint: Path) -> list[Row]:
    config = point.config
    out = checkpoint.parent.parent / f"weights-{checkpoint.name}"
    export = shlex.join([*program().split(), "export-weights", shown(checkpoint), shown(out)])
    if config.adapter.kind is not AdapterKind.none:
        return [Row("next", f"{export}     (the adapters, for PEFT)")]
    word = "ask=TEXT" if config.data.kind is DataKind.pairs else "prompt=TEXT"
    generate = f"{program()} generate {shlex.quote(f'model.path={shown(out)}')} {word}"
    return [Row("next", export), Row("", generate)]


def _longer(point: Point, last: str) -> str:
    """The command that goes on from the last checkpoint, to an end that is further away."""
    train = point.config.train
    end = (
        f"train.max_steps={LONGER * train.max_steps}"
        if train.max_steps is not None
        else f"train.epochs={LONGER * (train.epochs or 1):g}"
    )
    kept = without_key(point.overrides, "train.max_steps", "train.epochs", "checkpoint.resume")
    return run_command([*kept, end, f"checkpoint.resume={shown(Path(last))}"])
