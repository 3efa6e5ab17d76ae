"""Composes lines of plain words without Hydra, whose import alone takes a quarter of a second.

A plain word is `key=value` or `key=value,value,...`, with values that Hydra's grammar reads as one token or as text.
Everything else is left to Hydra: other words, flags that change what a line means, files that need more than merging,
and every line that Hydra would refuse, so that Hydra reports the problem. tests/orchestrator/compose/test_plain_line.py
compares the two.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrator.compose import folders, yaml_bounds
from orchestrator.compose.arguments import Arguments
from orchestrator.compose.composition import Composed, Composition
from orchestrator.compose.merge import Merger

CONFIG = "config"
# Flags that do not change which points a line has.
IGNORED = {"--multirun", "--plan", "--json", "--fresh", "--detach", "--retry", "--prune", "--max-points"}
WHOLE = ("experiment", "sweeps", "hydra")  # whose files change more than one group
_KEY = re.compile(r"[a-z][a-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?(?:[eE][+-]?[0-9]{1,2})?")
_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NAMED: dict[str, Any] = {"null": None, "true": True, "false": False}
_READ_OTHERWISE = (*_NAMED, "inf", "nan")  # in any case
# As omegaconf reads numbers: 1e-3 is one, and is text for PyYAML.
_YAML_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class NotPlain(Exception):
    """Hydra has to compose the line."""


def composed(asked: Arguments) -> Composition | None:
    """The points of the line, as compose.compose gives them; None if Hydra has to compose them."""
    if asked.flags.keys() - IGNORED:
        return None
    try:
        axes = _axes(asked.overrides)
        several = tuple(key for key, words in axes.items() if len(words) > 1)
        count = math.prod(len(words) for words in axes.values())
        if count > asked.max_points or (several and not asked.multirun):
            return None
        merger = Merger(folders.config_folders(None), CONFIG, read_plain)
        points = tuple(_point(merger, line) for line in itertools.product(*axes.values()))
    except (NotPlain, OSError, ValueError, AssertionError, RecursionError, yaml.YAMLError):
        return None
    return Composition(points, asked.multirun, several)


_Word = tuple[str, str, Any]  # as typed for one value, its key and its value


def _axes(words: Sequence[str]) -> dict[str, list[_Word]]:
    """The values of each key; if a key occurs twice the last word counts, in the place of the first."""
    axes = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not _KEY.fullmatch(key) or key.partition(".")[0] in WHOLE:
            raise NotPlain
        values = text.split(",")
        found = [(f"{key}={one}", key, _value(one)) for one in values]
        if len(values) > 1 and any(type(value) not in (str, int) for _, _, value in found):
            raise NotPlain  # Hydra writes these in a list in its own way: 1e-3 as 0.001
        axes[key] = found
    return axes


def _value(text: str) -> Any:
    """The value as Hydra's grammar reads it."""
    if text in _NAMED:
        return _NAMED[text]
    if _INT.fullmatch(text):
        if text == "-0":
            raise NotPlain
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if not _TEXT.fullmatch(text) or text.lower() in _READ_OTHERWISE:
        raise NotPlain
    return text


def _point(merger: Merger, line: Sequence[_Word]) -> Composed:
    choices = {key: value for _, key, value in line if key in merger.groups}
    if not all(isinstance(option, str) for option in choices.values()):
        raise NotPlain
    values = merger.merge(choices, [(key, value) for _, key, value in line if key not in merger.groups])
    if values is None:
        raise NotPlain
    return Composed(values, {**merger.groups, **choices}, tuple(word for word, _, _ in line))


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads values as omegaconf does, and refuses a key that occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # The keys that are no scalars are refused below, as unhashable.
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            raise ValueError("a key occurs twice")
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, list("-+0123456789."))
_Loader.yaml_implicit_resolvers = {
    sign: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for sign, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_plain(path: Path) -> Any:
    """The plain data of a YAML file, as compose.read_yaml gives it for files without tags of Python."""
    yaml_bounds.check(path)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
