"""A file of the group `experiment` sets what the words of a run set."""

from __future__ import annotations

from pathlib import Path

from orchestrator.commands.experiment_file import write_experiment
from orchestrator.compose import arguments
from orchestrator.compose.line import composed

LINE = (
    "model=llama_tiny zero=stage3 precision=bf16 recompute=full batch.micro=3 batch.accumulation=2 optimizer.lr=1e-3 "
    "zero.shard_ranks=null model.config.num_hidden_layers=2"
)
WORDS = tuple(LINE.split(" "))


def values(*words: str) -> object:
    return composed(arguments.split(list(words))).points[0].values


def test_the_file_composes_to_what_the_words_compose_to(tmp_path: Path) -> None:
    name = write_experiment(tmp_path, WORDS, "because")
    assert values("--config-dir", str(tmp_path), f"experiment={name}") == values(*WORDS)
    assert (tmp_path / "experiment" / f"{name}.yaml").read_text().splitlines()[1] == "# because"


def test_equal_words_have_one_file_and_others_another(tmp_path: Path) -> None:
    names = [write_experiment(tmp_path, words, "") for words in (WORDS, WORDS[::-1], WORDS[:-1])]
    assert names[0] == names[1] != names[2]
