"""Finds out whose file or command line it is, and has it read: DeepSpeed, Accelerate or the Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from orchestrator.config.strict import Refusal
from orchestrator.wings.foreign.accelerate_file import SECTIONS, is_accelerate, read_accelerate, read_counts
from orchestrator.wings.foreign.accelerate_flags import kind_of, over_file
from orchestrator.wings.foreign.findings import Foreign
from orchestrator.wings.foreign.fsdp import read_fsdp, trainer_words
from orchestrator.wings.foreign.importing import OURS
from orchestrator.wings.foreign.launchers import CommandLine, read_line
from orchestrator.wings.foreign.training_arguments import GIVE, TRAINER_KEYS, TypedArguments, read_arguments
from zero_runtime.deepspeed.json_text import load
from zero_runtime.deepspeed.keys import HOMES, TOP

_KNOWN = "a file of DeepSpeed, Accelerate or TrainingArguments"
_DEFAULT_FILE = (
    "accelerate launch: expected --use_deepspeed, --use_fsdp, --multi_gpu or --config_file, found none: the default "
    "file of Accelerate decides; name it by --config_file"
)
_KEYS_SHOWN = 6


def source_of(path: Path | None, typed_line: str | None) -> tuple[Foreign, TypedArguments | None]:
    """What a file and a command line say, and the arguments of the script where there are any.

    Refusal and PlanError if they cannot be read, or if they do not say how the model is divided.
    """
    if path is not None and " " in str(path) and not path.exists():
        raise Refusal([f"expected a file, found a command line; its place is: --args '{path}'"])
    line = CommandLine() if typed_line is None else read_line(typed_line)
    files = _files([path, line.file, line.flags.pop("config_file", None)])
    tool, launcher, config = (files.get(who) for who in (_TOOL, _ACCELERATE, _DEEPSPEED))
    args = read_arguments(line, tool.content if tool else {})
    kind = kind_of(line.flags, launcher.content if launcher else None)
    _refuse_contradictions(args, kind, launcher or config, line)
    if kind is not None and not args.divided():
        found = _launched(launcher, line.flags, args)
    elif args.given.get("deepspeed"):
        named = args.given["deepspeed"]
        found = Foreign(str(named if isinstance(named, str) else tool and tool.path), must_match=True)
        found.config = _config(named, tool)
    elif config:
        found = Foreign(str(config.path), config.content, must_match=True)
    else:
        found = _of_arguments(args, tool)
    if launcher and args.divided():
        read_counts(launcher.content, found)
    if args.known() or args.divided():
        return found, args
    unread = [f"--{name}" for name in args.given] + args.own
    if unread:
        found.notes.append(f"arguments of a script that is not the Trainer's are not read: {', '.join(unread)}")
    found.problems += args.problems
    found.keys += args.keys
    return found, None


_TOOL, _ACCELERATE, _DEEPSPEED = "the script", "Accelerate", "DeepSpeed"


class _File(NamedTuple):
    path: Path
    content: dict[str, Any]


def _files(paths: Sequence[Path | str | None]) -> dict[str, _File]:
    """The files by what reads them, at most one for each."""
    found: dict[str, _File] = {}
    for path in dict.fromkeys(Path(one) for one in paths if one is not None):
        content = content_of(path)
        if is_accelerate(content) or {*content} & {*TRAINER_KEYS}:
            kind = _ACCELERATE if is_accelerate(content) else _TOOL
        elif not content or {*content} & {*TOP, *HOMES, OURS}:
            kind = _DEEPSPEED
        else:
            raise Refusal([f"{path}: expected {_KNOWN}, found the keys {', '.join([*content][:_KEYS_SHOWN])}"])
        flat = [key for key in SECTIONS if kind == _ACCELERATE and not isinstance(content.get(key) or {}, Mapping)]
        if flat:
            raise Refusal([f"{path}: {key}: expected a section with keys, found {content[key]}" for key in flat])
        if kind in found:
            raise Refusal([f"{found[kind].path} and {path} are both for {kind}: expected one file; leave one out"])
        found[kind] = _File(path, content)
    return found


def _refuse_contradictions(args: TypedArguments, kind: str | None, file: _File | None, line: CommandLine) -> None:
    """Refuses a line on which two say how the model is divided, or nobody does."""
    named, problems = args.given.get("deepspeed"), list(args.problems)
    if named == "" and not file:
        problems.append(f"--deepspeed names no file, so the script makes the configuration; {GIVE}")
    elif named and isinstance(named, str) and file and kind is None and Path(named).absolute() != file.path.absolute():
        problems.append(f"FILE is {file.path} and --args names --deepspeed {named}: expected one file; leave one out")
    elif args.divided() and kind in ("DEEPSPEED", "FSDP"):
        problems.append(
            f"--deepspeed or --fsdp of the script beside {kind} of the launcher: expected one; leave one out"
        )
    elif kind is not None and file and not is_accelerate(file.content):
        problems.append(f"{file.path} is a file of DeepSpeed: the launcher takes it as --deepspeed_config_file")
    elif line.launcher == "accelerate" and kind is None and not (args.divided() or file):
        problems.append(_DEFAULT_FILE)
    elif args.divided():
        problems += [
            f"--{name}: found in the launcher's arguments, and --deepspeed or --fsdp in the script's; leave it out"
            for name in line.flags
            if name.startswith(("mixed_precision", "zero", "offload", "gradient", "deepspeed_config", "fsdp"))
        ]
    if len(problems) > len(args.problems):
        raise Refusal(problems)


def _config(named: str | Mapping[str, Any], tool: _File | None) -> dict[str, Any]:
    """A relative name is looked for here, then beside the file that names it."""
    if isinstance(named, Mapping):
        return dict(named)
    path = Path(named)
    return load(path if tool is None or path.is_absolute() or path.is_file() else tool.path.parent / path)


def _launched(file: _File | None, flags: Mapping[str, str], args: TypedArguments) -> Foreign:
    """What Accelerate's launcher gets; a dtype of the Trainer's arguments is set there too."""
    problems: list[str] = []
    content = over_file(flags, file.content if file else {}, problems)
    mixed = next((name for name in ("bf16", "fp16") if args.value(name)), None)
    given = content.get("mixed_precision")
    if mixed is not None and given in (None, False, "no", mixed):
        content["mixed_precision"] = mixed
    elif mixed is not None:
        problems.append(f"--{mixed}: the launcher's mixed_precision is {given}; leave one out")
    if args.ranks is not None:
        content.setdefault("num_processes", args.ranks)
        content.setdefault("num_machines", args.nodes)
    source, folder = ("--args", Path()) if file is None else (str(file.path), file.path.parent)
    found = read_accelerate(content, source, folder)
    found.problems[:0] = problems
    return found


def content_of(path: Path) -> dict[str, Any]:
    """The content of a JSON or YAML file. PlanError and Refusal say what is wrong."""
    if path.suffix not in (".yaml", ".yml"):
        return load(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        told = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise Refusal([f"{path}: expected a YAML file, found: {told}"]) from None
    if not isinstance(content, dict):
        raise Refusal([f"{path}: expected keys and values, found a {type(content).__name__}"])
    return {str(key): value for key, value in content.items()}


def _of_arguments(args: TypedArguments, tool: _File | None) -> Foreign:
    """Arguments without a configuration of DeepSpeed: FSDP by the Trainer, or plain data parallelism."""
    found = Foreign("--args" if tool is None else str(tool.path))
    mixed = next((name for name in ("bf16", "fp16") if args.value(name)), "no")
    found.config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    found.config["gradient_clipping"] = "auto"
    file = args.given.get("fsdp_config")
    if args.divided():
        settings = file if isinstance(file, Mapping) else content_of(Path(file)) if file else {}
        per_machine = None if args.ranks is None else args.ranks // args.nodes
        read_fsdp({**settings, **trainer_words(args.given.get("fsdp", ""))}, mixed, per_machine, found)
        return found
    if tool is None and not (args.known() or args.problems):
        found.problems.append(f"--args: expected how the model is divided, found nothing about it; {GIVE}")
    found.config["zero_optimization"] = {"stage": 0}
    if mixed != "no":
        found.config[mixed] = {"enabled": True}
        found.notes.append(
            f"--{mixed} without DeepSpeed is autocast in the Trainer: fp32 parameters and norms, {mixed} products; "
            f"precision={mixed} computes all of them in {mixed}, with fp32 masters"
        )
    return found
