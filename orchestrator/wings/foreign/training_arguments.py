"""Reads transformers' TrainingArguments, from a command line or a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.config.schema import ALL_LINEAR
from orchestrator.config.strict import nearest
from orchestrator.wings.foreign.argument_names import BOOL, DEFAULTS, IDLE, KINDS, REFUSED, SAME, SETTINGS, TEXT, WHOLE
from orchestrator.wings.foreign.findings import Fate, KeyFinding, as_word
from orchestrator.wings.foreign.launchers import CommandLine
from orchestrator.wings.words.suggestions import KEYS
from zero_runtime.deepspeed.auto import AutoValues

GIVE = "give the file of DeepSpeed or Accelerate, or `accelerate launch` with --use_deepspeed --zero_stage N"
TRAINER_KEYS = ("per_device_train_batch_size", "num_train_epochs")  # a file or script of the Trainer has these
DIVIDING = ("deepspeed", "fsdp", "fsdp_config")  # these say how a model is divided: what they name has its own rows
NEAR = 0.8  # a name this similar to one of TrainingArguments is a typo, another one is the script's own
# An unknown argument with such a name is not passed over.
_DIVIDES = re.compile(
    r"(^|_)(zero|fsdp|shard|sharding|offload|deepspeed|parallel|parallelism)(_|$)|^num_(gpus|nodes|processes|machines)$"
    r"|^(nnodes|nproc_per_node)$|^(micro_|train_|global_)?(train_)?batch_size$"
)


@dataclass
class TypedArguments:
    """The arguments that a line or a file gives: `given` by name, with their types.

    own: names that are not read. ranks, nodes: those of the launcher.
    """

    given: dict[str, Any] = field(default_factory=dict)
    keys: list[KeyFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    ranks: int | None = None
    nodes: int = 1

    def value(self, name: str) -> Any:
        """The given value, or the default of TrainingArguments."""
        return self.given.get(name, DEFAULTS.get(name))

    def auto(self, hidden_size: int | None) -> AutoValues:
        """What "auto" is filled in from: the given values, and the defaults."""
        config = None if hidden_size is None else {"hidden_size": hidden_size}
        return AutoValues.of(SimpleNamespace(**{**DEFAULTS, **self.given}), SimpleNamespace(config=config))

    def divided(self) -> bool:
        """Whether the script is given DeepSpeed or FSDP."""
        given = self.given
        return bool(given.get("deepspeed") or given.get("fsdp") or isinstance(given.get("fsdp_config"), Mapping))

    def known(self) -> bool:
        """Whether the script takes TrainingArguments."""
        signs = {*self.given, *(one.key for one in self.keys)} & {*TRAINER_KEYS, "--output_dir"}
        return bool(signs) or (bool(self.given) and not self.own)


def read_arguments(line: CommandLine, settings: Mapping[str, Any]) -> TypedArguments:
    """Reads the settings of a file, and the line's arguments over them; all problems are in the result."""
    found = TypedArguments(problems=[*line.problems], ranks=line.ranks, nodes=line.nodes)
    typed = {name for name, _ in line.pairs}
    for name, value in settings.items():
        if value not in (None, "", [], {}) and name not in typed:
            _take(str(name), value, found, "")
    for name, values in line.pairs:
        _take(name, values, found, "--")
    if found.given.get("bf16") and found.given.get("fp16"):
        found.problems.append("bf16, fp16: expected at most one of them, found both; leave one out")
    found.keys += [KeyFinding(f"--{name}", " ".join(values), Fate.idle) for name, values in line.idle]
    if found.ranks is not None and not line.flags:
        found.keys.append(KeyFinding("ranks of the launcher", str(found.ranks), Fate.mapped, ("resources.ranks",)))
    if found.own:
        whose = "arguments of the script, not of TrainingArguments,"
        found.notes.append(f"{whose} are not read: {', '.join(found.own)}")
    return found


def _take(name: str, value: Any, found: TypedArguments, prefix: str) -> None:
    """Reads one argument: that of a line (prefix --) is a list of words, that of a file any value."""
    label = f"{prefix}{name}"
    values = value if prefix else _words(value)
    text = " ".join(values)
    known = SAME.get(name, name)
    if name in REFUSED:
        accepted, reason = REFUSED[name]
        if text.lower() not in accepted:
            found.problems.append(f"{' '.join([label, *values])}: {reason}; leave it out")
    elif isinstance(value, Mapping) and known in ("deepspeed", "fsdp_config"):
        found.given[known] = value
    elif known in KINDS:
        _give(known, values, found, label)
    elif name in IDLE:
        found.keys.append(KeyFinding(label, text, Fate.idle))
    else:
        _unknown(name, found, prefix)


def _words(value: Any) -> list[str]:
    """A file's value as the words of a command line."""
    if isinstance(value, (list, tuple)):
        return [str(one) for one in value]
    return [json.dumps(value) if isinstance(value, (bool, Mapping)) else str(value)]


def _give(name: str, values: list[str], found: TypedArguments, label: str) -> None:
    text = " ".join(values)
    if name == "deepspeed" and not (values and found.given.get(name, True)):
        found.given[name] = text or found.given.get(name, "")  # DeepSpeed's own flag beside --deepspeed_config
        return
    value = _converted(KINDS[name], values)
    if value is None:
        found.problems.append(f"{label}: expected {KINDS[name]}, found {text or 'nothing'!r}")
    elif name in found.given and found.given[name] != value:
        found.problems.append(f"{label}: expected it once, found {found.given[name]} and {value}")
    else:
        found.given[name] = value


def _unknown(name: str, found: TypedArguments, prefix: str) -> None:
    near = _near(name)
    if near:
        found.problems.append(f"{prefix}{name}: unknown argument; did you mean {prefix}{near}?")
    elif _DIVIDES.search(name):
        found.problems.append(
            f"{prefix}{name}: unknown to TrainingArguments, and may say how model or batch are divided; {GIVE}"
        )
    else:
        found.own.append(f"{prefix}{name}")


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
    return words | {
        "optimizer.weight_decay": as_word(float(args.value("weight_decay"))),
        "optimizer.no_decay": "true",
    }


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
        notes.append("a warm-up that is a share of the steps needs --max_steps N; the warm-up of conf/ is used")
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


_ADAPTERS = tuple((name, SETTINGS[name]) for name in ("lora_rank", "lora_alpha", "target_modules"))
_LENGTHS = ("max_steps", "num_train_epochs")
_WHY = {**dict.fromkeys(_LENGTHS, "a point runs measured steps"), "warmup_ratio": "of the steps of --max_steps N"}


def rows(args: TypedArguments, shown: Collection[str]) -> list[KeyFinding]:
    """A row for each argument that is read. shown: the sources of values that have rows of their own."""
    left = {*args.given} - {*DIVIDING, *(name for source in shown for name in source.split(", "))}
    settings = {name: (SETTINGS.get(name, KEYS.get(name, name)),) for name in args.given if name in left}
    return [
        KeyFinding(name, as_word(args.given[name]), Fate.mapped, words, _WHY.get(name, ""))
        for name, words in settings.items()
    ]


def other_words(args: TypedArguments) -> dict[str, str]:
    """The words of arguments that are in no configuration of DeepSpeed."""
    given = args.given
    words = {"recompute": "full"} if given.get("gradient_checkpointing") else {}
    if given.get("tf32"):
        words["precision.tf32"] = "true"
    for name, ours in (("seed", "seed"), ("max_seq_length", "batch.seq"), *_ADAPTERS):
        if name in given:
            words[ours] = as_word(given[name])
    if len(left := [ours for _, ours in _ADAPTERS if ours not in words]) < len(_ADAPTERS):
        words["adapter"] = "lora"
        if "adapter.targets" in words:  # typed as words or with commas; `all` is LLaMA-Factory's
            names = words["adapter.targets"].replace(",", " ").split()
            words["adapter.targets"] = ALL_LINEAR if names in (["all"], [ALL_LINEAR]) else as_word(names)
        args.notes += [f"{', '.join(left)}: not given, so of conf/; your tool's default may be another"] if left else []
    if "model_name_or_path" in given:
        path = Path(given["model_name_or_path"])
        if path.is_dir():
            words |= {"model": "pretrained", "model.path": str(path)}
        else:
            args.notes.append(f"--model_name_or_path {path}: no folder here; give model=NAME, or its folder")
    if {*_LENGTHS} & {*given}:
        length = f"{given['max_steps']} steps" if given.get("max_steps", -1) > 0 else "epochs"
        args.notes.append(
            f"{length} of training: a point here runs measure.warmup_steps + measure.steps steps, which is also the "
            "length of its schedule; measure=train train.max_steps=N or train.epochs=N trains to an end"
        )
    return words
