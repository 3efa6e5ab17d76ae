"""What each setting means, from the docstrings of the configuration's classes, which also make docs/configuration.md.

A docstring explains a key as "`key`: text", up to the next key or the end of the paragraph, or in sentences that name
it.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path

import yaml

from orchestrator.compose.folders import CONF
from orchestrator.compose.settable import ARCHITECTURE
from orchestrator.config.schema import AskedConfig
from orchestrator.config.strict import hints_of

# What each group decides, in one line.
DECIDES = {
    "engine": "the library that trains: zero-lab's runtime, DeepSpeed, FSDP2, DDP ([engines.md](engines.md))",
    "zero": "which model states are sharded; shard groups, prefetch, size of a unit",
    "precision": "dtypes of parameters, compute, reduction, accumulation and master weights; the loss scale",
    "offload": "where model states are stored between their uses ([offload.md](offload.md))",
    "batch": "micro-batch, accumulation, global size (any two give the third), sequence length",
    "model": "a transformers architecture with random weights, or the weights in `model.path`",
    "adapter": "whether the full model is trained, or adapters next to a frozen one (the extra `lora`)",
    "data": "this Python's own sources, your text or pairs, or generated tokens; by byte or the model's tokenizer",
    "optimizer": "update rule, learning rate, constants, weight decay, clipping",
    "scheduler": "the learning rate over the steps",
    "recompute": "activation checkpointing; `recompute.offload=cpu` keeps the saved activations in host memory",
    "loss": "all logits at once, or one tile of tokens at a time, recomputed in backward",
    "parallel": "ranks that hold slices of each layer, or parts of each sequence ([parallel.md](parallel.md))",
    "checkpoint": "saving during training, retention, resuming ([checkpoints.md](checkpoints.md))",
    "resources": "device, ranks, nodes, threads, time limit",
    "comm": "how CPU ranks communicate: reading each other's memory, or gloo ([runtime.md](runtime.md#cpu-ranks))",
    "hardware": "the GPUs that `fit` and `--plan` assume, `2xNAME` is two of them ([fit.md](fit.md#several-machines))",
    "cluster": "where jobs run ([slurm.md](slurm.md))",
    "measure": "warm-up steps, measured steps, validation batches",
    "train": "with `measure=train`: where training ends, validation, the best checkpoint ([training.md](training.md))",
    "tracking": "the MLflow store (an SQLite file next to the outputs)",
    "experiment": "a named set of settings",
    "sweeps": "a declared sweep from `sweeps/` ([sweeps.md](sweeps.md))",
}

_LEAD = re.compile(r"(?:^|(?<=[.:] ))((?:`\w+`(?:, and |, | and | to )?)+): ")
_SENTENCE = re.compile(r"(?<=[.;]) +(?=[A-Z`])")


def group_class(group: str) -> type | None:
    """The class of a group's keys; None for a group of whole files, such as sweeps."""
    hint = hints_of(AskedConfig).get(group)
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def meaning(key: str) -> str:
    """What a dotted key such as "zero.prefetch" means; empty if nothing explains it."""
    group, _, name = key.partition(".")
    if not name:
        return root_meaning(group)
    if key.startswith(f"{ARCHITECTURE}."):
        return "an argument of the architecture's configuration, see the documentation of transformers"
    cls = group_class(group)
    if cls is None:
        return ""
    known: dict[str, str] = {}
    for paragraph in _paragraphs(cls):
        leads = list(_LEAD.finditer(paragraph))
        for number, lead in enumerate(leads):
            end = leads[number + 1].start() if number + 1 < len(leads) else len(paragraph)
            for word in re.findall(r"`(\w+)`", lead[1]):
                known[word] = paragraph[lead.end() : end].strip()
    if name in known:
        return known[name]
    sentences = [one for paragraph in _paragraphs(cls) for one in _SENTENCE.split(paragraph)]
    return " ".join(one for one in sentences if f"`{name}`" in one)


def root_meaning(key: str) -> str:
    """What a setting outside groups means: its comment in conf/config.yaml."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    note = re.search(rf"^{re.escape(key)}:.*?# (.*)$", text, re.MULTILINE)
    return note[1] if note else ""


def option_comment(file: Path) -> str:
    """The comment at the top of an option's file, in one line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.removeprefix("#").strip())
    text = " ".join(" ".join(lines).split())
    return text if text.endswith((".", "?")) else f"{text}."


def option_values(file: Path) -> dict[str, object]:
    """The values that an option's file sets."""
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})


def _paragraphs(cls: type) -> list[str]:
    return [" ".join(part.split()) for part in (inspect.getdoc(cls) or "").split("\n\n")]
