"""Short names, made of option names, for a point within its sweep and for a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from orchestrator.compose.settable import is_native

if TYPE_CHECKING:
    from orchestrator.compose.composition import Composed

# Groups whose options say what they are: stage2, bf16, gpt2. Of all others, "full" or "none" could be any group's.
SELF_NAMED = ("engine", "zero", "precision", "model", "optimizer", "hardware", "experiment", "sweeps")
# Settings that never appear in a label: where a run goes and how it is recorded does not distinguish it.
UNTOLD = ("output", "tracking", "cluster", "hydra.mode", "resources.time_limit_min", "resources.stuck_s")


def label(composed: Composed, axes: Sequence[str]) -> str:
    """The values that vary in the sweep ("stage2-recompute_full"); for a single run, stage, precision and all other
    overrides, with the base names of paths."""
    said = [word for word in composed.overrides if not word.startswith("--")]
    asked = dict(word.lstrip("+~").partition("=")[::2] for word in said)
    # A point of concat may lack a key that others have.
    axes = [key.lstrip("+") for key in axes]
    if told := [key for key in axes if key in asked and not _of_another_engine(composed, key)]:
        return "-".join(_part(composed, key, asked[key]) for key in told)
    rest = [key for key in asked if key not in ("engine", "zero", "precision", "zero.stage") and not _is_untold(key)]
    chosen = {**composed.choices, **({"zero": f"stage{asked['zero.stage']}"} if "zero.stage" in asked else {})}
    parts = [str(chosen[group]) for group in ("engine", "zero", "precision") if group != "engine" or group in asked]
    return "-".join(parts + [_part(composed, key, _base_name(key, asked[key])) for key in rest])


def sweep_name(axes: Iterable[str], overrides: Sequence[str]) -> str:
    """The name of the sweep file, or the last words of the keys that vary ("zero_micro") if there is none."""
    chosen = [word.removeprefix("sweeps=") for word in overrides if word.startswith("sweeps=")]
    words = "_".join(axis.rpartition(".")[2] for axis in axes)
    return _clean(chosen[-1] if chosen else words or "sweep", slice(40))


def _is_untold(key: str) -> bool:
    return key in UNTOLD or key.split(".")[0] in UNTOLD


def _of_another_engine(composed: Composed, key: str) -> bool:
    """Whether it is a setting of an engine that does not train the point, and so does not distinguish it."""
    return is_native(key) and key.split(".")[1] != composed.values["engine"]["kind"]


def _base_name(key: str, value: str) -> str:
    """The last name of a path; another value, or the path of an interpreter, as it is."""
    return value if key == "engine.python" or re.search(r"[\[{,]", value) else value.strip("'\"/").rpartition("/")[2]


def _part(composed: Composed, key: str, value: str) -> str:
    """One part of a label: an option's name, after that of its group unless it is SELF_NAMED; or the last word of a key
    with a number, or with a word after a _. A last word that is also a group's name has its own group before it."""
    if key in SELF_NAMED:
        return _clean(value)
    if key == "engine.python":
        return environment_name(value)
    last = key.rpartition(".")[2]
    last = key if last in composed.choices else last
    if re.fullmatch(r"\d+\.\d{6,}(e[+-]?\d+)?", value):
        value = f"{float(value):.4g}"  # samplers give 17 digits; the overrides keep all of them
    return _clean(f"{last}{value}" if re.match(r"^[\d.]", value) else f"{last}_{value}")


def environment_name(python: str) -> str:
    """The name of the environment of an interpreter, ds198 for /a/ds198/bin/python, or of what holds its .venv."""
    folders = [
        name for name in python.strip("'\"").split("/")[:-1] if name not in ("", ".", "..", "bin", ".venv", "venv")
    ]
    return _clean(folders[-1]) if folders else "this_python" if python == "null" else "other_python"


def _clean(text: str, kept: slice = slice(-40, None)) -> str:
    # A minus divides the parts, except that of an exponent, as in lr6.8e-05.
    return re.sub(r"(?!(?<=\de)-\d)[^\w.+]+", "_", text.strip("'\"")).strip("_")[kept] or "_"
