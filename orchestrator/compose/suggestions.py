"""What a wrong word of the command line probably means: other programs' names for ours, else the nearest spelling."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_origin

from orchestrator.compose.arguments import VERBS
from orchestrator.compose.settable import Tree
from orchestrator.config.strict import describe, nearest
from orchestrator.text.paths import expanded, program

# Names that other programs have for our keys and values. A spelling that happens to be near would mislead.
KEYS = {
    "epochs": "measure.steps",
    "num_epochs": "measure.steps",
    "max_steps": "measure.steps",
    "train_steps": "measure.steps",
    "batch_size": "batch.micro",
    "micro_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "seq_len": "batch.seq",
    "seq_length": "batch.seq",
    "sequence_length": "batch.seq",
    "learning_rate": "optimizer.lr",
    "gpus": "resources.ranks",
    "num_gpus": "resources.ranks",
    "world_size": "resources.ranks",
    "nproc_per_node": "resources.ranks",
    "dtype": "precision",
}
VALUES = {"gpu": "cuda", "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
# The key that a number given to a group is meant for.
NUMBERED = {
    "batch": "batch.micro",
    "measure": "measure.steps",
    "resources": "resources.ranks",
    "optimizer": "optimizer.lr",
}
# The option and the key that a file or folder given to a group is meant for.
FILED = {"data": "data=text data.path", "model": "model=pretrained model.path"}
# A run and a sweep have no verb: what else the line needs.
NOT_VERBS = {"run": (), "train": (), "start": (), "plan": ("--plan",), "sweep": ("-m",), "help": ("--help",)}


def near_value(text: str, words: Sequence[str]) -> str | None:
    """The one of `words` that is meant by a value; None where nothing is near."""
    meant = VALUES.get(text.lower())
    return meant if meant in words else nearest(text, words)


def option(group: str, text: str, options: Sequence[str]) -> str:
    """What an unknown option of a group means, with the options that it has."""
    numbered = NUMBERED.get(group)
    if numbered and re.fullmatch(r"[\d.e+-]+", text):
        hint = f" Did you mean '{numbered}={text}'?"
    elif group in FILED and text and os.path.exists(expanded(text)):
        hint = f" Did you mean '{FILED[group]}={text}'?"
    else:
        ends = next((one for one in options if text and one.endswith(text)), None)
        near = near_value(Path(text).name, options) or ends
        hint = f" Did you mean '{near}'?" if near else ""
    return f"{hint}      options: {' '.join(options)}"


def key(name: str, value: str | None, tree: Tree) -> str:
    """What an unknown key means. It is also found by its last part: micro is batch.micro."""
    group, _, last = name.rpartition(".")
    tails = {one.rpartition(".")[2]: one for one in reversed(list(tree.keys))}
    siblings = [one.rpartition(".")[2] for one in tree.keys if group and one.startswith(f"{group}.")]
    known = KEYS.get(last) or (None if group else tails.get(last))
    if known is None and siblings and nearest(last, siblings) is None:
        return f"      {group} has: {' '.join(siblings)}"
    near = known or nearest(name, [*tree.groups, *tree.keys]) or tails.get(nearest(last, tails) or "")
    if near in tree.groups:
        options = tree.groups[near]
        return f" Did you mean '{near}={near_value(value or '', options) or value}'?      options: {' '.join(options)}"
    if near is not None:
        return f" Did you mean '{near}'{_kind(tree.keys[near])}?"
    return f"      known: {' '.join([*tree.groups, 'seed', 'output'])}"


def _kind(hint: Any) -> str:
    return "" if hint is Any or get_origin(hint) is dict else f" ({describe(hint)})"


def word(text: str, others: Sequence[str], tree: Tree) -> str:
    """What a word without an = means. `others`: the rest of the line."""
    wrong = f"'{text}' is not key=value"
    if text in NOT_VERBS:
        line = [program(), *NOT_VERBS[text], shlex.join(others)]
        return f"{wrong}: a line of settings needs no verb. Did you mean '{' '.join(filter(None, line))}'?"
    named = Path(text).name.removesuffix(".yaml")  # a file is chosen by its name
    homes = [f"{group}={named}" for group, options in tree.groups.items() if named in options]
    if homes:
        return f"{wrong}. Did you mean '{homes[0]}'?"
    if near := nearest(text, VERBS):
        return f"{wrong}. Did you mean '{program()} {near}'?"
    return f"{wrong}.      see: --help"
