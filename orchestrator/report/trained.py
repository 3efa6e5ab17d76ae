"""What is said after a training to an end: how it ended, and the commands that use what it made. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.report.summary import Row, many_epochs, run_command, without_key
from orchestrator.text.paths import program, shown
from orchestrator.text.units import loss

LONGER = 2  # times as long, in the command that goes on


def closing_rows(overrides: Sequence[str], config: Mapping[str, Any], result: Mapping[str, Any]) -> list[Row]:
    """One line with the end, then the next commands: weights as a folder, text from them, training that goes on."""
    training = result["training"]
    validation, best = result["loss"]["validation"], training.get("best")
    said = f"trained {result['steps']:,} steps ({many_epochs(training['epochs'])}), loss {loss(result['loss']['last'])}"
    if validation is not None:
        said += f", validation {loss(validation)}"
    if best is not None and best["step"] != result["steps"]:
        said += f", best {loss(best['loss'])} after step {best['step']:,}"
    commands = next_commands(overrides, config, result)
    last = training.get("last_checkpoint")
    if last is None:
        return [Row("done", f"{said}; nothing was saved (checkpoint=none)"), *_named("next", commands)]
    kept = without_key(overrides, "train.max_steps", "train.epochs", "checkpoint.resume")
    on = run_command([*kept, _end(config), f"checkpoint.resume={shown(Path(last))}"])
    return [Row("done", f"{said}: {shown(_chosen(training))}"), *_named("next", commands), Row("go on", on)]


def next_commands(overrides: Sequence[str], config: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Commands that make a folder of the best weights and generate text with it; or that save them, if nothing was."""
    training = result["training"]
    if training.get("last_checkpoint") is None:
        return [run_command([*without_key(overrides, "checkpoint"), "checkpoint=sharded"])]
    chosen = _chosen(training)
    out = shown(chosen.parent.parent / f"weights-{chosen.name}")
    export = f"{program()} export-weights {shlex.join([shown(chosen), out])}"
    if config["adapter"]["kind"] != "none":  # else a folder for PEFT
        export += " --merge"
    return [export, generating(out, config)]


def generating(folder: str, config: Mapping[str, Any]) -> str:
    """The command that generates with the weights in the folder, which a run of this configuration trained."""
    word = "ask" if config["data"]["kind"] == "pairs" else "prompt"
    return f"{program()} generate {shlex.join([f'model.path={folder}', f'{word}=Once'])}"


def _named(name: str, commands: Sequence[str]) -> list[Row]:
    return [Row("" if number else name, command) for number, command in enumerate(commands)]


def _chosen(training: Mapping[str, Any]) -> Path:
    """The best checkpoint, or the last one if the best is not kept."""
    return Path((training.get("best") or {}).get("checkpoint") or training["last_checkpoint"])


def _end(config: Mapping[str, Any]) -> str:
    """An end that is further away."""
    train = config["train"]
    if train["max_steps"] is not None:
        return f"train.max_steps={LONGER * train['max_steps']}"
    return f"train.epochs={LONGER * train['epochs']:g}"
