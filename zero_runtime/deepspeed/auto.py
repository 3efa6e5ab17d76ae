"""Fills in the values "auto" of a DeepSpeed configuration, from arguments with the names of TrainingArguments.

The rules are those that transformers publishes for its Trainer: which argument fills which key, the sizes that follow
from the model's hidden size, and which other values must equal the arguments. Standard library only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from zero_runtime.deepspeed.schema import AUTO
from zero_runtime.deepspeed.zero_section import SIZES_BY_HIDDEN

_LOWEST_WARMUP = 1  # DeepSpeed refuses a warm-up of no steps


@dataclass(frozen=True)
class AutoValues:
    """What "auto" is filled in from; None is not known.

    per_device_train_batch_size: samples of a micro-batch on one rank. warmup_steps, total_steps: optimizer updates.
    hidden_size: the model's, for sizes of buckets.
    """

    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    learning_rate: float | None = None
    betas: tuple[float, float] | None = None
    adam_epsilon: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    hidden_size: int | None = None

    @classmethod
    def of(cls, args: object, model: object = None) -> AutoValues:
        """The values of an object with the names of TrainingArguments, and of a model with a transformers config.

        Names that the object lacks are not known. A number of steps is known if `max_steps` is above 0.
        """
        taken = {one.name: getattr(args, one.name, None) for one in fields(cls)}
        beta1, beta2 = getattr(args, "adam_beta1", None), getattr(args, "adam_beta2", None)
        taken["betas"] = None if beta1 is None or beta2 is None else (float(beta1), float(beta2))
        steps = getattr(args, "max_steps", None)
        taken["total_steps"] = steps if steps is not None and steps > 0 else taken["total_steps"]
        taken["warmup_steps"] = _warmup_steps(args, taken["total_steps"])
        for name in ("fp16", "bf16"):
            taken[name] = taken[name] or getattr(args, f"{name}_full_eval", None) or taken[name]
        taken["hidden_size"] = hidden_size_of(getattr(model, "config", None))
        return cls(**taken)


class AutoValue(NamedTuple):
    """A value for a key that is "auto", and the names of the arguments that it comes from."""

    value: Any
    source: str


class _Rule(NamedTuple):
    """Where the value of one key comes from. `must_match`: a value in the file must equal that of the arguments."""

    source: str
    value: Callable[[AutoValues], Any]
    must_match: bool = True


def _plain(name: str) -> _Rule:
    return _Rule(name, lambda values: getattr(values, name))


_BATCH, _PER_RANK, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _size(rule: Callable[[int], int]) -> _Rule:
    return _Rule(
        "the model's hidden_size",
        lambda values: None if values.hidden_size is None else rule(values.hidden_size),
        must_match=False,
    )


_RULES: dict[str, _Rule] = {
    _PER_RANK: _plain("per_device_train_batch_size"),
    _STEPS: _plain("gradient_accumulation_steps"),
    "gradient_clipping": _plain("max_grad_norm"),
    "optimizer.params.lr": _plain("learning_rate"),
    "optimizer.params.betas": _Rule("adam_beta1, adam_beta2", lambda values: values.betas and [*values.betas]),
    "optimizer.params.eps": _plain("adam_epsilon"),
    "optimizer.params.weight_decay": _plain("weight_decay"),
    "scheduler.params.warmup_min_lr": _Rule("always", lambda values: 0, must_match=False),
    "scheduler.params.warmup_max_lr": _plain("learning_rate"),
    "scheduler.params.warmup_num_steps": _Rule(
        "warmup_steps, warmup_ratio",
        lambda values: None if values.warmup_steps is None else max(_LOWEST_WARMUP, values.warmup_steps),
    ),
    "scheduler.params.total_num_steps": _Rule("max_steps", lambda values: values.total_steps),
    "fp16.enabled": _plain("fp16"),
    "bf16.enabled": _plain("bf16"),
    "bfloat16.enabled": _plain("bf16"),
    **{path: _size(rule) for path, rule in SIZES_BY_HIDDEN.items()},
}


def auto_values(config: Mapping[str, Any], values: AutoValues, world: int | None = None) -> dict[str, AutoValue]:
    """The value of each key that is "auto" and whose source is known, by the key's path.

    world: the number of ranks, for train_batch_size, which is the product of the other two sizes and the ranks.
    """
    found = {}
    for path, value in leaves(config):
        if value == AUTO and path in _RULES:
            known = _RULES[path].value(values)
            if known is not None:
                found[path] = AutoValue(known, _RULES[path].source)
    if config.get(_BATCH) == AUTO and world is not None:
        sizes = [found[name].value if name in found else config.get(name) for name in (_PER_RANK, _STEPS)]
        micro = sizes[0] or values.per_device_train_batch_size
        steps = sizes[1] or values.gradient_accumulation_steps or 1
        if isinstance(micro, int) and isinstance(steps, int):
            found[_BATCH] = AutoValue(micro * steps * world, f"{micro} x {steps} x {world} ranks")
    return found


def with_values(config: Mapping[str, Any], found: Mapping[str, AutoValue]) -> dict[str, Any]:
    """A copy of the configuration with these values; other keys that are "auto" stay so."""
    filled: dict[str, Any] = copy.deepcopy(dict(config))
    for path, one in found.items():
        *outer, last = path.split(".")
        inner = filled
        for name in outer:
            inner = inner[name]
        inner[last] = one.value
    return filled


def mismatches(
    config: Mapping[str, Any], values: AutoValues, world: int | None = None, given: Container[str] | None = None
) -> list[str]:
    """One line for each key whose value in the file is not that of the arguments, which the Trainer refuses. given: the
    arguments that were given, where that is known; the others have their defaults."""
    lines = []
    for path, value in leaves(config):
        rule = _RULES.get(path)
        if rule is None or value == AUTO or value is None or not rule.must_match:
            continue
        expected = rule.value(values)
        same = [*value] == expected if isinstance(value, (list, tuple)) else value == expected
        if expected is not None and not same:
            default = "" if given is None or any(name in given for name in rule.source.split(", ")) else ", not given"
            lines.append(f"{path}: {value!r} in the file, {expected!r} in the arguments ({rule.source}{default})")
    sizes = (values.per_device_train_batch_size, values.gradient_accumulation_steps, world)
    total = config.get(_BATCH)
    if isinstance(total, int) and None not in sizes:
        product = math.prod(size for size in sizes if size is not None)
        if total != product:
            lines.append(
                f"{_BATCH}: {total} in the file, {' x '.join(map(str, sizes))} ranks = {product} in the arguments"
            )
    return lines


def hidden_size_of(config: Any) -> int | None:
    """The hidden size of a transformers configuration, an object or a mapping; of several the largest; None if none."""
    for owner in (config, _field(config, "text_config")):
        size = _field(owner, "hidden_size") or max(_field(owner, "hidden_sizes") or [0])
        if size:
            return int(size)
    for name in ("n_embd", "d_model"):  # what GPT-2 and T5 call it in a file; their objects have hidden_size too
        if _field(config, name):
            return int(_field(config, name))
    return None


def _field(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _warmup_steps(args: object, total: int | None) -> int | None:
    """`warmup_steps`, or `warmup_ratio` of the total; a number of warm-up steps below 1 is a share of the total."""
    steps, ratio = getattr(args, "warmup_steps", None), getattr(args, "warmup_ratio", None)
    if steps is not None and steps >= 1:
        return int(steps)
    share = steps or ratio
    if share:
        return None if total is None else math.ceil(total * share)
    return None if steps is None and ratio is None else 0


def leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The path and the value of each key that is no section; an empty section counts as a value."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
