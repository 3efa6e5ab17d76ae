"""Suggestions for wrong words of a command line: our name for another program's, or the most similar spelling."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_origin

from orchestrator.compose.arguments import VERBS
from orchestrator.compose.settable import OPEN_KEYS, Tree
from orchestrator.compose.sweep_file import spelled
from orchestrator.config.strict import describe, nearest
from orchestrator.text.paths import expanded, program

# Other programs' names for our keys and values, for which the most similar spelling would mislead.
KEYS = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "train_steps"), "train.max_steps"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "micro_batch_size"), "batch.micro"),
    **dict.fromkeys(("seq_len", "seq_length", "sequence_length", "max_seq_length", "max_length"), "batch.seq"),
    **dict.fromkeys(("model_max_length", "cutoff_len", "block_size"), "batch.seq"),
    **dict.fromkeys(("gpus", "num_gpus", "world_size", "nproc_per_node"), "resources.ranks"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel"), "parallel.tp"),
    **dict.fromkeys(("sp", "sp_size", "sequence_parallel", "sequence_parallel_size", "ulysses"), "parallel.sp"),
    **{"gradient_accumulation_steps": "batch.accumulation", "model_name_or_path": "model.path", "dtype": "precision"},
    **{"max_grad_norm": "optimizer.clip_norm", "learning_rate": "optimizer.lr"},
    **{"optim": "optimizer", "lr_scheduler_type": "scheduler"},
}
# Other programs' names for one of our options, or for a key of an option that must be chosen too.
LINES = {
    **{name: f"precision={name}" for name in ("fp32", "fp16", "bf16")},
    "gradient_checkpointing": "recompute=full",
    **dict.fromkeys(("lora_r", "lora_rank", "adapter.r"), "adapter=lora adapter.rank={}"),
    **dict.fromkeys(("lora_alpha", "adapter.lora_alpha"), "adapter=lora adapter.alpha={}"),
    **dict.fromkeys(("target_modules", "lora_target", "adapter.target_modules"), "adapter=lora adapter.targets={}"),
    **dict.fromkeys(("deepspeed", "deepspeed_config", "ds_config"), "PROGRAM import {}"),
    **dict.fromkeys(("dataset", "dataset_path", "train_file", "data_path"), "data={}"),
}
# Other programs' names for what is no setting here, with what there is.
NOT_HERE = {
    **dict.fromkeys(("attention", "attn_implementation"), "a model attends by sdpa if it can; torch picks its kernel"),
    **dict.fromkeys(("compile", "torch_compile"), "a run compiles no model; your own script may call torch.compile"),
    **dict.fromkeys(("report_to", "wandb"), "results go to MLflow (tracking=mlflow) or only to files (tracking=none)"),
    "model.class": "transformers' class follows from model=NAME or model=FOLDER; your own: docs/from_deepspeed.md",
}
OFF = ("false", "0", "none", "null")  # what other programs switch off needs no line of ours
VALUES = {
    **{"gpu": "cuda", "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
}
# The key to suggest if a group is given a number.
NUMBERED = {
    **{"batch": "batch.micro", "measure": "measure.steps", "resources": "resources.ranks"},
    **{"optimizer": "optimizer.lr", "parallel": "parallel.tp"},
}
RECORDS = re.compile(r".*\.(jsonl?|parquet|arrow)(\.gz)?")  # files that hold samples rather than text
GRAMMAR = re.compile(r"[\[{]|(choice|range|interval|glob|shuffle|sort|tag)\(")  # begins what is no text
# Words taken for verbs, though a run and a sweep have none, and the flags that the command needs instead.
NOT_VERBS = {"run": (), "train": (), "start": (), "plan": ("--plan",), "sweep": ("-m",), "help": ("--help",)}


def near_value(text: str, words: Sequence[str]) -> str | None:
    """The one of `words` that a value probably means; None if none is similar."""
    meant = VALUES.get(text.lower())
    return meant if meant in words else nearest(text, words)


def option(group: str, text: str, options: Sequence[str]) -> str:
    """The suggestion for an unknown option of a group, followed by the group's options."""
    numbered = NUMBERED.get(group)
    if numbered and re.fullmatch(r"[\d.e+-]+", text):
        hint = f" Did you mean '{numbered}={text}'?"
    elif group == "model" and text and os.path.isdir(expanded(text)):
        hint = f" Did you mean '{group}=./{text}'?"
    elif group == "data" and text and os.path.exists(expanded(text)):
        hint = f" Did you mean '{_data(text)}'?"
    else:
        ends = next((one for one in options if text and one.endswith(text)), None)
        begins = next((one for one in options if one.startswith(f"{text}_")), None)  # llama2 is llama2_7b
        near = begins or near_value(Path(text).name, options) or ends
        hint = f" Did you mean '{near}'?" if near else ""
    return f"{hint}      options: {' '.join(options)}"


def _data(path: str) -> str:
    return f"data={'pairs' if RECORDS.fullmatch(path) else 'text'} data.path={path}"


def key(name: str, value: str | None, tree: Tree) -> str:
    """The suggestion for an unknown key. The last part of a key is sufficient: micro is batch.micro."""
    if value and value.lower() not in OFF and name in LINES:
        meant = _data(value) if LINES[name] == "data={}" else LINES[name].format(value).replace("PROGRAM", program())
        return f" Did you mean '{meant}'?"
    group, _, last = name.rpartition(".")
    if missing := NOT_HERE.get(name, NOT_HERE.get(last)):
        return f" Not here: {missing}"
    mapping = ".".join(name.split(".")[:2])
    if mapping not in (name, *OPEN_KEYS) and (near := nearest(mapping, OPEN_KEYS)):
        return f" Did you mean '{near}{name.removeprefix(mapping)}'?"
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
    """The suggestion for a word without an =. `others`: the other words of the command line."""
    wrong = f"'{text}' is not key=value"
    if text in NOT_VERBS:
        line = [program(), *NOT_VERBS[text], shlex.join(others)]
        return f"{wrong}: a line of settings needs no verb. Did you mean '{' '.join(filter(None, line))}'?"
    named = Path(text).name.removesuffix(".yaml")  # a file is chosen by its name, without folder and suffix
    homes = [f"{group}={named}" for group, options in tree.groups.items() if named in options]
    if homes:
        return f"{wrong}. Did you mean '{homes[0]}'?"
    if near := nearest(text, VERBS):
        return f"{wrong}. Did you mean '{program()} {near}'?"
    return f"{wrong}.      see: --help"


def quoted(word: str, problem: str) -> str:
    """What is wrong with a word that Hydra's grammar cannot read, and the word with the quotes of Hydra and of a shell.

    problem: in Hydra's words, which name an exception for a sign that is in no word of the grammar.
    """
    key, equals, value = word.partition("=")
    why = "it has a sign that needs quotes" if problem.startswith("Lexer") else problem
    if not equals or not value or GRAMMAR.match(value):
        return f"{word}: {why}"
    meant = f"{key}={','.join(map(spelled, value.split(',')))}"
    if not meant.isprintable():
        signs = [f"\\{one}" if one in "\\'" else one if one.isprintable() else ascii(one)[1:-1] for one in meant]
        return f"{word}: {why}: type $'{''.join(signs)}'"
    return f"{word}: {why}: type " + (shlex.quote(meant) if set(meant) & set('"$`\\!') else f'"{meant}"')
