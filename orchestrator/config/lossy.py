"""Which settings of a configuration round more than its exact form does, and what that form is.

A configuration is exact if its masters and the optimizer's states are in fp32 and its messages in the dtypes of
`precision`. Works on plain data, as records hold it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# Key, its exact value, and the words for another one. Kinds of optimizers: `_KINDS`.
_KEYS: tuple[tuple[str, str, object, str], ...] = (
    ("precision", "master", "fp32", "{} masters"),
    ("precision", "weights", None, "{} weights"),
    ("optimizer", "state_dtype", "fp32", "{} states"),
    ("zero", "gather_dtype", None, "{} gathers"),
    ("zero", "reduce_dtype", None, "{} reductions"),
)
_KINDS = {"adamw8bit": ("adamw", "8-bit states"), "onebitadam": ("adamw", "1-bit momentum")}


def lossy_words(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What is lossy in a configuration, such as "int8 gathers"; empty if nothing is."""
    found = []
    for group, key, exact, words in _KEYS:
        value = (config.get(group) or {}).get(key)
        if value not in (None, exact):
            found.append(words.format(value))
    if (config.get("zero") or {}).get("error_feedback"):
        found[-1] += " with error feedback"  # which needs reductions, the last of the keys
    kind = (config.get("optimizer") or {}).get("kind")
    return (*found, _KINDS[kind][1]) if kind in _KINDS else tuple(found)


def exact_form(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration with nothing lossy, to compare it with."""
    exact: dict[str, Any] = copy.deepcopy(dict(config))
    for group, key, value, _ in _KEYS:
        if group in exact and (exact[group].get(key) is not None or value is None):
            exact[group][key] = value
    if "zero" in exact:
        exact["zero"]["error_feedback"] = False
    optimizer = exact.get("optimizer") or {}
    if optimizer.get("kind") in _KINDS:
        optimizer |= {"kind": _KINDS[optimizer["kind"]][0], "state_dtype": "fp32", "warmup_updates": None}
    return exact
