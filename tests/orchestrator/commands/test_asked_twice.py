"""A question has one answer: with an empty cache, asked again, after any other question, and after an interruption."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.warm_shapes import WarmShapes
from measured import Measured

from orchestrator import cli
from orchestrator.wings.predict import calibrate, counting_child
from orchestrator.wings.predict.counting_child import Counting

# A tile of the loss has four of these sequences, so that there are traces between the sizes that are asked for, and the
# GPU is so small that the largest micro-batch that fits is in one of them.
MODEL = (
    "model=llama_tiny model.config.num_hidden_layers=2 model.config.hidden_size=32 model.config.intermediate_size=48 "
    "model.config.num_attention_heads=2 model.config.num_key_value_heads=2 batch.seq=256 "
    "tracking=none"
)
FAR = f"{MODEL} hardware=a100_80gb hardware.memory_mib=2850 resources.ranks=2 offload=none recompute=none,full"
ONE = f"{MODEL} hardware=a100_80gb hardware.memory_mib=2850 resources.ranks=2 offload=none recompute=full loss=tiled"
HERE = f"{MODEL} resources.device=cpu resources.ranks=2 resources.threads=1 precision=fp32 recompute=none"
LINES = {
    "fit, small": f"fit {ONE} zero=stage1",
    "fit": f"fit {FAR} --all",
    "fit --json": f"fit {FAR} --json",
    "fit --explain": f"fit {FAR} --explain stage1-tiled",
    "fit --table": f"fit {FAR} --table tp=1,2",
    "fit --as": f"fit {FAR} loss=full --as deepspeed",
    "choose": f"choose {FAR} --json",
    "choose, here": f"choose {HERE} loss=tiled --runs 0 --json",
    "calibrate": f"calibrate {HERE} loss=full batch.micro=2 --json",
    "plan": f"-m {FAR} loss=full,tiled zero=stage1,stage3 batch.micro=1,2,5 --plan --json",
    "plan, one": f"{ONE} zero=stage1 batch.micro=2 --plan",
}
PROGRESS = "counting without running: "
SHORT = ("fit, small", "plan, one")  # in `make test`: two questions about the same family of traces
ORDERS = [
    SHORT,
    SHORT[::-1],
    pytest.param(tuple(LINES), marks=pytest.mark.full),
    pytest.param(tuple(reversed(LINES)), marks=pytest.mark.full),
]


class Answer(NamedTuple):
    """The exit code and the lines on stdout, without those of progress, which a slow count has."""

    code: int
    out: list[str]


class Asking:
    """Asks with the cache of this name."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._patch, self._capsys = folder, patch, capsys

    def __call__(self, name: str, cache: str) -> Answer:
        self._patch.setenv("XDG_CACHE_HOME", str(self._folder / cache))
        self._capsys.readouterr()
        code = cli.main([*LINES[name].split(), "output=outputs"])
        lines = self._capsys.readouterr().out.splitlines()
        return Answer(code, [line for line in lines if not line.startswith(PROGRESS)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all questions: a plan names that of its outputs."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def ask(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asking:
    monkeypatch.chdir(place)
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)
    monkeypatch.setattr(calibrate, "measure", Measured())
    monkeypatch.setattr(calibrate, "BUDGET_S", math.inf)
    return Asking(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def answered_alone() -> dict[str, Answer]:
    """The answers with an empty cache, by name: each is asked for once."""
    return {}


@pytest.mark.parametrize("names", ORDERS, ids=lambda names: f"{len(names)}, first {names[0]}")
def test_a_question_has_one_answer_whatever_was_asked_before(
    ask: Asking, answered_alone: dict[str, Answer], names: Sequence[str]
) -> None:
    for name in names:
        if name not in answered_alone:
            answered_alone[name] = ask(name, f"only {name}")
        assert answered_alone[name].code == 0
    for _ in range(2):
        for name in names:
            assert ask(name, "shared") == answered_alone[name]


@pytest.mark.full
@pytest.mark.parametrize("name", LINES)
def test_a_question_that_was_interrupted_has_the_same_answer_when_asked_again(
    ask: Asking, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the first answer of the process that counts; asked again, after two, four and so on."""
    alone, kept, interrupts = ask(name, "empty"), Counting.answers, 0

    def interrupted(self: Counting) -> Iterator[tuple[str, Any]]:
        for number, answer in enumerate(kept(self)):
            if number == 2**interrupts:
                raise KeyboardInterrupt
            yield answer

    with monkeypatch.context() as patch:
        patch.setattr(Counting, "answers", interrupted)
        while (found := ask(name, "torn")).code == 130:
            interrupts += 1
    assert interrupts
    assert found == alone
    assert ask(name, "torn") == alone


@pytest.mark.full
def test_a_question_has_the_same_answer_without_a_cache(ask: Asking) -> None:
    alone = ask(SHORT[0], "empty")
    Path("file").touch()
    assert ask(SHORT[0], "file") == alone
