"""Splits a command line into flags, at any position, and overrides. Hydra's own parser needs the flags first."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from orchestrator import wings
from orchestrator.compose import point_count
from orchestrator.config.near import did_you_mean
from orchestrator.config.schema import AskedConfig

SHARED_PARSER = "orchestrator.commands.verbs"  # of the verbs that read and control sweeps
# The verbs other than a run, each with its module, which is imported when the verb is used and has `main` and `parser`.
VERBS = {
    "io-bench": "orchestrator.commands.io_bench",
    "doctor": "orchestrator.commands.doctor",
    "ui": "orchestrator.commands.ui",
    "sync": "orchestrator.commands.sync",
    "compare": "orchestrator.commands.compare",
    "completion": "orchestrator.commands.completion",
    **dict.fromkeys(("list", "status", "watch", "logs", "report", "cancel", "resume", "retry"), SHARED_PARSER),
    **wings.VERBS,
}
HOME = re.compile(r"(?<=[=,])~(?=/)")
# Names of settings, which are given as group=option and group.key=value, never with dashes.
SETTING = re.compile(rf"^--?({'|'.join(one.name for one in fields(AskedConfig))}|experiment|sweeps)(\.[\w.]+)?$")
SHORT = {
    "-h": "--help",
    "-m": "--multirun",
    "-r": "--run",
    "-c": "--cfg",
    "-p": "--package",
    "-i": "--info",
    "-sc": "--shell-completion",
    "-cn": "--config-name",
    "-cd": "--config-dir",
}
SWEEPING = ("--plan", "--fresh", "--detach", "--json")
OURS = (*SWEEPING, "--retry", "--prune", "--anchor", point_count.FLAG)  # flags that Hydra does not have
SWITCHES = ("--help", "--multirun", "--run", "--resolve", "--hydra-help", "--shell-completion", "--version", *SWEEPING)
VALUED = ("--cfg", "--package", "--config-name", "--config-dir", "--retry", "--prune", "--anchor", point_count.FLAG)
CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--prune": ("safe", "off"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
OPTIMIZED = (
    "Python was told to leave out assertions and docstrings, which Hydra's parser and transformers need: unset "
    "PYTHONOPTIMIZE, and start python without -O"
)
# Flags that only show something and are answered by Hydra.
SHOWING = ("--cfg", "--info", "--hydra-help", "--shell-completion")
# Hydra's flags that do not work here: settings come from the tree of conf/, and a rerun from a pickle skips all checks.
REFUSED = {
    "--config-path": "add a folder of your own with --config-dir",
    "-cp": "add a folder of your own with --config-dir",
    "--dry-run": "--plan shows the points of a sweep, and starts nothing",
    "--experimental-rerun": "give the overrides again: the same point has the same folder",
}


@dataclass
class Arguments:
    """Flags by long name (None as the value of a switch), overrides in order, and the problems of the command line."""

    flags: dict[str, str | None] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def multirun(self) -> bool:
        return "--multirun" in self.flags

    @property
    def shows(self) -> bool:
        """Whether a flag asks Hydra to show something instead of starting a run."""
        return any(flag in self.flags for flag in SHOWING)

    @property
    def shows_config(self) -> bool:
        """Whether Hydra composes what it shows from the overrides, so that they must be valid."""
        return "--cfg" in self.flags or "--info" in self.flags

    @property
    def max_points(self) -> int:
        """The most points that a sweep may have."""
        return int(self.flags.get(point_count.FLAG) or point_count.LIMIT)

    def folders(self) -> list[str]:
        """The flags that change the meaning of the overrides, each as one argument."""
        return [f"{flag}={value}" for flag, value in self.flags.items() if flag in ("--config-dir", "--config-name")]

    def command(self) -> list[str]:
        """The arguments that resume the same sweep, without the flags that apply to a single command."""
        once = ("--fresh", "--retry", "--plan", "--detach", "--json", "--anchor")
        words = []
        for flag, value in self.flags.items():
            words += [] if flag in once else [flag] if value is None else [flag, value]
        return [*words, *self.overrides]

    def for_hydra(self) -> list[str]:
        """The arguments for Hydra's own parser: its flags first, and none of ours."""
        line = []
        for flag, value in self.flags.items():
            if flag not in OURS:
                line += [flag] if value is None else [flag, value]
        # "--" keeps Hydra from taking an override such as ~experiment for the value of --info.
        return [*line, "--", *self.overrides]


def split(argv: Sequence[str]) -> Arguments:
    """Splits the arguments. Never raises: problems are collected in `problems`."""
    result = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            result.overrides += words
            break
        if word.startswith("-"):
            _take_flag(result, word, words)
        else:
            _take_override(result, word)
    _check_together(result)
    if sys.flags.optimize:
        result.problems.append(OPTIMIZED)
    result.problems = list(dict.fromkeys(result.problems))  # a word that was typed twice is one problem
    return result


def _take_override(result: Arguments, word: str) -> None:
    """Adds an override, with ~/ in its values expanded: the shell expands it only at the beginning of a word."""
    try:
        result.overrides.append(HOME.sub(lambda _: str(Path.home()), word))
    except RuntimeError:
        result.problems.append(f"{word}: no home folder is known for ~; set HOME, or write the full path")


def _take_flag(result: Arguments, word: str, words: list[str]) -> None:
    name, equals, value = word.partition("=")
    flag = SHORT.get(name, name)
    if SETTING.match(name):
        if not equals:
            value = words.pop(0) if words and "=" not in words[0] and not words[0].startswith("-") else "VALUE"
        result.problems.append(f"'{name}' is a setting and has no dashes: write {name.lstrip('-')}={value}")
    elif name in REFUSED:
        result.problems.append(f"{name} does not work here: {REFUSED[name]}")
    elif flag in SWITCHES and not equals:
        result.flags[flag] = None
    elif flag == "--info" and not equals:
        result.flags[flag] = words.pop(0) if words and words[0] in CHOICES[flag] else "all"
    elif flag in VALUED or flag == "--info":
        if not equals and not words:
            result.problems.append(f"{name} needs a value{_choices(flag)}")
            return
        result.flags[flag] = value if equals else words.pop(0)
        if flag in CHOICES and result.flags[flag] not in CHOICES[flag]:
            result.problems.append(f"{name} cannot be '{result.flags[flag]}'{_choices(flag)}")
        if flag == point_count.FLAG and not re.fullmatch(r"[1-9]\d{0,17}", result.flags[flag] or ""):
            result.problems.append(f"{name} cannot be '{result.flags[flag]}': a whole number of points")
    else:
        hint = did_you_mean(name, [*SWITCHES, *VALUED, "--info", *SHORT])
        result.problems.append(f"there is no flag '{word}'.{hint}      see: --help")


def _choices(flag: str) -> str:
    return f": one of {' '.join(CHOICES[flag])}" if flag in CHOICES else ""


def _check_together(result: Arguments) -> None:
    commands = [flag for flag in ("--run", "--multirun", *SHOWING) if flag in result.flags]
    if len(commands) > 1:
        result.problems.append(f"{' and '.join(commands)} cannot be asked for together")
    for flag in ("--resolve", "--package"):
        if flag in result.flags and "--cfg" not in result.flags:
            result.problems.append(f"{flag} belongs to --cfg: add --cfg job")
