"""Reads declared sweeps, one YAML file for each question, and expands them to one line of overrides per point.

A file of sweeps/ has these keys. All are optional, but one of axes, zip, concat and seeds is needed:

    base: {model: llama_tiny}                  settings of every point
    axes: {zero: [stage0, stage1]}             the product of these lists
    zip: [{batch.micro: [1, 2], batch.accumulation: [2, 1]}]   lists that advance together; each entry is one more axis
    concat: [{zero: stage3, offload: optimizer_nvme}]          points in addition to the product
    exclude: [{zero: stage0, offload: [optimizer_cpu]}]        points of the product that are left out
    when: [{if: {zero: stage3}, set: {resources.ranks: 4}}]    additional settings of the points that match
    seeds: [1, 2]                              values of seed, the last axis
    rank_by: tokens_per_second                 a name of report.METRICS
    prune: safe | off                          whether points that cannot fit are left out

Apart from `read`, which reads through the `load` that its caller passes, nothing here touches files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from orchestrator.compose import point_count
from orchestrator.config.strict import nearest

Line = dict[str, str]  # the override of each key, such as "zero=stage1", in order
_PLAIN = re.compile(r"^[\w./+\-]+$", re.ASCII)
_NUMBER_LIKE = re.compile(r"^[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?$", re.I)
_RESERVED = ("null", "true", "false", "inf", "nan")
TOO_DEEP = (
    "expected settings in a few levels, found thousands, or an alias inside what it stands for; write the values out"
)


class SweepFileError(ValueError):
    """A sweep file is not valid; the message names the file and says why."""


@dataclass(frozen=True)
class SweepFile:
    """The contents of a sweep file; the module's docstring describes the keys."""

    base: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    zip: list[dict[str, list[Any]]] = field(default_factory=list)
    concat: list[dict[str, Any]] = field(default_factory=list)
    exclude: list[dict[str, Any]] = field(default_factory=list)
    when: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    rank_by: str = ""
    prune: str = "safe"


@dataclass(frozen=True)
class Expansion:
    """The lines of a sweep (one per point), and the keys that vary in it, in the order of the sweep."""

    lines: tuple[Line, ...]
    axes: tuple[str, ...]


def read(path: Path, load: Callable[[Path], Any]) -> SweepFile | None:
    """The sweep in a file; None for a file in Hydra's own form, which Hydra composes. SweepFileError if it is invalid.

    `load`: reads a file as Hydra does. PyYAML would read 1e-3 as text, and accept duplicate keys.
    """
    try:
        data = load(path)
    except yaml.MarkedYAMLError as error:
        raise SweepFileError(yaml_problem(error, path)) from None
    if isinstance(data, dict) and {"hydra", "defaults"} & data.keys():
        return None
    if not isinstance(data, dict):
        raise SweepFileError(f"{path.name}: expected a mapping, found {type(data).__name__}")
    problems = [*_unknown(data), *_misshapen(data)]
    if not problems and not {"axes", "zip", "concat", "seeds"} & data.keys():
        problems.append("expected one of axes, zip, concat and seeds, found none")
    if problems:
        raise SweepFileError("; ".join(f"{path.name}: {problem}" for problem in problems))
    return SweepFile(**data)


def yaml_problem(error: yaml.MarkedYAMLError, path: Path | None = None) -> str:
    """The problem of a YAML file in one line, with the file's name and the number of its line."""
    mark = error.problem_mark or error.context_mark
    name = path or Path(mark.name if mark else "")
    where = f"{name.parent.name}/{name.name}"
    if "nesting depth" in (error.problem or ""):  # libyaml's form of a RecursionError
        return f"{where}: {TOO_DEEP}"
    where += f", line {mark.line + 1}" if mark else ""
    twice = re.fullmatch(r"found duplicate key (.+)", error.problem or "")
    problem = f"'{twice[1]}' occurs twice" if twice else f"{error.context or 'YAML'}: {error.problem}"
    return f"{where}: {problem}"


def _unknown(data: Mapping[str, Any]) -> list[str]:
    known = [item.name for item in fields(SweepFile)]
    problems = []
    for key in data:
        if key not in known:
            near = nearest(str(key), known)
            hint = (
                f"; did you mean '{near}'?" if near else f" of {' '.join(known)}; settings belong under axes: or base:"
            )
            problems.append(f"'{key}' is not a key{hint}")
    return problems


def _misshapen(data: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value does not have the shape that the module's docstring shows."""
    wanted = {
        "base": ("a mapping of settings", _is_mapping),
        "axes": ("a mapping of keys to lists that are not empty", _is_axes),
        "zip": ("a list of mappings of keys to lists of one length", lambda value: _all(value, _is_zip)),
        "concat": ("a list of mappings of settings", lambda value: _all(value, _is_mapping)),
        "exclude": ("a list of mappings of settings", lambda value: _all(value, _is_mapping)),
        "when": ("a list of {if: settings, set: settings}", lambda value: _all(value, _is_when)),
        "seeds": ("a list of whole numbers", lambda value: _all(value, lambda seed: type(seed) is int)),
        "prune": ("safe or off", lambda value: value in ("safe", "off", False)),
        "rank_by": ("the name of a metric", lambda value: isinstance(value, str)),
    }
    return [
        f"{key}: expected {what}, found {data[key]!r}{_as_lists(data[key]) if key == 'axes' else ''}"
        for key, (what, holds) in wanted.items()
        if key in data and not holds(data[key])
    ]


def _as_lists(axes: Any) -> str:
    """The correct spelling of the axes that were written as a text instead of a list."""
    texts: list[list[str]] = []
    for key, value in axes.items() if _is_mapping(axes) else ():
        if value is None and texts:  # {zero: range(0,4)} is read as two keys: the second is the rest of a text
            texts[-1][1] += f",{key}"
        elif isinstance(value, str):
            texts.append([key, value])
    meant = [f"{key}: [{', '.join(map(str, _values(text)))}]" for key, text in texts]
    return f"; write {' '.join(meant)}" if meant else ""


def _values(text: str) -> Sequence[object]:
    numbers = re.fullmatch(r"range\((\d+), ?(\d+)\)", text)
    return range(int(numbers[1]), int(numbers[2])) if numbers else text.replace(",", " ").split()


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_axes(value: Any) -> bool:
    return _is_mapping(value) and all(isinstance(values, list) and values for values in value.values())


def _is_zip(value: Any) -> bool:
    return _is_axes(value) and len({len(values) for values in value.values()}) == 1


def _is_when(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"if", "set"} and all(map(_is_mapping, value.values()))


def _all(value: Any, holds: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(holds, value))


def expand(sweep: SweepFile, typed: Mapping[str, Sequence[str]], limit: int = point_count.LIMIT) -> Expansion:
    """Expands a sweep to its lines. TooManyPoints, before that, if there are more than `limit`.

    `typed`: the overrides of each key of the command line, which take precedence over everything in the file. A typed
    key that is an axis of the file replaces that axis; other typed keys with a list of values are additional axes.
    """
    axes: list[list[Line]] = []
    for key, values in sweep.axes.items():
        words = typed.get(key) or [override(key, value) for value in values]
        axes.append([{key: word} for word in words])
    for group in sweep.zip:
        free = {key: values for key, values in group.items() if key not in typed}
        rows = [dict(zip(free, row, strict=True)) for row in zip(*free.values(), strict=True)]
        axes.append([{key: override(key, value) for key, value in row.items()} for row in rows])
    base = {key: override(key, value) for key, value in sweep.base.items() if key not in typed}
    axes += [[{key: word} for word in words] for key, words in typed.items() if key not in sweep.axes]
    if sweep.seeds and "seed" not in typed:
        axes.append([{"seed": override("seed", seed)} for seed in sweep.seeds])
    axes = [axis for axis in axes if axis]
    point_count.check([("+".join(axis[0]), len(axis)) for axis in axes], limit, more=len(sweep.concat))
    lines = [_joined([base, *parts]) for parts in itertools.product(*axes)]
    _check_patterns(sweep, set(itertools.chain(*lines)))
    lines = [line for line in lines if not any(_matches(line, pattern) for pattern in sweep.exclude)]
    # exclude and typed lists, which are axes, apply to the product only, so concat comes after them.
    plain = {key: words[0] for key, words in typed.items() if len(words) == 1}
    for point in sweep.concat:
        lines.append(_joined([base, {key: override(key, value) for key, value in point.items()}, plain]))
    lines = [_with_conditions(line, sweep.when, typed) for line in lines]
    varying = [key for key in dict.fromkeys(itertools.chain(*lines)) if len({line.get(key) for line in lines}) > 1]
    # A key that `when` sets follows from another key, so it does not help to tell points apart.
    implied = {key for rule in sweep.when for key in rule["set"]}
    return Expansion(tuple(lines), tuple(key for key in varying if key not in implied))


def patterns(sweep: SweepFile) -> list[tuple[str, list[str]]]:
    """The patterns of exclude and when as overrides, each with the name of its place.

    They have to be checked, because a misspelled option would silently match no point.
    """
    named = [("exclude", _choices(pattern)) for pattern in sweep.exclude]
    for rule in sweep.when:
        named.append(("when: if", _choices(rule["if"])))
        named.append(("when: set", [override(key, value) for key, value in rule["set"].items()]))
    return named


def _choices(pattern: Mapping[str, Any]) -> list[str]:
    """All overrides that match the pattern."""
    return [override(key, value) for key, wanted in pattern.items() for value in _listed(wanted)]


def _check_patterns(sweep: SweepFile, keys: set[str]) -> None:
    """Raises SweepFileError for a pattern with a key that no point has, since it would silently never match."""
    excluded = [("exclude", pattern) for pattern in sweep.exclude]
    for where, pattern in excluded + [("when: if", rule["if"]) for rule in sweep.when]:
        for key in pattern.keys() - keys:
            near = nearest(key, keys)
            hint = f"; did you mean '{near}'?" if near else f", which have {' '.join(sorted(keys))}"
            raise SweepFileError(f"{where}: '{key}' is set by none of the sweep's points{hint}")


def _joined(parts: Iterable[Line]) -> Line:
    return {key: word for part in parts for key, word in part.items()}


def _with_conditions(line: Line, rules: Sequence[Mapping[str, Any]], typed: Mapping[str, Sequence[str]]) -> Line:
    added = {
        key: override(key, value)
        for rule in rules
        if _matches(line, rule["if"])
        for key, value in rule["set"].items()
        if key not in typed
    }
    return {**line, **added}


def _matches(line: Line, pattern: Mapping[str, Any]) -> bool:
    """Whether the line has, for each key of the pattern, the pattern's value or one of its values."""
    return all(line.get(key) in [override(key, value) for value in _listed(wanted)] for key, wanted in pattern.items())


def _listed(value: Any) -> list[Any]:
    """The values that a pattern allows for a key, as a list."""
    return value if isinstance(value, list) else [value]


def override(key: str, value: Any) -> str:
    """The override "key=value", as it would be typed."""
    return f"{key}={spelled(value)}"


def spelled(value: Any) -> str:
    """A YAML value in Hydra's grammar of overrides; text is quoted if it would be read as something else."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spelled(item)}" for key, item in value.items()) + "}"
    text = str(value)
    is_word = _PLAIN.match(text) and not _NUMBER_LIKE.match(text) and text.lower() not in _RESERVED
    if not isinstance(value, str) or is_word:
        return text
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"
