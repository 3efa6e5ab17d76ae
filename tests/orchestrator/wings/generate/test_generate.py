"""`zlab generate`: prompts, refusals, and one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from points import make_config

from orchestrator.cli import main
from orchestrator.commands import rank_job
from orchestrator.commands.rank_job import RanksFailed
from orchestrator.config.strict import Refusal
from orchestrator.wings.generate.generate import GenerationLine, read
from orchestrator.wings.generate.generate import _next as proposed


def test_prompts_are_separated_from_settings(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    asked = read(["prompt=a=b", f"prompts={file}", "ask=who?", "tokens=5,6", "new_tokens=3", "beams=4", "zero=stage0"])
    assert asked.prompts == [{"text": "a=b"}, {"text": "one"}, {"text": "two"}, {"ask": "who?"}, {"tokens": [5, 6]}]
    assert (asked.new_tokens, asked.beams, asked.words) == (3, 4, ["zero=stage0"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["zero=stage3"], "expected a prompt"),
        (["prompt="], "found an empty one"),
        (["ask="], "found an empty one"),
        (["tokens=5,x"], "token ids"),
        (["prompt=a", "new_tokens=0"], "at least 1"),
        (["prompt=a", "beams=0"], "beams: expected a number of at least 1"),
        (["prompts=/no/such/file"], "found none: No such file"),
    ],
)
def test_wrong_prompts_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(Refusal, match=told):
        read(words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate", "prompt=a", "zero=stage2"], "all that stages 1 and 2 shard"),
        (["generate", "tokens=999"], "below the vocabulary of 256"),
        (["generate", "prompt=a", "new_tokens=100000"], "new_tokens"),
        (["measure=eval", "zero=stage1"], "all that stages 1 and 2 shard"),
        (["measure=eval", "zero=stage3", "checkpoint=sharded"], "trains nothing that could be saved"),
    ],
)
def test_what_inference_does_not_have_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*words, f"output={tmp_path}"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "end"),
    [
        ({"text": "a"}, "zero=stage3 measure=eval      # the loss on held-out text"),
        ({"ask": "a"}, "measure=eval data=pairs data.path=FILE      # the loss on the held-out conversations of FILE"),
    ],
)
def test_a_model_that_was_asked_is_evaluated_on_conversations(prompt: dict[str, str], end: str, tmp_path: Path) -> None:
    assert proposed(make_config(tmp_path), GenerationLine([prompt], 4, 1, ["data=stdlib"])).endswith(end)


@pytest.mark.parametrize(
    ("words", "lacked", "fix"),
    [
        (["beams=4", "new_tokens=8"], True, "fix: beams=2   or   new_tokens=4"),
        (["new_tokens=8"], True, "fix: new_tokens=4"),
        (["beams=4"], False, ""),
    ],
)
def test_a_search_that_lacks_memory_is_told_to_keep_fewer_beams(
    words: list[str],
    lacked: bool,
    fix: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def ranks(*_: object, **__: object) -> dict[str, object]:
        raise RanksFailed("rank 0: why", lacked_memory=lacked)

    monkeypatch.setattr(rank_job, "run", ranks)
    assert main(["generate", "prompt=a", *words, f"output={tmp_path}"]) == 1
    told = capsys.readouterr().err
    assert "nothing was generated: rank 0: why" in told
    assert fix in told
    assert ("fix:" in told) is lacked


@pytest.mark.full
def test_prompts_are_answered_by_the_ranks_in_turn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["generate", "prompt=import", "prompt=x", "tokens=5,6", "new_tokens=4", "precision=fp32", "--json"]
    assert main([*words, f"output={tmp_path}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in found["answers"]] == [0, 1, 0]
    assert [len(one["new"]) for one in found["answers"]] == [4, 4, 4]
    assert found["answers"][2]["answer"] is None
