"""The shapes of all records: the keys and types that their readers need, and the check of a value against a shape."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from orchestrator.config.strict import MOST_BITS
from orchestrator.records.run_state import RunState

# A shape is a type or a tuple of types; an Enum class, for the value of one of its members; a list with one shape, for
# a list of such values; or a mapping, for an object with at least these keys.
Shape = Any


class Maybe(NamedTuple):
    """The shape of a key that may be missing or null."""

    shape: Shape


class Each(NamedTuple):
    """An object with any keys, whose values all have the same shape."""

    shape: Shape


NUMBER = (int, float)
NUMBER_OR_NULL = (int, float, type(None))
SPREAD = {"p10": NUMBER, "median": NUMBER, "p90": NUMBER}
PROCESS = {"pid": int, "started": object}

STATE = {
    "state": RunState,
    "time": NUMBER,
    "label": str,
    "point": str,
    "owner": Maybe(dict),
    "contents": Each(str),
    "message": Maybe(str),
    "rank": Maybe(int),
}
ROUND = {
    "number": int,
    "began": NUMBER,
    "step_ms": [NUMBER],
    "others_share": Maybe(NUMBER),
    "used": Maybe(bool),
    "joules_per_step": Maybe(NUMBER),
    "reference_ms": Maybe([NUMBER]),
    "reference_work": Maybe(int),
}
TEXT_OR_IDS = {"ids": [int], "text": Maybe(str)}
EXAMPLE = {"prompt": TEXT_OR_IDS, "answer": TEXT_OR_IDS, "reference": TEXT_OR_IDS}
BEST = {"step": int, "loss": NUMBER, "checkpoint": Maybe(str)}
TRAINING = {
    **{"epochs": NUMBER, "tokens": NUMBER, "learned_tokens": NUMBER, "validations": int},
    **{"best": Maybe(BEST), "examples": [EXAMPLE], "last_checkpoint": Maybe(str)},
}
RESULT = {
    "world": int,
    "device": str,
    "backend": str,
    "backend_reason": Maybe(str),
    "steps": int,
    "data": {"name": str, "hash": str, "train_samples": NUMBER, "validation_samples": NUMBER},
    "batch": {"tokens_per_step": NUMBER},
    "throughput": {
        "tokens_per_second": SPREAD,
        "step_ms": SPREAD,
        **{"tokens_per_second_per_rank": NUMBER, "samples_per_second": NUMBER},
        "steps_counted": int,
        "warmup_steps": int,
        **dict.fromkeys(("model_flops_per_s", "peak_flops_per_s", "mfu"), Maybe(NUMBER)),
    },
    "phases_ms": dict.fromkeys(("forward", "backward", "communication_exposed", "optimizer", "data"), NUMBER_OR_NULL),
    "memory": {
        "states": [{"component": str, "measured_bytes": NUMBER_OR_NULL, "predicted_bytes": NUMBER_OR_NULL}],
        "formula": str,
        "activations_bytes": NUMBER_OR_NULL,
        "other_tensors_bytes": NUMBER_OR_NULL,
    },
    "dtypes": Maybe(Each(Each(NUMBER))),
    "communication": {
        "data": Each({"calls": NUMBER, "elements": NUMBER, "bytes": NUMBER}),
        "theory": Maybe(str),  # of zero-lab's own runtime
        "theory_elements": Maybe(NUMBER),
    },
    "loss": {
        "first": NUMBER_OR_NULL,
        "last": NUMBER_OR_NULL,
        "validation": NUMBER_OR_NULL,
        "perplexity": Maybe(NUMBER_OR_NULL),
        "tokens": Maybe(NUMBER),
        "weights": Maybe(str),
        "missing_steps": Maybe([[int]]),
    },
    "load": Maybe({"others_share": Maybe(NUMBER)}),
    "rounds": Maybe([ROUND]),  # results of evaluations have none
    "profile": Maybe(
        {
            "model_flops_per_step": NUMBER,
            "executed_flops_per_step": NUMBER,
            "model_flops_per_s": NUMBER,
            "peak_flops_per_s": Maybe(NUMBER),
            "mfu": Maybe(NUMBER),
            "hfu": Maybe(NUMBER),
            "peak_bytes": NUMBER,
        }
    ),
    "session": Maybe(str),  # equal for points that took turns
    "training": Maybe(TRAINING),  # of a run that trains to an end
    "checkpoints": Maybe(dict),
    "environment": Maybe(dict),
    "measured_at": Maybe(NUMBER),
}
_WAYS = [f"{way}_{unit}" for unit in ("ms", "flops") for way in ("forward", "recompute", "backward")]
PROFILE = {
    "rank": int,
    "step_ms": NUMBER,
    "modules": [{"name": str, **dict.fromkeys(_WAYS, NUMBER)}],
    "outside_ms": Each(NUMBER),
    "timeline": {
        "ms": [NUMBER],
        "bytes": Each([NUMBER]),
        "phases": [{"name": str, "start_ms": NUMBER, "end_ms": NUMBER}],
    },
    "peak": {
        "ms": NUMBER,
        "bytes": NUMBER,
        "phase": str,
        "module": str,
        "components": Each(NUMBER),
        "holders": [{"component": str, "name": str, "bytes": NUMBER, "tensors": int, "largest_bytes": NUMBER}],
    },
}
RANK = {
    **PROCESS,
    "state": RunState,
    "time": NUMBER,
    "outcome": Maybe(RunState),
    "monotonic": Maybe(NUMBER),
    "blamed": Maybe([int]),
    "memory": Maybe(dict),
    "traceback": Maybe(str),
    "explained": Maybe(bool),
}
TURNS = {
    **{"session": str, "granted": int, "number": Maybe(int)},
    **{"earlier": [ROUND], "short": Maybe(bool), "beside": Maybe([int])},
}
EXITS = Each({"code": int, "time": NUMBER, "monotonic": Maybe(NUMBER)})
JOB = {"job": str, "log": Maybe(str)}
HEARTBEAT = {"time": NUMBER}
LEFT = {"of": str, "tries": int}
SEEN = {"value": object, "since": NUMBER}  # a value that a machine has seen in a record, and since when

PROVENANCE = {"python": Maybe(str), "packages": Maybe(Each(str)), "variables": Maybe(Each(str))}
SWEEP = {"id": str, "command": Maybe([str]), "folder": Maybe(str), "rank_by": Maybe(str)}
POINT = {
    "label": str,
    "overrides": [str],
    "decision": RunState,
    "point": Maybe(str),
    "config": Maybe(dict),
    "reason": Maybe(str),
    "attempt": Maybe(str),
    "predicted_bytes": Maybe(NUMBER),
    "predicted": Maybe(dict),
    "contents": Maybe(Each(str)),
    "anchor": Maybe(str),
    "differs": Maybe(Each({"then": str, "now": str})),
    "own": Maybe(bool),
}
CONTROLLER = PROCESS
# What `compare` needs of a document that `report --json` printed.
COMPARED = {"points": [{"label": str, "point": str, "state": str, "config": Maybe(dict), "result": Maybe(RESULT)}]}


class Events(NamedTuple):
    """The lines of an event file: the key with a line's kind, and the shape of each kind. Other kinds are accepted."""

    key: str
    shapes: Mapping[str, Shape]


_POINT_RUNS = {"label": str, "attempt": str, "slots": [str], "job": Maybe(str)}
SWEEP_EVENTS = Events(
    "event",
    {
        "started": _POINT_RUNS,
        "ended": _POINT_RUNS,
        "decided": {"label": str, "state": RunState, "reason": str},
        "warning": {"text": str},
        "slots": {"text": str},
    },
)
REQUESTS = Events("do", {"cancel": {"labels": Maybe([str])}})
METRICS = Events(
    "event",
    {
        "ready": {"parameters": Maybe(NUMBER), "warning": Maybe(str), "memory_mib": Maybe(NUMBER)},
        "resumed": {"step": int, "path": str, "updates": Maybe(NUMBER), "missing_steps": Maybe([[int]])},
        "passed_over": {"path": str, "why": str},
        "saved": {"step": int},
        "step": {
            "step": int,
            "warmup": bool,
            "of": Maybe(int),  # all steps of a training to an end
            "loss": NUMBER,
            "lr": NUMBER_OR_NULL,
            "grad_norm": NUMBER_OR_NULL,
            "step_ms": NUMBER,
            "tokens_per_second": NUMBER,
            **{"memory_mib": NUMBER_OR_NULL, "memory_kind": str, "reserved_mib": Maybe(NUMBER)},
        },
        "validation": {"step": int, "loss": NUMBER, "best": Maybe(bool)},
        "example": EXAMPLE,
        "waiting": {"turn": int},
        "turn": {"turn": int},
        "extending": {"rounds": [int]},
        "repeating": {"rounds": [int]},
        "profiling": {},
        "variant": {"number": int, "of": int, "how": str},
    },
)


def misfit(value: object, shape: Shape, at: str = "") -> str | None:
    """What is wrong with the value, in words that follow "found"; None if it has the shape."""
    where = f" at '{at}'" if at else ""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{_shortened(value)}{where} in place of a list"
        return next((wrong for item in value if (wrong := misfit(item, shape[0], at))), None)
    if isinstance(shape, (Each, Mapping)):
        if not isinstance(value, dict):
            return f"{_shortened(value)}{where} in place of an object"
        return _misfit_of_keys(value, shape, at)
    if isinstance(shape, type) and issubclass(shape, Enum):
        known = value in [one.value for one in shape]
        return None if known else f"{_shortened(value)}{where}, which is no {shape.__name__}"
    is_held = not isinstance(value, int) or value.bit_length() <= MOST_BITS
    return None if isinstance(value, shape) and is_held else f"{_shortened(value)}{where}"


def _misfit_of_keys(value: Mapping[str, object], shape: Each | Mapping[str, Shape], at: str) -> str | None:
    parts = dict.fromkeys(value, shape.shape) if isinstance(shape, Each) else shape
    for key, part in parts.items():
        name = f"{at}.{key}" if at else key
        if isinstance(part, Maybe):
            if value.get(key) is None:
                continue
            part = part.shape
        if key not in value:
            return f"no '{name}'"
        if wrong := misfit(value[key], part, name):
            return wrong
    return None


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
