"""The client state and the schedule of a checkpoint as JSON from which they come back as they were.

Keys, tuples, numbers and dtypes are kept; tensors come back on the CPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from zero_runtime.errors import PlanError, brief

_PLAIN = (bool, int, float, str, type(None))
# What JSON lacks becomes an object with one of these keys: a tuple, a dict whose keys are not all texts, nan and inf.
_TUPLE, _PAIRS, _NUMBER, _COUNTER = "//tuple", "//pairs", "//number", "//counter"
_TENSOR, _ARRAY = "//tensor", "//array"
_MOST_ELEMENTS = 1 << 16  # of a tensor or an array: the JSON is read at once
_ARRAY_DTYPES = "?bhilqBHILQefd"  # characters of numpy's dtypes whose elements are Python's numbers
_BACK: dict[str, Callable[[Any], Any]] = {
    **{_TUPLE: tuple, _PAIRS: dict, _NUMBER: float, _COUNTER: Counter},
    _TENSOR: lambda found: torch.tensor(found[1], dtype=getattr(torch, found[0])),
    _ARRAY: lambda found: np.array(found[1], found[0])[()],  # a scalar, if it has no axis
}


def to_json(value: Any, where: str = "client_state") -> Any:
    """The value in plain JSON. Raises PlanError, which names the place, for what would come back as something else."""
    if type(value) in _PLAIN:
        return {_NUMBER: repr(value)} if type(value) is float and not math.isfinite(value) else value
    if type(value) is list:
        return [to_json(one, f"{where}[{place}]") for place, one in enumerate(value)]
    if type(value) is tuple:
        return {_TUPLE: to_json(list(value), where)}
    if type(value) is Counter:
        return {_COUNTER: to_json(dict(value), where)}
    if type(value) is torch.Tensor and not value.is_complex() and value.numel() <= _MOST_ELEMENTS:
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), to_json(value.tolist(), where)]}
    if (
        isinstance(value, (np.generic, np.ndarray))
        and value.dtype.char in _ARRAY_DTYPES
        and value.size <= _MOST_ELEMENTS
    ):
        return {_ARRAY: [value.dtype.str, to_json(value.tolist(), where)]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("//") for key in value):
            return {key: to_json(one, f"{where}[{key!r}]") for key, one in value.items()}
        pairs = [(to_json(key, f"a key of {where}"), to_json(one, f"{where}[{key!r}]")) for key, one in value.items()]
        return {_PAIRS: list(map(list, pairs))}
    raise PlanError(
        f"engine.save_checkpoint: {where}: expected numbers, texts, True, False, None, tensors of up to "
        f"{_MOST_ELEMENTS} elements, and lists, tuples and dicts of them, found a {type(value).__name__} "
        f"({brief(value)}); convert it (`.tolist()`, `vars(...)`), or save it in a file of its own with torch.save"
    )


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _BACK:
        return _BACK[tag](from_json(value[tag]))
    return {key: from_json(one) for key, one in value.items()}
