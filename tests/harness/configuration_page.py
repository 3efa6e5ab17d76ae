"""Generates the page docs/configuration.md from the schema and the files of conf/.

python -m tests.harness.configuration_page > docs/configuration.md
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

from orchestrator.compose import folders
from orchestrator.compose.settable import WHOLE_FILES, with_all_keys
from orchestrator.config.schema import AskedConfig
from orchestrator.config.strict import describe, hints_of
from orchestrator.wings.words import help_page
from orchestrator.wings.words.meanings import DECIDES, option_comment, option_values, root_meaning

WIDTH = 120
HEAD = """\
# Configuration

<!-- Generated: python -m tests.harness.configuration_page > docs/configuration.md -->

A run is composed from groups. `group=option` chooses a file of `conf/GROUP/`, `group.key=value` changes one value, and
with `-m` a list of either is a sweep: `zero=stage1,stage2 batch.micro=2,4`. `null` means "not set". A folder `conf/` in
the current folder, or one named by `--config-dir`, adds options of your own in the same layout; one with the name of a
shipped option is used in its place.

A key that only another `kind` of a group has may be null, and a key that a file leaves out has the default below.
`python run.py --help OPTION` shows all values of an option.
"""


def page() -> str:
    """The page in Markdown, with one section for each group."""
    chosen = help_page.default_choices(folders.CONF / "config.yaml")
    hints = hints_of(AskedConfig).items()
    groups = {name: hint for name, hint in hints if isinstance(hint, type) and is_dataclass(hint)}
    sections = [HEAD, _contents(groups, chosen), _root(groups)]
    sections += [_section(name, hint, chosen[name]) for name, hint in groups.items()]
    sections += [_whole_files(name, folder) for name, folder in zip(WHOLE_FILES, _whole_folders(), strict=True)]
    sections.append(_open_keys())
    return "\n".join(sections)


def _contents(groups: dict[str, type], chosen: dict[str, str]) -> str:
    lines = ["The groups, and the option that each has by default:", ""]
    for name in [*groups, *WHOLE_FILES]:
        option = "" if name in WHOLE_FILES else f" ({chosen[name]})"
        lines += _wrapped(f"- [`{name}`](#{name}){option}: {DECIDES[name]}.")
    return "\n".join([*lines, ""])


def _root(groups: dict[str, type]) -> str:
    """The section about the settings that belong to no group."""
    values = option_values(folders.CONF / "config.yaml")
    lines = ["## Settings outside groups", "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for key, hint in hints_of(AskedConfig).items():
        if key not in groups:
            lines.append(
                f"| `{key}` | {describe(hint)} | `{help_page.typed_value(values[key])}` | {root_meaning(key)} |"
            )
    return "\n".join([*lines, ""])


def _section(name: str, cls: type, default: str) -> str:
    values = {file.stem: option_values(file) for file in _options(name)}
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
        sets = ", ".join(
            f"`{key}={help_page.typed_value(value)}`" for key, value in changed.items() if not isinstance(value, dict)
        )
        comment = option_comment(file)
        if name == "hardware":  # a dozen numbers of each GPU, and their sources, are in its file
            comment, sets = re.split(r" Sources?: ", comment)[0], ""
        lines += _wrapped(f"- `{name}={file.stem}`{mark}: {comment}" + (f" Sets {sets}." if sets else ""))
    return "\n".join([*lines, ""])


def _whole_files(name: str, folder: Path) -> str:
    lines = [f"## {name}", "", "A file of this group sets values of several groups.", ""]
    for file in sorted(folder.glob("*.yaml")):
        lines += _wrapped(f"- `{name}={file.stem}`: {option_comment(file)}")
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


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _wrapped(item: str) -> list[str]:
    """A list item, wrapped to WIDTH, with all lines after the first indented."""
    return textwrap.wrap(item, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _default(value: object) -> str:
    return "those of the model" if isinstance(value, dict) and value else f"`{help_page.typed_value(value)}`"


if __name__ == "__main__":
    print(page(), end="")
