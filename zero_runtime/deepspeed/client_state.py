"""The client state of a checkpoint as JSON from which it comes back as it was: with its keys, tuples and numbers."""

from __future__ import annotations

import math
from typing import Any

from zero_runtime.errors import PlanError, brief

_PLAIN = (bool, int, float, str, type(None))
# What JSON lacks becomes an object with one of these keys: a tuple, a dict whose keys are not all texts, nan and inf.
_TUPLE, _PAIRS, _NUMBER = "//tuple", "//pairs", "//number"


def to_json(value: Any, where: str = "client_state") -> Any:
    """The value in plain JSON. Raises PlanError, which names the place, for what would come back as something else."""
    if type(value) in _PLAIN:
        return {_NUMBER: repr(value)} if type(value) is float and not math.isfinite(value) else value
    if type(value) is list:
        return [to_json(one, f"{where}[{place}]") for place, one in enumerate(value)]
    if type(value) is tuple:
        return {_TUPLE: to_json(list(value), where)}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("//") for key in value):
            return {key: to_json(one, f"{where}[{key!r}]") for key, one in value.items()}
        pairs = [(to_json(key, f"a key of {where}"), to_json(one, f"{where}[{key!r}]")) for key, one in value.items()]
        return {_PAIRS: list(map(list, pairs))}
    raise PlanError(_trouble(where, value))


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(from_json(value[_TUPLE]))
    if value.keys() == {_PAIRS}:
        return {from_json(key): from_json(one) for key, one in value[_PAIRS]}
    if value.keys() == {_NUMBER}:
        return float(value[_NUMBER])
    return {key: from_json(one) for key, one in value.items()}


def _trouble(where: str, found: object) -> str:
    return (
        f"engine.save_checkpoint: {where}: expected numbers, texts, True, False, None, and lists, tuples and dicts of "
        f"them, found a {type(found).__name__} ({brief(found)}); convert it (`.item()`, `.tolist()`, `vars(...)`), or "
        "save it in a file of its own with torch.save"
    )
