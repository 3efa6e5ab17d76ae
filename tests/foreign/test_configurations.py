"""Configurations in the style of public projects mean here what they mean there, or are refused with the reason."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.strict import Refusal
from orchestrator.wings.foreign.findings import Fate
from orchestrator.wings.foreign.importing import Imported, Line, imported
from orchestrator.wings.foreign.meanings import UNSAID, settings_of
from orchestrator.wings.foreign.sources import source_of
from zero_runtime.deepspeed.keys import HOMES, OWN, TOP
from zero_runtime.deepspeed.schema import Key

FOLDER = Path(__file__).with_name("configurations")
CASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
ACCEPTED = [name for name, case in CASES.items() if "words" in case]
REFUSED = [name for name, case in CASES.items() if "refused" in case]


def read(name: str) -> Imported:
    case = CASES[name]
    found, args = source_of(FOLDER / case["file"] if "file" in case else None, case.get("args"))
    return imported(found, Line(args, {}, case["ranks"], 64))


@cache
def accepted(name: str) -> Imported:
    return read(name)


@pytest.fixture(autouse=True)
def _in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)  # a command line names its files as seen from there


def test_there_are_configurations_of_each_origin() -> None:
    origins = {case["origin"] for case in CASES.values()}
    assert len(CASES) >= 50
    assert {"Transformers", "Accelerate", "axolotl", "LLaMA-Factory", "OpenRLHF", "DeepSpeedExamples"} < origins
    assert sorted([*ACCEPTED, *REFUSED]) == sorted(CASES)
    named = {case["file"] for case in CASES.values() if "file" in case}
    assert named == {path.name for path in FOLDER.iterdir()} - {"expected.json"}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_configuration_has_its_meaning(name: str) -> None:
    result, case = accepted(name), CASES[name]
    assert {key: result.words.get(key) for key in case["words"]} == case["words"]
    told = "\n".join([*result.notes, *result.silent])
    assert [text for text in case.get("says", ()) if text not in told] == []
    idle = {one.key for one in result.keys if one.fate is Fate.idle}
    assert set(case.get("idle", ())) <= idle


def test_an_older_section_of_bf16_is_not_called_off() -> None:
    (key,) = (one for one in accepted("deepspeed_chat").keys if one.key == "bfloat16.enabled")
    assert (key.fate, key.words, key.note) == (Fate.older, ("precision=bf16",), "an older name of bf16")


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_configuration_has_exactly_these_reasons(name: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(name)
    expected = CASES[name]["refused"]
    assert [text[: len(part)] for text, part in zip(caught.value.problems, expected, strict=True)] == expected


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_words_compose_to_one_configuration(name: str) -> None:
    words = [f"{key}={value}" for key, value in sorted(accepted(name).words.items(), key=lambda item: "." in item[0])]
    assert len(composed(arguments.split(words)).points) == 1


@pytest.mark.parametrize("name", [name for name in ACCEPTED if CASES[name].get("file", "").endswith(".json")])
def test_every_key_of_a_file_is_reported(name: str) -> None:
    """No key is dropped: each leaf of the file is mapped, filled in, an older name, or named as without effect."""

    def leaves(inner: Any, path: str) -> list[str]:
        if isinstance(inner, dict) and inner:
            return [leaf for key, value in inner.items() for leaf in leaves(value, f"{path}.{key}" if path else key)]
        return [path]

    result = accepted(name)
    content = source_of(FOLDER / CASES[name]["file"], None)[0].config
    assert set(leaves(content, "")) <= {one.key for one in result.keys}


def test_every_key_with_an_effect_has_its_settings_or_a_reason() -> None:
    def acting(table: dict[str, Key], path: str) -> list[str]:
        found = []
        for name, key in table.items():
            inner = acting(dict(key.table), f"{path}{name}.") if key.table is not None else []
            found += inner if key.table is not None else [f"{path}{name}"] if key.acts else []
        return found

    table = {name: key for name, key in TOP.items() if name not in OWN}  # what a script's engine prints and keeps
    paths = [path for path in acting(table, "") if not path.endswith(".params")]
    assert len(paths) > 30
    assert [path for path in paths if not settings_of(path) and path not in UNSAID] == []
    assert [path for path in UNSAID if path.split(".")[1:2] != ["params"] and path.split(".")[-1] not in HOMES] == []
