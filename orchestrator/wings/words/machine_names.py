"""Machines as people name them: `8xh100` is the preset h100_80gb, and the GPUs and nodes of a line follow from it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import yaml

from orchestrator.compose.folders import config_folders, option_file
from orchestrator.compose.settable import read_tree
from orchestrator.config.strict import Refusal
from orchestrator.text.paths import program

HARDWARE, GPUS = "hardware", "hardware.gpus"
RANKS, NODES = "resources.ranks", "resources.nodes"
COUNTED = re.compile(r"(?:([1-9][0-9]*)x)?(\w+)")  # 8xh100, a100_80gb


class Machine(NamedTuple):
    """One machine of the line: its name as typed, empty if the line names at most one, and all words for it."""

    name: str
    words: list[str]


def spelled(words: Sequence[str], folder: str | None) -> list[str]:
    """The words, with their machines as presets and settings of nodes. folder: that of --config-dir. Refusal: a name
    stands for several presets, its number is no number of whole nodes, or a list of machines needs more than names."""
    lines = machines(words, folder)
    if len(lines) == 1:
        return lines[0].words
    # Ranks do not change the nodes of a list: its points have one word for the hardware, and rules judge each.
    given = {key: value for key, value in values(words).items() if key != RANKS}
    found = [_named(name, given, folder) for name, _ in lines]
    if any(len(one) > 1 for one in found):
        text = f"{HARDWARE}={','.join(name for name, _ in lines)}"
        why = "expected presets in a list, found a number of GPUs that a preset's node does not have"
        raise Refusal([f"{text}: {why}      fix: one line for each, or one table: {program()} fit {text}"])
    at = _place(words)
    presets = ",".join(one[0].partition("=")[2] for one in found)
    return [*words[:at], f"{HARDWARE}={presets}", *words[at + 1 :]]


def machines(words: Sequence[str], folder: str | None) -> list[Machine]:
    """The line for each machine that its hardware=... names, one line if it names none. folder: that of --config-dir.

    `8xh100` is 8 GPUs of h100_80gb: fewer than a node has are one node with as many, more are several nodes. A node of
    a preset with one GPU has as many as it needs for the ranks.
    """
    given = values(words)
    if HARDWARE not in given:
        return [Machine("", list(words))]
    names, at = given[HARDWARE].split(","), _place(words)
    return [
        Machine(name if len(names) > 1 else "", [*words[:at], *_named(name, given, folder), *words[at + 1 :]])
        for name in names
    ]


def values(words: Sequence[str]) -> dict[str, str]:
    """The last value of each group and key that the words set."""
    return dict(word.lstrip("+").partition("=")[::2] for word in words)


def _place(words: Sequence[str]) -> int:
    """Where the last word for the hardware is."""
    return max(place for place, word in enumerate(words) if word.lstrip("+").partition("=")[0] == HARDWARE)


def _named(text: str, given: Mapping[str, str], folder: str | None) -> list[str]:
    """The words of one machine, that of its preset first, then those of its GPUs and nodes."""
    match = COUNTED.fullmatch(text)
    if match is None:
        return [f"{HARDWARE}={text}"]
    options = read_tree(folder).groups[HARDWARE]
    number, name = (None, text) if text in options else (match[1], _preset(match, options))
    found = [f"{HARDWARE}={name}"]
    of_node, nodes = _gpus_of(name, folder), _whole(given.get(NODES, ""))
    if of_node is None:
        return found
    if number is not None:
        return [*found, *_nodes_of(text, int(number), of_node, given)]
    wanted = -(-_whole(given.get(RANKS, "")) // (nodes or 1))
    if wanted <= of_node or GPUS in given:
        return found
    if of_node == 1:
        return [*found, f"{GPUS}={wanted}"]
    return found if nodes or wanted % of_node else [*found, f"{NODES}={wanted // of_node}"]


def _nodes_of(text: str, number: int, of_node: int, given: Mapping[str, str]) -> list[str]:
    """The words for as many GPUs, on as many nodes as the line gives or as they need. Refusal if none are as many."""
    if GPUS in given:
        fix = f"leave {GPUS} out, or name the preset without a number"
        raise Refusal([f"{HARDWARE}={text}: found {GPUS}={given[GPUS]} too, a second number of GPUs      fix: {fix}"])
    if nodes := _whole(given.get(NODES, "")):
        each, where = number / nodes, f"{NODES}={nodes}"
    else:
        each, where = (number if of_node == 1 else min(number, of_node)), f"nodes of {of_node} GPUs"
    if each != int(each) or number % int(each):
        raise Refusal(
            [
                f"{HARDWARE}={text}: expected whole nodes, found {number} GPUs on {where}      "
                f"fix: {HARDWARE}={-(-number // (nodes or of_node)) * (nodes or of_node)}x{text.partition('x')[2]}"
            ]
        )
    more = [] if nodes or each == number else [f"{NODES}={number // int(each)}"]
    return [*([] if each == of_node else [f"{GPUS}={int(each)}"]), *more]


def _whole(text: str) -> int:
    """The number; 0 if it is none, which the rules of runs report."""
    return int(text) if text.isdigit() else 0


def _preset(match: re.Match[str], options: Sequence[str]) -> str:
    """The option that the name stands for. Refusal if there are several."""
    name = match[2]
    near = [name] if name in options else [option for option in options if option.startswith(f"{name}_")]
    if len(near) > 1:
        count_of = f"{match[1]}x" if match[1] else ""
        fixes = "   or   ".join(f"{HARDWARE}={count_of}{option}" for option in near)
        raise Refusal([f"hardware has no option '{name}', found {' and '.join(near)}      fix: {fixes}"])
    return near[0] if near else name


def _gpus_of(name: str, folder: str | None) -> int | None:
    """The GPUs of a node of a preset; None if it is this machine, or if the file is not there or does not say it."""
    file = option_file(f"{HARDWARE}/{name}", config_folders(folder))
    try:
        found = None if file is None else yaml.safe_load(file.read_text(encoding="utf-8")).get("gpus")
    except (OSError, ValueError, yaml.YAMLError, AttributeError, RecursionError):
        return None  # composing the file reports its problem
    return found if isinstance(found, int) and found > 0 else None
