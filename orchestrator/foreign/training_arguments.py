"""Reads a command line of a script with transformers' TrainingArguments, with or without its launcher."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.config.strict import nearest
from orchestrator.foreign.argument_names import (
    BOOL,
    DEFAULTS,
    IDLE,
    KINDS,
    LAUNCHER_RANKS,
    REFUSED,
    SAME,
    TEXT,
    WHOLE,
)
from orchestrator.foreign.findings import Fate, KeyFinding, as_word
from zero_runtime.deepspeed.auto import AutoValues

NEAR = 0.8  # a name this similar to one of TrainingArguments is a typo, another one is the script's own


@dataclass
class TypedArguments:
    """The arguments that a line gives: `given` by name, with their types; `ranks` of its launcher."""

    given: dict[str, Any] = field(default_factory=dict)
    keys: list[KeyFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ranks: int | None = None

    def value(self, name: str) -> Any:
        """The given value, or the default of TrainingArguments."""
        return self.given.get(name, DEFAULTS.get(name))

    def auto(self, hidden_size: int | None) -> AutoValues:
        """What "auto" is filled in from: the given values, and the defaults of TrainingArguments."""
        args = SimpleNamespace(**{**DEFAULTS, **self.given})
        config = None if hidden_size is None else {"hidden_size": hidden_size}
        return AutoValues.of(args, SimpleNamespace(config=config))


def read_arguments(line: str) -> TypedArguments:
    """Reads a line such as "--per_device_train_batch_size 4 --bf16"; all problems are in the result."""
    found = TypedArguments()
    try:
        words = shlex.split(line)
    except ValueError as error:
        found.problems.append(f"--args: expected words as a shell reads them, found: {error}")
        return found
    own: list[str] = []
    for name, values in _pairs(_after_launcher(words, found)):
        _take(name, values, found, own)
    if own:
        found.notes.append(f"arguments of the script, not of TrainingArguments, are not read: {', '.join(own)}")
    return found


def _after_launcher(words: Sequence[str], found: TypedArguments) -> list[str]:
    """The words after the script's name; those before it are the launcher's, of which the number of ranks is read."""
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        return list(words)
    for name, values in _pairs(words[:script]):
        if name in LAUNCHER_RANKS and values and values[0].isdigit() and int(values[0]):
            found.ranks = int(values[0])
            found.keys.append(KeyFinding(name, values[0], Fate.mapped, ("resources.ranks",)))
    return list(words[script + 1 :])


def _pairs(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    pairs: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            pairs.append((name.replace("-", "_"), [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(word)
    return pairs


def _take(name: str, values: list[str], found: TypedArguments, own: list[str]) -> None:
    text = " ".join(values)
    known = SAME.get(name, name)
    if known in KINDS:
        value = _converted(KINDS[known], values)
        if value is None:
            found.problems.append(f"--{name}: expected {KINDS[known]}, found {text or 'nothing'!r}")
        elif known in found.given and found.given[known] != value:
            found.problems.append(f"--{name}: expected it once, found {found.given[known]} and {value}")
        else:
            found.given[known] = value
    elif name in REFUSED:
        off, reason = REFUSED[name]
        if text not in off:
            found.problems.append(f"--{name} {text}: {reason}; leave it out")
    elif name in IDLE:
        found.keys.append(KeyFinding(f"--{name}", text, Fate.idle))
    else:
        near = _near(name)
        if near:
            found.problems.append(f"--{name}: unknown argument; did you mean --{near}?")
        else:
            own.append(f"--{name}")


def _near(name: str) -> str | None:
    import difflib  # here: only a name that is not known needs it

    near = nearest(name, [*KINDS, *IDLE, *REFUSED])
    close = near is not None and difflib.SequenceMatcher(None, name, near).ratio() >= NEAR
    return near if close else None


def _converted(kind: str, values: list[str]) -> Any:
    """The value of this kind; None if it is none."""
    text = " ".join(values)
    if kind == BOOL:
        return {"": True, "true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if kind == TEXT:
        return text or None
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return number if kind != WHOLE else int(number) if number == int(number) else None


_SCHEDULES: dict[str, tuple[str, str]] = {
    "linear": ("warmup_decay", "the Trainer's rise is at step / warm-up, ours one update later, as DeepSpeed's"),
    "cosine": ("cosine", "the Trainer's first update has rate 0, ours the first step of the rise"),
    "constant": ("constant", ""),
    "constant_with_warmup": ("warmup", "the Trainer's rise is one update ahead of ours, which is DeepSpeed's"),
    "cosine_with_min_lr": ("cosine", "the Trainer's first update has rate 0, ours the first step of the rise"),
}
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adamw_anyprecision")
_OPTIMIZERS = {
    **dict.fromkeys(_ADAMW, "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "adamw"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion"),
    "sgd": "sgd",
}


def optimizer_words(args: TypedArguments, problems: list[str]) -> dict[str, str]:
    """The Trainer's own optimizer, for a configuration without the section optimizer.

    It leaves norms and biases out of weight decay.
    """
    name = str(args.value("optim"))
    kind = _OPTIMIZERS.get(name)
    if kind is None:
        known = ", ".join(_OPTIMIZERS)
        problems.append(f"--optim {name}: it has no counterpart here; expected one of {known}")
        return {}
    words = {"optimizer": kind, "optimizer.lr": as_word(float(args.value("learning_rate")))}
    if kind.startswith("adamw"):
        numbers = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
    else:
        numbers = {"beta1": "adam_beta1", "beta2": "adam_beta2"} if kind == "lion" else {}
        words |= {"optimizer.momentum": "0.0"} if kind == "sgd" else {}
    words |= {f"optimizer.{ours}": as_word(float(args.value(theirs))) for ours, theirs in numbers.items()}
    return words | {"optimizer.weight_decay": as_word(float(args.value("weight_decay"))), "optimizer.no_decay": "true"}


def schedule_words(args: TypedArguments, notes: list[str], problems: list[str]) -> dict[str, str]:
    """The Trainer's own schedule, for a configuration without the section scheduler."""
    name = str(args.value("lr_scheduler_type"))
    if name not in _SCHEDULES:
        problems.append(
            f"--lr_scheduler_type {name}: it has no counterpart here; expected one of {', '.join(_SCHEDULES)}"
        )
        return {}
    kind, note = _SCHEDULES[name]
    if note:
        notes.append(f"lr_scheduler_type {name}: {note}")
    words = {"scheduler": kind}
    steps = args.auto(None).warmup_steps
    if steps is None:
        notes.append("a warm-up that is a share of the steps needs --max_steps; the warm-up of conf/ is used")
    elif kind != "constant":
        words["scheduler.warmup_steps"] = as_word(steps if kind == "cosine" else max(1, steps))
    if kind in ("warmup", "warmup_decay"):
        words |= {"scheduler.warmup_type": "linear", "scheduler.start_lr_ratio": "0.0"}
    if kind == "cosine":
        words["scheduler.min_lr_ratio"] = as_word(_lowest_ratio(args, name, problems))
    return words


def _lowest_ratio(args: TypedArguments, name: str, problems: list[str]) -> float:
    if name == "cosine":
        return 0.0
    try:
        given: Mapping[str, Any] = json.loads(str(args.value("lr_scheduler_kwargs")))
        rate = (
            float(given["min_lr"]) / float(args.value("learning_rate")) if "min_lr" in given else given["min_lr_rate"]
        )
        return float(f"{rate:.12g}")
    except (ValueError, TypeError, KeyError, ZeroDivisionError):
        problems.append(
            f"--lr_scheduler_type {name}: expected --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}' or min_lr, found "
            f"{args.value('lr_scheduler_kwargs')}"
        )
        return 0.0


def other_words(args: TypedArguments) -> dict[str, str]:
    """The words of arguments that are in no configuration of DeepSpeed."""
    given, words = args.given, {}
    if given.get("gradient_checkpointing"):
        words["recompute"] = "full"
    if given.get("tf32"):
        words["precision.tf32"] = "true"
    if "seed" in given:
        words["seed"] = as_word(given["seed"])
    if "max_seq_length" in given:
        words["batch.seq"] = as_word(given["max_seq_length"])
    if "model_name_or_path" in given:
        path = Path(given["model_name_or_path"])
        if path.is_dir():
            words |= {"model": "pretrained", "model.path": str(path)}
        else:
            args.notes.append(f"--model_name_or_path {path}: no folder here; give model=NAME, or its folder")
    if "max_steps" in given or "num_train_epochs" in given:
        length = f"{given['max_steps']} steps" if given.get("max_steps", -1) > 0 else "epochs"
        args.notes.append(
            f"{length} of training: a point here runs measure.warmup_steps + measure.steps steps, which is also the "
            "length of its schedule; measure=train train.max_steps=N or train.epochs=N trains to an end"
        )
    return words
