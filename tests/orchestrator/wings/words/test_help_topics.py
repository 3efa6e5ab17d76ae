"""`--help WORD` explains every group, key and option from the schema's own docstrings."""

from __future__ import annotations

import pytest

from orchestrator import cli
from orchestrator.compose.settable import read_tree
from orchestrator.config.strict import Refusal
from orchestrator.text.paths import program
from orchestrator.wings.words.help_topics import Topics
from orchestrator.wings.words.meanings import DECIDES, meaning

TOPICS = Topics(read_tree())


def test_every_key_has_a_meaning_and_every_group_says_what_it_decides() -> None:
    tree = read_tree()
    assert [key for key in tree.keys if not key.endswith(".kind") and not meaning(key)] == []
    assert set(tree.groups) == set(DECIDES)


def test_a_group_shows_its_options_and_its_keys_with_meanings_and_defaults() -> None:
    page = TOPICS.page(["zero"])
    assert "stage2*  Optimizer states and gradients are sharded over the ranks." in page
    assert "zero.prefetch=1  (a whole number)\n      number of units that are gathered ahead" in page
    assert "zero.kind" not in page


def test_keys_that_mean_the_same_are_explained_once() -> None:
    page = TOPICS.page(["hardware"])
    assert page.count("the dense peak of matrix products") == 1
    assert "hardware.fp8_tflops=null" in page


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("zero.stage", "with zero=stage3: 3"),
        ("prefetch", "zero.prefetch=1"),
        ("stage3", "zero=stage3: Optimizer states, gradients and parameters"),
        ("zero=stage3", "zero.stage=3"),
        ("batch.micro=8", "sequences of a micro-batch of one rank"),
        ("seed", "of the initial weights"),
        ("sweeps", "stages"),
    ],
)
def test_keys_and_options_are_explained_with_and_without_a_value(word: str, expected: str) -> None:
    assert expected in TOPICS.page([word])


def test_a_meaning_ends_where_the_next_key_begins() -> None:
    assert meaning("zero.prefetch").endswith("never the bits of its result.")
    assert meaning("hardware.tf32_tflops") == meaning("hardware.fp8_tflops")
    assert meaning("nothing.here") == ""


def test_an_unknown_word_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(Refusal, match="Did you mean 'stage2'"):
        TOPICS.page(["stge2"])


def test_lines_are_as_long_as_the_terminal_is_wide() -> None:
    page = Topics(read_tree(), width=80).page(["zero", "measure", "recompute"])
    usual = page.replace(program(), "zlab")  # a command is not broken, wherever its interpreter is
    assert max(map(len, usual.splitlines())) <= 80


@pytest.mark.parametrize("words", [["--help", "zero.prefetch"], ["zero.prefetch", "--help"]])
def test_the_command_line_answers_wherever_the_flag_is(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("zero.prefetch=1")


def test_help_before_a_verb_is_the_verbs_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help", "report"])
    assert "--against" in capsys.readouterr().out
