"""Checks the overrides of a command line against the files of conf/ and the configuration's dataclasses, each word as
Hydra's parser reads it, and finds the spelling that was probably meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException, OverrideParseException

from orchestrator import wings
from orchestrator.compose.settable import OPEN_KEYS, WHOLE_FILES, Tree, is_native
from orchestrator.compose.sweep_file import SweepFile, spelled
from orchestrator.config.strict import convert, wanted
from orchestrator.text.paths import program

SWEEP_KEYS = tuple(one.name for one in fields(SweepFile))


def check(words: Sequence[str], tree: Tree, *, multirun: bool, flags: Sequence[str] = ()) -> list[str]:
    """One line for each problem, with the most similar valid spelling.

    `flags`: the flags of the command line that belong into the commands that are proposed.
    """
    problems, words = _spaced(words)
    lists: list[str] = []
    parser = OverridesParser.create()
    for word in words:
        typed, equals, text = word.partition("=")
        key = typed.lstrip("+~").strip()
        if not key or not (equals or typed.startswith("~")):
            problems.append(_hints().word(word, [other for other in words if other != word], tree))
            continue
        found = _check_key(typed[: -len(typed.lstrip("+~"))], key, text if equals else None, tree)
        try:
            (override,) = parser.parse_overrides([word])
        except (HydraException, ValueError, RecursionError) as error:
            problems += found or [unreadable(word, error)]
            continue
        problems += found or _check_values(key, override, text, tree)
        if override.is_sweep_override():
            lists.append(word)
            if key == "sweeps":
                problems.append("sweeps takes one file: its own params are the lists")
    # With a sweep file a list of values needs no -m.
    if lists and not multirun and not any(word.startswith("sweeps=") for word in words):
        settings = [word for word in words if "=" in word or word.startswith("~")]
        line = f"{program()} {shlex.join(['-m', *flags, *settings])}"
        problems.append(f"a list of values ({' '.join(lists)}) needs -m (sweep): {line}")
    return list(dict.fromkeys(problems))


def _hints() -> Any:
    """What a wrong word probably meant: a module that only wrong words need."""
    return wings.load(wings.SUGGESTIONS)


def unreadable(word: str, error: Exception) -> str:
    """Why Hydra's grammar cannot read the word, in one line, with the quotes that it probably needs."""
    if isinstance(error, RecursionError):
        return f"{word}: expected brackets in a few levels, found thousands"
    if word.endswith(","):
        return f"{word}: expected a value after the last comma"
    # Hydra puts the word, and 1.4 the whole command line, before some reasons.
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith(("Error parsing", "Error when"))]
    reason = next(filter(None, lines), "")
    return _hints().quoted(word, reason) if isinstance(error, OverrideParseException) else f"{word}: {reason}"


def _spaced(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Problems for settings typed as several words ("zero = stage2", "zero=stage1, stage2"), and all other words."""
    problems, others, parts = [], [], list(words)
    while parts:
        typed = [parts.pop(0)]
        while parts and (typed[-1].endswith(("=", ",")) or parts[0].startswith("=")) and "=" not in parts[0].strip("="):
            typed.append(parts.pop(0))
        if len(typed) > 1:
            problems.append(f"'{' '.join(typed)}' has spaces around = or after a comma: write {''.join(typed)}")
        else:
            others += typed
    return problems, others


def _check_key(sign: str, key: str, value: str | None, tree: Tree) -> list[str]:
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return [f"'{key}' has no effect here: -m sweeps, and output=FOLDER says where results go"]
    if key in SWEEP_KEYS:
        typed = {"seeds": "-m seed=1,2,3", "prune": "--prune off"}.get(key, "")
        hint = f"; on a line it is {typed}" if typed else ""
        return [f"'{key}' is a key of a sweep's file: write it into sweeps/NAME.yaml{hint}"]
    if sign == "~" and (key in tree.groups or key in tree.keys) and key not in WHOLE_FILES:
        return [] if _is_open(key) else [f"~{key}: a run needs {key}; give it another value"]
    if key in tree.groups:
        if sign in ("+", "++"):
            return [f"{key} is always chosen: write {key}={value} without the {sign}"]
        return []
    if key in tree.keys:
        return []
    if _is_open(key) and (sign in ("+", "++") or is_native(key) or _below_known(key, tree)):
        return []
    return [f"'{key}' is not a setting.{_hints().key(key, value, tree)}"]


def _is_open(key: str) -> bool:
    return key.startswith(tuple(f"{open_key}." for open_key in OPEN_KEYS))


def _below_known(key: str, tree: Tree) -> bool:
    parent = key.rpartition(".")[0]
    return parent not in OPEN_KEYS and (parent in tree.keys or _below_known(parent, tree))


def _check_values(key: str, override: Override, typed: str, tree: Tree) -> list[str]:
    """Problems of the values of a known key; `typed` is the text after its equals sign."""
    if override.value_type is None or "${" in typed or key not in (tree.groups.keys() | tree.keys.keys()):
        return []
    problems = []
    for value in _values_of(override):
        text = spelled(value) if override.is_sweep_override() else typed.strip()
        in_group = key in tree.groups
        problem = _check_option(key, value, text, tree) if in_group else _check_scalar(key, value, text, tree.keys[key])
        problem = problem or _check_name(key, value, text, tree)
        problems += [problem] if problem else []
    return problems


def _values_of(override: Override) -> Iterator[Any]:
    """The single value of an override, or those that a list names. Ranges, globs and intervals yield nothing here: they
    are expanded when the points are composed."""
    value = override.value()
    if not override.is_sweep_override():
        yield value
    elif isinstance(value, ChoiceSweep):
        yield from (one.text if isinstance(one, QuotedString) else one for one in value.list)


def _check_name(key: str, value: object, text: str, tree: Tree) -> str | None:
    """A name chooses nothing: model.name=gpt2 would call the model gpt2 that the group `model` has chosen."""
    group, _, last = key.rpartition(".")
    if last != "name" or value not in tree.groups.get(group, ()):
        return None
    return f"{key}={text}: {key} is a name and chooses nothing. Did you mean '{group}={value}'?"


def _check_option(group: str, value: object, text: str, tree: Tree) -> str | None:
    if isinstance(value, list):
        names = ",".join(map(spelled, value))
        line = f"{program()} -m {group}={names}" if len(value) > 1 else f"{group}={names}"
        return f"{group} takes one option, found the list {text}. Did you mean '{line}'?"
    options = tree.groups[group]
    option = (value if isinstance(value, str) else text).removesuffix(".yaml")
    if option in options or isinstance(value, dict):
        return None
    return f"{group} has no option '{option}'.{_hints().option(group, option, options)}"


def _check_scalar(key: str, value: object, text: str, hint: Any) -> str | None:
    if hint is Any or get_origin(hint) is dict:
        return None
    try:
        convert(hint, value)
    except ValueError:
        expected = wanted(hint, value)
        near = _hints().near_value(text, re.findall(r"\w+", expected)) if expected.startswith("one of") else None
        return f"{key}={text}: expected {expected}" + (f". Did you mean '{near}'?" if near else "")
    return None
