"""`model=` takes a folder, a config.json, and the name of a model whose files are in the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config import pretrained
from orchestrator.config.schema import Model
from orchestrator.config.strict import Refusal
from orchestrator.wings.words.model_names import spelled

REVISION = "0123abc"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one revision in a cache of the hub, laid out as its own library does."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--Qwen--Qwen2.5-7B"
    folder = model / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    return folder


def test_a_name_of_the_hub_is_its_folder_in_the_cache(snapshot: Path) -> None:
    assert spelled(["model=Qwen/Qwen2.5-7B"]) == ["model=pretrained", f"model.path={snapshot}"]
    assert spelled(["model.path=Qwen/Qwen2.5-7B", "zero=stage1"]) == [f"model.path={snapshot}", "zero=stage1"]
    assert pretrained.completed(Model("pretrained", path=str(snapshot))).name == "Qwen2.5-7B"
    (point,) = composed(arguments.split(["model=Qwen/Qwen2.5-7B"])).points
    assert point.values["model"]["path"] == str(snapshot)


def test_a_folder_and_its_config_file_are_the_same_model(snapshot: Path) -> None:
    meant = ["model=pretrained", f"model.path={snapshot}"]
    assert spelled([f"model={snapshot}"]) == spelled([f"model={snapshot}/config.json"]) == meant


def test_a_plain_name_is_a_folder_unless_an_option_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "gpt2"):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert spelled(["model=mine"]) == ["model=pretrained", "model.path=mine"]
    assert spelled(["model=gpt2", "model=other"]) == ["model=gpt2", "model=other"]
    composed(arguments.split(["model=mine"]))  # for a run and a sweep too: else "model has no option 'mine'"


def test_a_model_that_is_not_in_the_cache_is_refused_with_the_line_that_fetches_it(snapshot: Path) -> None:
    with pytest.raises(Refusal, match=r"hf download meta-llama/Llama-3-8B   or, for fit alone: .* config\.json"):
        composed(arguments.split(["model=meta-llama/Llama-3-8B"]))


def test_a_file_of_ones_own_model_class_belongs_to_a_script() -> None:
    for word in ("model=mymodel.py", "model.path=./mine/model.py"):
        with pytest.raises(Refusal, match=r"found a script; .* launch SCRIPT"):
            composed(arguments.split([word]))


def test_other_words_stay(snapshot: Path) -> None:
    words = ["model=gpt2", "model=a/b,c/d", "data.path=Qwen/Qwen2.5-7B", f"model.path={snapshot}"]
    assert spelled(words) == words
