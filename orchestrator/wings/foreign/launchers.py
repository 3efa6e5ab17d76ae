"""Splits a command line into its launcher, which says ranks and machines, and the arguments of its script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from orchestrator.wings.foreign.accelerate_flags import is_flag

Pair = tuple[str, list[str]]
ACCELERATE = "accelerate launch"
_SHORT = {"-m": "--module", "-i": "--include", "-e": "--exclude", "-H": "--hostfile"}
_AS_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
}
_TOOLS = ("llamafactory-cli", "axolotl", "trl")
_FILES = (".yaml", ".yml", ".json")
_RANKS = ("num_gpus", "num_accelerators", "nproc_per_node")  # of one machine
_NODES = ("num_nodes", "nnodes")
_ALL_OF_A_MACHINE = ("gpu", "auto", "cpu")
_IDLE = frozenset(
    [
        *("master_addr", "master_port", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
        *("standalone", "max_restarts", "role", "monitor_interval", "start_method", "log_dir", "redirects", "tee"),
        *("local_ranks_filter", "local_addr", "no_python", "launcher", "launcher_args", "no_local_rank", "no_ssh"),
        *("no_ssh_check", "force_multi", "save_pid", "enable_each_rank_log", "bind_cores_to_rank", "bind_core_list"),
        *("ssh_port", "venv_script", "log_level", "quiet", "use_env", "run_path", "profile"),
    ]
)
_REFUSED = {
    "hostfile": "the file is not read; give --num_nodes N --num_gpus M in its place",
    "exclude": "what remains is not known; give --num_nodes N --num_gpus M in its place",
    **dict.fromkeys(
        ("autotuning", "elastic_training", "min_elastic_nodes", "max_elastic_nodes"),
        "the number of ranks is fixed here; leave it out",
    ),
}


@dataclass
class CommandLine:
    """`pairs`: the script's arguments. `flags`: those of `accelerate launch`. `file`: what the script reads them from.

    launcher: its name, or empty. ranks, nodes: those that it starts in all, if it says so.
    """

    launcher: str = ""
    script: str = ""
    file: str | None = None
    pairs: list[Pair] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    idle: list[Pair] = field(default_factory=list)
    ranks: int | None = None
    nodes: int = 1


def read_line(line: str) -> CommandLine:
    """Reads a line such as "torchrun --nproc_per_node 4 train.py --bf16"; all problems are in the result."""
    found = CommandLine()
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        found.problems.append(f"--args: expected words as a shell reads them, found: {error}")
        return found
    at = _script(words)
    before, after = ([], words) if at is None else (words[:at], words[at + 1 :])
    found.script = "" if at is None else words[at]
    if PurePath(found.script).name in _TOOLS:
        found.problems.append(
            f"{found.script}: its names and defaults are not read; give its file of DeepSpeed or Accelerate, and what "
            "it trains with as TrainingArguments"
        )
    head = before if at is not None else words
    found.launcher = next((name for word in head if (name := _launcher(word))), "")
    _own_words(_pairs(after), found, in_front=before)
    return found


def _launcher(word: str) -> str:
    name = PurePath(word).name
    return name if name in ("accelerate", "deepspeed", "torchrun", "zlab") else _AS_MODULES.get(word, "")


def _script(words: Sequence[str]) -> int | None:
    """The place of the script, or of its module; None if the line names none."""
    for place, word in enumerate(words):
        if word.endswith(".py") or PurePath(word).name in _TOOLS:
            return place
        module = place > 0 and words[place - 1] in ("-m", "--module") and word not in _AS_MODULES
        if module and not word.startswith("-"):
            return place
    return None


def _pairs(words: Sequence[str]) -> list[Pair]:
    """The arguments with their values; words before the first one have the name ""."""
    pairs: list[Pair] = [("", [])]
    for word in words:
        if word.startswith("--") or word in _SHORT:
            name, equals, value = _SHORT.get(word, word)[2:].partition("=")
            pairs.append((name.replace("-", "_"), [value] if equals else []))
        else:
            pairs[-1][1].append(word)
    return pairs


def _own_words(after: list[Pair], found: CommandLine, in_front: Sequence[str]) -> None:
    """Sorts the words: a line without a script has the launcher's arguments and the script's in one row."""
    launched, script = _pairs(in_front)[1:], after[1:]
    if not found.script:
        mixed, script = script, []
        accelerate = found.launcher == "accelerate" or any(is_flag(name, alone=True) for name, _ in mixed)
        found.launcher = found.launcher or ("accelerate" if accelerate else "")
        for name, values in mixed:
            of_launcher = is_flag(name) if accelerate else name in (*_RANKS, *_NODES, "include", *_REFUSED)
            (launched if of_launcher else script).append((name, values))
    for name, values in launched:
        _take(name, " ".join(values), found)
    for word in after[0][1] if found.script else ():
        name, equals, value = word.partition("=")
        if equals:
            script.append((name, [value]))
        elif word.endswith(_FILES):
            found.file = word
    for name, values in script:
        if name == "config" and values and values[0].endswith(_FILES):
            found.file = values[0]
        else:
            found.pairs.append((name, values))
    if found.ranks is not None and found.launcher != "accelerate":
        found.ranks *= found.nodes


def _take(name: str, text: str, found: CommandLine) -> None:
    """Reads one argument of the launcher."""
    if name == "module":
        return
    if found.launcher == "accelerate":
        if not is_flag(name):
            found.problems.append(f"--{name}: unknown argument of `{ACCELERATE}`; leave it out")
        found.flags[name] = text or "true"
        _number({"num_processes": "ranks", "num_machines": "nodes"}.get(name), name, text, found)
    elif name in (*_RANKS, *_NODES):
        if not (name in _RANKS and text in _ALL_OF_A_MACHINE):
            _number("ranks" if name in _RANKS else "nodes", name, text, found)
    elif name == "include":
        _include(text, found)
    elif name in _REFUSED:
        found.problems.append(f"--{name} {text}: {_REFUSED[name]}")
    elif name in _IDLE:
        found.idle.append((name, [text]))
    else:
        found.problems.append(f"--{name}: unknown argument of {found.launcher or 'the launcher'}; leave it out")


def _number(what: str | None, name: str, text: str, found: CommandLine) -> None:
    if what is None:
        return
    if text.isdigit() and int(text):
        setattr(found, what, int(text))
    else:
        found.problems.append(f"--{name}: expected a whole number above 0, found {text!r}")


def _include(text: str, found: CommandLine) -> None:
    """The slots of each machine, as in localhost:0,1 or a:0,1@b:0,1."""
    slots = [len(slot.split(",")) for slot in re.findall(r"[^@:]+:([\d,]+)(?:@|$)", text)]
    if len(slots) != text.count("@") + 1 or len(set(slots)) != 1:
        found.problems.append(f"--include {text}: expected as many slots on each machine, such as a:0,1@b:0,1")
    else:
        found.nodes, found.ranks = len(slots), slots[0]
