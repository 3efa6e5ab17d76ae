"""The pages of `--help GROUP`, `--help KEY` and `--help OPTION`: what each setting means, and its default."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from orchestrator.compose import folders
from orchestrator.compose.settable import WHOLE_FILES, Tree, read_tree, with_all_keys
from orchestrator.config.strict import Refusal, describe
from orchestrator.text.paths import program
from orchestrator.wings.words import help_page
from orchestrator.wings.words.meanings import DECIDES, group_class, meaning, option_comment, option_values

ALIKE = 0.75  # the least similarity of a word that is proposed: any word can be asked, and few are alike by chance
_LINK = re.compile(r" ?\(\[[^]]*\]\([^)]*\)\)")


@dataclass(frozen=True)
class Topics:
    """What help can be asked for. tree: all settings. added: the folder of --config-dir. width: of a line."""

    tree: Tree
    added: str | None = None
    width: int = help_page.WIDTH

    def page(self, words: Sequence[str]) -> str:
        """The pages of groups, keys, the last words of keys, and options, each with or without a value. Refusal: a word
        is none of these."""
        return "\n\n".join(self._of(word) for word in words)

    def _of(self, word: str) -> str:
        name, equals, value = word.lstrip("+~").partition("=")
        if equals and value in self.tree.groups.get(name, ()):
            return self._option(name, value)
        if name in self.tree.groups:
            return self._group(name)
        keys = [key for key in self.tree.keys if key == name or key.rpartition(".")[2] == name]
        files = [group for group, names in self.tree.groups.items() if name in names]
        if keys or files:
            pages = [textwrap.dedent("\n".join(self._key(key, full=True))) for key in keys]
            return "\n\n".join([*pages, *(self._option(group, name) for group in files)])
        known = [*self.tree.groups, *self.tree.keys, *(one for names in self.tree.groups.values() for one in names)]
        near = get_close_matches(name, known, n=1, cutoff=ALIKE)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise Refusal([f"--help {name}: there is no group, key or option of that name.{hint}      all: --help"])

    def _group(self, group: str) -> str:
        lines = [*self._wrapped(f"{group}: {_LINK.sub('', DECIDES.get(group, ''))}", "", "  "), ""]
        default = self._default(group)
        lines.append(f"Options: {group}=OPTION" + (" (* = default)" if default else ""))
        names = {name: f"{name}*" if name == default else name for name in self.tree.groups[group]}
        width = max(map(len, names.values()), default=0)
        for name, shown in names.items():
            lines += self._wrapped(self._comment(group, name), f"  {shown:<{width}}  ", " " * (width + 4))
        keys = [key for key in self.tree.keys if key.startswith(f"{group}.") and self._is_own(key)]
        if keys:
            lines += ["", f"Keys: {group}.KEY=VALUE"]
            for key, following in zip(keys, [*keys[1:], ""], strict=True):
                alike = bool(following) and meaning(key) == meaning(following)
                lines += self._key(key)[:1] if alike else self._key(key)
        return "\n".join([*lines, "", f"next  {program()} --help {keys[0] if keys else 'GROUP'}"])

    def _key(self, key: str, *, full: bool = False) -> list[str]:
        """A key's default, type and meaning; with `full` also which options set other values."""
        group = key.partition(".")[0]
        shown = self._shown(group, self._default(group), key)
        first = (
            f"  {key}={shown}  ({describe(self.tree.keys[key])})"
            if self.tree.keys[key] is not Any
            else f"  {key}={shown}"
        )
        lines = [*self._wrapped(first.strip(), "  ", "      "), *self._wrapped(meaning(key), "      ", "      ")]
        for name in self.tree.groups.get(group, ()) if full and group not in WHOLE_FILES else ():
            other = self._shown(group, name, key)
            lines += [f"      with {group}={name}: {other}"] if other != shown else []
        return lines

    def _option(self, group: str, name: str) -> str:
        lines = self._wrapped(f"{group}={name}: {self._comment(group, name)}", "", "  ")
        file = self._file(group, name)
        values = option_values(file) if file else {}
        sets = [f"  {group}.{key}={help_page.typed_value(value)}" for key, value in values.items() if key != "kind"]
        return "\n".join([*lines, *(sets if group not in WHOLE_FILES else [])])

    def _is_own(self, key: str) -> bool:
        """Whether the page of a group lists the key: not its kind, which the option sets, nor the architecture's."""
        return not key.endswith(".kind") and not key.startswith("model.config.")

    def _default(self, group: str) -> str | None:
        return help_page.default_choices(folders.CONF / "config.yaml").get(group)

    def _shown(self, group: str, option: str | None, key: str) -> str:
        """A key's value with an option, as it is typed."""
        if group_class(group) is None:
            value = option_values(folders.CONF / "config.yaml").get(key)
        else:
            value = self._values(group, option) if option else {}
            for part in key.split(".")[1:]:
                value = value.get(part) if isinstance(value, dict) else None
        return help_page.typed_value(value)

    def _values(self, group: str, option: str) -> dict[str, Any]:
        file = self._file(group, option)
        values = option_values(file) if file else {}
        return values if group in WHOLE_FILES else with_all_keys(group, values)

    def _comment(self, group: str, name: str) -> str:
        file = self._file(group, name)
        return option_comment(file) if file else ""

    def _file(self, group: str, name: str) -> Path | None:
        if group == "sweeps":
            return folders.find_sweep(name, self.added)
        return folders.option_file(f"{group}/{name}", folders.config_folders(self.added))

    def _wrapped(self, text: str, first: str, after: str) -> list[str]:
        return textwrap.wrap(
            text,
            self.width,
            initial_indent=first,
            subsequent_indent=after,
            break_on_hyphens=False,
            break_long_words=False,
        )


def page(words: Sequence[str], added: str | None) -> str:
    """The text of `--help`: the short page, with `all` the page of every setting, with other words what these mean.
    words: the other words of the line. added: the folder of --config-dir. Refusal: a word has no meaning here."""
    # Words of a run that is not started yet, as in `zero=stage2 --help`, do not narrow the page.
    if all("=" in word for word in words):
        return help_page.short()
    tree = read_tree(added)
    if list(words) == ["all"]:
        return help_page.page(folders.CONF / "config.yaml", tree)
    return Topics(tree, added, _width_of_terminal()).page(words)


def _width_of_terminal() -> int:
    """The characters of a line: COLUMNS or those of the terminal, at most 120; 120 in a pipe without COLUMNS."""
    return min(shutil.get_terminal_size((help_page.WIDTH, 1)).columns, help_page.WIDTH)
