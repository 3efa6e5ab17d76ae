"""Generates the page docs/configuration.md from the schema and the files of conf/.

python -m orchestrator.compose.configuration_page > docs/configuration.md
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.compose import folders, help_page
from orchestrator.compose.settable import WHOLE_FILES, with_all_keys
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import describe, hints_of

WIDTH = 120
HEAD = """\
# Configuration

<!-- Generated: python -m orchestrator.compose.configuration_page > docs/configuration.md -->

A run is composed from groups. `group=option` chooses a file of `conf/GROUP/`, `group.key=value` changes one value, and
with `-m` a list of either is a sweep: `zero=stage1,stage2 batch.micro=2,4`. `null` means "not set". A folder `conf/` in
the current folder, or one named by `--config-dir`, adds options of your own in the same layout.

The types and defaults below come from the dataclasses of `orchestrator/config/` and the runtime, and from `conf/`; a
test fails when this page is older than they are. Each dataclass checks its own limits, and `orchestrator/plan/rules/`
those between groups. A key that only another `kind` of a group has may be null, and a key that a file leaves out has
the default below.
"""

# What each group decides, in one line.
DECIDES = {
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
    "hardware": "the GPUs that `--plan` assumes ([sweeps.md](sweeps.md#a-plan-for-hardware-that-is-not-here))",
    "cluster": "where jobs run ([slurm.md](slurm.md))",
    "measure": "warm-up steps, measured steps, validation batches",
    "train": "with `measure=train`: where training ends, validation, the best checkpoint ([training.md](training.md))",
    "tracking": "the MLflow store (an SQLite file next to the outputs)",
    "experiment": "a named set of settings",
    "sweeps": "a declared sweep from `sweeps/` ([sweeps.md](sweeps.md))",
}


def page() -> str:
    """The page in Markdown, with one section for each group."""
    chosen = help_page.default_choices(folders.CONF / "config.yaml")
    hints = hints_of(RunConfig).items()
    groups = {name: hint for name, hint in hints if isinstance(hint, type) and is_dataclass(hint)}
    sections = [HEAD, _contents(groups, chosen), _root(groups)]
    sections += [_section(name, hint, chosen[name]) for name, hint in groups.items()]
    sections += [_whole_files(name, folder) for name, folder in zip(WHOLE_FILES, _whole_folders(), strict=True)]
    sections.append(_open_keys())
    return "\n".join(sections)


def _contents(groups: dict[str, type], chosen: dict[str, str]) -> str:
    lines = ["The groups; the option in bold is the default:", ""]
    files = {name: _options(name) for name in groups}
    files |= {name: sorted(folder.glob("*.yaml")) for name, folder in zip(WHOLE_FILES, _whole_folders(), strict=True)}
    for name, found in files.items():
        options = [f"**{file.stem}**" if file.stem == chosen.get(name) else file.stem for file in found]
        lines += _wrapped(f"- [`{name}`](#{name}): {DECIDES[name]}. Options: {', '.join(options)}.")
    return "\n".join([*lines, ""])


def _root(groups: dict[str, type]) -> str:
    """The section about the settings that belong to no group."""
    text = (folders.CONF / "config.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    lines = ["## Settings outside groups", "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for key, hint in hints_of(RunConfig).items():
        if key not in groups:
            note = re.search(rf"^{key}:.*?# (.*)$", text, re.MULTILINE)
            lines.append(f"| `{key}` | {describe(hint)} | `{_shown(values[key])}` | {note[1] if note else ''} |")
    return "\n".join([*lines, ""])


def _section(name: str, cls: type, default: str) -> str:
    values = {file.stem: _values(file) for file in _options(name)}
    usual = with_all_keys(name, values[default])
    lines = [f"## {name}", "", *_paragraphs(inspect.getdoc(cls) or ""), ""]
    lines += ["| key | value | default |", "|---|---|---|"]
    lines += [
        f"| `{name}.{key}` | {describe(hint)} | {_default(usual.get(key))} |" for key, hint in hints_of(cls).items()
    ]
    lines += ["", "Options:", ""]
    for file in _options(name):
        changed = {key: value for key, value in values[file.stem].items() if value != usual.get(key) and key != "kind"}
        mark = ", the default" if file.stem == default else ""
        sets = ", ".join(f"`{key}={_shown(value)}`" for key, value in changed.items() if not isinstance(value, dict))
        lines += _wrapped(f"- `{name}={file.stem}`{mark}: {_comment(file)}" + (f" Sets {sets}." if sets else ""))
    return "\n".join([*lines, ""])


def _whole_files(name: str, folder: Path) -> str:
    lines = [f"## {name}", "", "A file of this group sets values of several groups.", ""]
    for file in sorted(folder.glob("*.yaml")):
        lines += _wrapped(f"- `{name}={file.stem}`: {_comment(file)}")
    return "\n".join([*lines, ""])


def _open_keys() -> str:
    lines = [
        "## Keys of other libraries",
        "",
        "These mappings take the keys of another library; `+` adds one that the option does not set.",
        "",
    ]
    lines += [line for key, text in help_page.OPEN for line in _wrapped(f"- `{key}`: {text}")]
    return "\n".join([*lines, ""])


def _whole_folders() -> tuple[Path, Path]:
    return folders.CONF / WHOLE_FILES[0], folders.SHIPPED / WHOLE_FILES[1]


def _options(group: str) -> list[Path]:
    return sorted((folders.CONF / group).glob("*.yaml"))


def _values(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def _comment(file: Path) -> str:
    """The comment at the top of an option's file, in one line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.removeprefix("#").strip())
    text = " ".join(" ".join(lines).split())
    return text if text.endswith((".", "?")) else f"{text}."


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _wrapped(item: str) -> list[str]:
    """A list item, wrapped to WIDTH, with all lines after the first indented."""
    return textwrap.wrap(item, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _default(value: object) -> str:
    return "those of the model" if isinstance(value, dict) and value else f"`{_shown(value)}`"


def _shown(value: object) -> str:
    """The value as it is typed on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    print(page(), end="")
