"""What `--help` prints: the short page, with `all` the page of every setting, with other words what these mean."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.compose import folders
from orchestrator.compose.settable import read_tree
from orchestrator.wings.words import help_page
from orchestrator.wings.words.help_topics import Topics, width_of_terminal


def page(words: Sequence[str], added: str | None) -> str:
    """The page, ready to print. words: the other words of the line. added: the folder of --config-dir. Refusal: a word
    has no meaning here."""
    # Words of a run that is not started yet, as in `zero=stage2 --help`, do not narrow the page.
    if all("=" in word for word in words):
        return help_page.short()
    tree = read_tree(added)
    if list(words) == ["all"]:
        return help_page.page(folders.CONF / "config.yaml", tree)
    return Topics(tree, added, width_of_terminal()).page(words)
