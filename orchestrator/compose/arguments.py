"""The command line split into flags, wherever they stand, and overrides. Hydra's parser wants flags in front."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from orchestrator.compose import point_count
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import nearest

# The words that are no run, and the module that answers each; imported when it is asked.
VERBS = {
    "export-weights": "export",
    "io-bench": "io_bench",
    "doctor": "doctor",
    "ui": "ui",
    **dict.fromkeys(("list", "status", "watch", "logs", "report", "cancel", "resume", "retry"), "verbs"),
}
HOME = re.compile(r"(?<=[=,])~(?=/)")
# What is set with group=option and group.key=value, and never with dashes.
SETTING = re.compile(rf"^--?({'|'.join(one.name for one in fields(RunConfig))}|experiment|sweeps)(\.[\w.]+)?$")
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
OURS = (*SWEEPING, "--retry", "--prune", point_count.FLAG)  # and not Hydra's
SWITCHES = ("--help", "--multirun", "--run", "--resolve", "--hydra-help", "--shell-completion", "--version", *SWEEPING)
VALUED = ("--cfg", "--package", "--config-name", "--config-dir", "--retry", "--prune", point_count.FLAG)
CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--prune": ("safe", "off"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
# These only show something, and Hydra itself answers them.
SHOWING = ("--cfg", "--info", "--hydra-help", "--shell-completion")
# Settings are read from the tree of conf/, and a rerun from a pickle would escape every check.
REFUSED = {
    "--config-path": "add a folder of your own with --config-dir",
    "-cp": "add a folder of your own with --config-dir",
    "--dry-run": "--plan shows the points of a sweep, and starts nothing",
    "--experimental-rerun": "give the overrides again: the same point has the same folder",
}


@dataclass
class Arguments:
    """Flags by their long name (a switch's value is None), overrides in order, and what could not be understood."""

    flags: dict[str, str | None] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def multirun(self) -> bool:
        return "--multirun" in self.flags

    @property
    def shows(self) -> bool:
        """Whether Hydra is asked to show something instead of a run being asked for."""
        return any(flag in self.flags for flag in SHOWING)

    @property
    def shows_config(self) -> bool:
        """Whether what is shown is composed from the overrides, so that they must be right."""
        return "--cfg" in self.flags or "--info" in self.flags

    @property
    def max_points(self) -> int:
        """How many points a sweep may have."""
        return int(self.flags.get(point_count.FLAG) or point_count.LIMIT)

    def folders(self) -> list[str]:
        """The flags without which the overrides do not mean the same, each as one word."""
        return [f"{flag}={value}" for flag, value in self.flags.items() if flag in ("--config-dir", "--config-name")]

    def command(self) -> list[str]:
        """The line that goes on with the same sweep: what is only of this time is left out."""
        once = ("--fresh", "--retry", "--plan", "--detach", "--json")
        words = []
        for flag, value in self.flags.items():
            words += [] if flag in once else [flag] if value is None else [flag, value]
        return [*words, *self.overrides]

    def for_hydra(self) -> list[str]:
        """The same line as Hydra's own parser wants it: its flags in front, and none of ours."""
        line = []
        for flag, value in self.flags.items():
            if flag not in OURS:
                line += [flag] if value is None else [flag, value]
        # "--" so that an override such as ~experiment is never taken for the value of --info.
        return [*line, "--", *self.overrides]


def split(argv: Sequence[str]) -> Arguments:
    """Never raises: what is wrong is in `problems`."""
    found = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            found.overrides += words
            break
        if word.startswith("-"):
            _take_flag(found, word, words)
        else:
            _take_override(found, word)
    _check_together(found)
    return found


def _take_override(found: Arguments, word: str) -> None:
    """With paths of the home folder written out; the shell does so only for words that are paths."""
    try:
        found.overrides.append(HOME.sub(lambda _: str(Path.home()), word))
    except RuntimeError:
        found.problems.append(f"{word}: no home folder is known for ~; set HOME, or write the whole path")


def _take_flag(found: Arguments, word: str, words: list[str]) -> None:
    name, equals, value = word.partition("=")
    flag = SHORT.get(name, name)
    if SETTING.match(name):
        if not equals:
            value = words.pop(0) if words and "=" not in words[0] and not words[0].startswith("-") else "VALUE"
        found.problems.append(f"'{name}' is a setting and has no dashes: write {name.lstrip('-')}={value}")
    elif name in REFUSED:
        found.problems.append(f"{name} does not work here: {REFUSED[name]}")
    elif flag in SWITCHES and not equals:
        found.flags[flag] = None
    elif flag == "--info" and not equals:
        found.flags[flag] = words.pop(0) if words and words[0] in CHOICES[flag] else "all"
    elif flag in VALUED or flag == "--info":
        if not equals and not words:
            found.problems.append(f"{name} needs a value{_choices(flag)}")
            return
        found.flags[flag] = value if equals else words.pop(0)
        if flag in CHOICES and found.flags[flag] not in CHOICES[flag]:
            found.problems.append(f"{name} cannot be '{found.flags[flag]}'{_choices(flag)}")
        if flag == point_count.FLAG and not re.fullmatch(r"[1-9]\d{0,17}", found.flags[flag] or ""):
            found.problems.append(f"{name} cannot be '{found.flags[flag]}': a whole number of points")
    else:
        near = nearest(name, [*SWITCHES, *VALUED, "--info", *SHORT])
        hint = f" Did you mean '{near}'?" if near else ""
        found.problems.append(f"there is no flag '{word}'.{hint}      see: --help")


def _choices(flag: str) -> str:
    return f": one of {' '.join(CHOICES[flag])}" if flag in CHOICES else ""


def _check_together(found: Arguments) -> None:
    commands = [flag for flag in ("--run", "--multirun", *SHOWING) if flag in found.flags]
    if len(commands) > 1:
        found.problems.append(f"{' and '.join(commands)} cannot be asked for together")
    for flag in ("--resolve", "--package"):
        if flag in found.flags and "--cfg" not in found.flags:
            found.problems.append(f"{flag} belongs to --cfg: add --cfg job")
