"""`measure=eval` reports the loss and perplexity that plain transformers has, in the record and in the table."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import HANG_S
from harness.ranks import fork_context, run_alone
from points import LLAMA, config_of_line

from orchestrator import cli
from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.launch.rank import ENTRY, RankInfo, leave_failed, run_recorded
from orchestrator.launch.verdict import Verdict, judge, look_at_ranks
from orchestrator.records.record_file import EventTail, require_json, write_json_atomic
from orchestrator.records.record_shapes import RESULT, misfit
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.report import ranking, sweep_files
from orchestrator.report.entry import Entry

WORLD, MICRO, BATCHES, SEQ = 2, 2, 3, 16
LINE = (
    f"measure=eval measure.steps={BATCHES} precision=fp32 data=synthetic batch.seq={SEQ} batch.micro={MICRO} "
    f"resources.device=cpu resources.ranks={WORLD} resources.threads=1 tracking=none"
)
ROWS = {"stage0": "zero=stage0", "stage3": "zero=stage3"}


def _rank_main(root: Path, rank: int) -> None:
    ended = run_recorded(AttemptPaths(root), RankInfo(rank, WORLD, rank, root / "rendezvous"), ENTRY)
    if isinstance(ended, BaseException):
        leave_failed()
    os._exit(0)


def evaluated(root: Path, config: RunConfig) -> AttemptPaths:
    """The attempt of an evaluation on two forked ranks."""
    attempt = AttemptPaths(root)
    root.mkdir(parents=True)
    write_json_atomic(attempt.config, to_dict(config))
    context = fork_context()
    ranks = [context.Process(target=_rank_main, args=(root, rank)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANG_S)
        rank.kill()
    verdict = judge(look_at_ranks(attempt, WORLD), has_result=attempt.result.exists(), controller_alive=False)
    assert verdict == Verdict(RunState.ok)
    return attempt


def write_model(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    for param in model.parameters():  # initial weights are so small that every token would be equally likely
        param.data.mul_(8)
    model.save_pretrained(folder)


def plain_losses(config: RunConfig) -> list[float]:
    """The loss of each batch of each rank, from transformers in one process, in the order of the ranks."""
    from transformers import LlamaForCausalLM

    from orchestrator.worker.setup import build_data

    model, data = LlamaForCausalLM.from_pretrained(str(config.model.path)).eval(), build_data(config)
    found = []
    for rank in range(WORLD):
        for step in range(BATCHES):
            held = data.validation_batch((step * WORLD + rank) * MICRO, MICRO)
            ids, labels = (torch.from_numpy(one) for one in held)
            with torch.no_grad():
                logits = model(input_ids=ids).logits
            found.append(
                float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            )
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunConfig, AttemptPaths]]:
    """The evaluations of ROWS, with weights that transformers saved."""
    folder = tmp_path_factory.mktemp("evaluations")
    run_alone(write_model, str(folder / "model"))
    model = f"model=pretrained model.path={folder / 'model'}"
    configs = {name: config_of_line(f"{LINE} {model} {words}") for name, words in ROWS.items()}
    return {name: (config, evaluated(folder / name, config)) for name, config in configs.items()}


def test_the_record_has_the_loss_of_plain_transformers_bit_for_bit_at_both_stages(
    rows: dict[str, tuple[RunConfig, AttemptPaths]],
) -> None:
    plain = run_alone(plain_losses, rows["stage0"][0])
    tokens = WORLD * BATCHES * MICRO * SEQ
    expected = (sum(plain[:BATCHES]) + sum(plain[BATCHES:])) / tokens
    for name in ("stage0", "stage3"):
        result = require_json(rows[name][1].result)
        assert misfit(result, RESULT) is None
        losses = result["loss"]
        assert losses["validation"] == losses["last"] == expected
        assert (losses["perplexity"], losses["tokens"]) == (math.exp(expected), tokens)
        events = EventTail(rows[name][1].metrics).read_new()
        assert [one["loss"] for one in events if one["event"] == "validation"] == [expected]
        assert [one["loss"] for one in events if one["event"] == "step"] == [
            loss / (MICRO * SEQ)
            for loss in (plain[0], *plain[:BATCHES])  # of rank 0, after a warm-up by its first
        ]


def test_an_evaluation_holds_weights_alone_and_sends_them_once_for_each_forward(
    rows: dict[str, tuple[RunConfig, AttemptPaths]],
) -> None:
    held, sent = {}, {}
    for name, (_, attempt) in rows.items():
        result = require_json(attempt.result)
        states = {one["component"]: one for one in result["memory"]["states"]}
        assert states["grads"]["measured_bytes"] == states["optimizer"]["measured_bytes"] == 0
        assert states["params"]["measured_bytes"] == states["params"]["predicted_bytes"]
        held[name] = states["params"]["measured_bytes"]
        volumes = {kind: volume["bytes"] for kind, volume in result["communication"]["data"].items()}
        sent[name] = volumes.pop("all_gather", 0)
        assert not any(volumes.values()), "nothing is reduced"
    assert held["stage0"] / 2 <= held["stage3"] <= held["stage0"]
    assert sent["stage0"] == 0 < sent["stage3"]


def test_the_table_has_perplexities(
    rows: dict[str, tuple[RunConfig, AttemptPaths]],
) -> None:
    entries = [
        Entry(name, "ok", require_json(attempt.result), overrides=(*LINE.split(), *ROWS[name].split()))
        for name, (_, attempt) in rows.items()
    ]
    ranked = ranking.rank(entries, "perplexity")
    table = ranking.table(ranked)
    texts = {row[1]: row[-1] for row in table.rows}
    plain = entries[0].result["loss"]["perplexity"]  # type: ignore[index]
    assert table.header[-1] == "perplexity"
    assert texts["stage0"] == texts["stage3"] == f"{plain:.4f}"
    assert "perplexity" in sweep_files.report_md("eval", ranked)
    assert f",{plain}," in sweep_files.results_csv(ranked)


def test_too_few_held_out_sequences_are_reported_with_what_to_change(
    rows: dict[str, tuple[RunConfig, AttemptPaths]], tmp_path: Path
) -> None:
    config = rows["stage0"][0]
    many = replace(config, batch=replace(config.batch, micro=10**6, global_size=WORLD * 10**6))
    attempt = AttemptPaths(tmp_path / "many")
    with pytest.raises(AssertionError):
        evaluated(attempt.root, many)
    error = require_json(attempt.rank_record(0))["error"]
    assert "expected at least 2000000 held-out sequences, one batch for each rank" in error


@pytest.mark.full
def test_a_sweep_of_evaluations_ends_with_a_table_and_a_command_that_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["-m", *LINE.split(), "model=llama_tiny", "zero=stage0,stage3", "output=out"]
    assert cli.main(line) == 0
    told = capsys.readouterr().out
    assert "perplexity" in told
    assert "generate" in told
    assert cli.main(["report", "--json", "--output", "out"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(document["points"]) == 2
    assert len({one["result"]["loss"]["perplexity"] for one in document["points"]}) == 1
