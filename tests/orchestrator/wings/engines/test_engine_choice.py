"""`choose` with other engines answers with the keys of `choose`, which the documentation lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.warm_shapes import WarmShapes

from orchestrator import cli
from orchestrator.report.entry import Entry
from orchestrator.report.ranking import Ranked
from orchestrator.wings.engines import choose
from orchestrator.wings.predict import counting_child

LINE = (
    "model=llama_tiny model.config.num_hidden_layers=2 model.config.hidden_size=32 model.config.intermediate_size=48 "
    "model.config.num_attention_heads=2 model.config.num_key_value_heads=2 batch.seq=16 precision=fp32 tracking=none"
)
HERE = "resources.device=cpu resources.ranks=2 resources.threads=1 batch.global_size=16"
SPEEDS = {"ddp": 9.0, "zero": 8.0}
OF_ENGINES = {"tables", "table", "engine", "needs_bytes_per_rank"}
DOCS = Path(__file__).resolve().parents[4] / "docs" / "speed.md"


def keys(answer: dict[str, Any]) -> set[str]:
    return {*answer, *(key for row in answer["rows"] for key in row)}


def test_the_document_has_the_keys_of_choose_and_all_are_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []

    def swept(request: Any, *_: Any) -> tuple[int, str]:
        ran[:] = request.points
        return 0, "a sweep"

    def ranked(_sweep: str) -> list[Ranked]:
        entries = []
        for point in sorted(ran, key=lambda one: -SPEEDS.get(str(one.config.engine.kind), 0.0)):
            speed = SPEEDS.get(str(point.config.engine.kind))
            result = {"throughput": {"tokens_per_second": {"median": speed}}}
            entries.append(Entry(point.label, "ok", result if speed else None))
        return [Ranked(one, at if one.result else None) for at, one in enumerate(entries, 1)]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)
    monkeypatch.setattr(choose, "swept", swept)
    monkeypatch.setattr(choose.comparison, "ranked", ranked)
    words = ["choose", *LINE.split(), f"output={tmp_path}", "--json"]
    assert cli.main([*words, *HERE.split(), "engine=zero,ddp"]) == 0
    engines = json.loads(capsys.readouterr().out)
    assert cli.main([*words, "hardware=a100_80gb", "resources.ranks=2", "offload=none", "recompute=none"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert keys(engines) - OF_ENGINES == keys(ours)
    text = DOCS.read_text()
    assert [key for key in keys(engines) if f"`{key}`" not in text] == []
    assert engines["tables"][choose.AT_SAME_BATCH]["chosen"].endswith("ddp")
    last = list(engines["tables"].values())[-1]
    assert (engines["chosen"], engines["experiment"]) == (last["chosen"], last["experiment"])
    assert engines["second"] != engines["chosen"]
    fastest = next(row for row in engines["rows"] if row["label"] == engines["tables"][choose.AT_SAME_BATCH]["chosen"])
    assert (fastest["engine"], fastest["measured_tokens_per_second"], fastest["predicted"]) == ("ddp", 9.0, None)
