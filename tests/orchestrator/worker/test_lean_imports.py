"""The process that counts imports little, and what it leaves out is there as soon as something asks for it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from points import config_of_line

from orchestrator.config.schema import Device, to_dict
from orchestrator.machine import children
from orchestrator.wings.predict import activations
from orchestrator.wings.predict.counting_child import LEAN
from orchestrator.wings.predict.memory_cache import activations_key, units_key
from orchestrator.worker.lean_imports import PostponedPackage

MODELS = ("llama_tiny", "gpt2", "qwen2_5_0_5b")
REPLACING = (
    "import sys, types\nother = types.ModuleType(__name__)\nother.name = 'replaced'\nsys.modules[__name__] = other"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `postponed_one` with a module in it, whose own file raises the variable POSTPONED_ONE."""
    folder = tmp_path / "postponed_one"
    folder.mkdir()
    (folder / "__init__.py").write_text("import os\nos.environ['POSTPONED_ONE'] += 'x'\nname = 'its own'\n")
    (folder / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("POSTPONED_ONE", "")
    yield folder
    for name in [one for one in sys.modules if one.startswith("postponed_one")]:
        del sys.modules[name]


def test_modules_of_a_postponed_package_are_imported_without_it(package: Path) -> None:
    sys.modules["postponed_one"] = postponed = PostponedPackage("postponed_one", given=3)
    assert importlib.import_module("postponed_one.inner").value == 1
    assert (postponed.inner.value, postponed.given) == (1, 3)
    assert os.environ["POSTPONED_ONE"] == ""


def test_a_postponed_package_is_executed_once_when_a_name_of_its_own_is_asked_for(package: Path) -> None:
    sys.modules["postponed_one"] = postponed = PostponedPackage("postponed_one", name="given")
    assert postponed.name == "given"
    with pytest.raises(AttributeError, match="postponed_one' has no attribute 'missing'"):
        _ = postponed.missing
    assert postponed.name == "its own"
    assert os.environ["POSTPONED_ONE"] == "x"
    assert not hasattr(postponed, "__all__")


def test_a_package_that_puts_another_module_in_its_place_is_asked_there(package: Path) -> None:
    (package / "__init__.py").write_text(REPLACING)
    sys.modules["postponed_one"] = postponed = PostponedPackage("postponed_one")
    assert postponed.name == "replaced"


def test_a_package_that_is_not_installed_cannot_be_postponed() -> None:
    with pytest.raises(ModuleNotFoundError, match="there is no package no_such_package"):
        PostponedPackage("no_such_package")


def test_a_step_in_which_a_module_was_imported_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, calls = activations._counted, []

    def importing(*args: object) -> activations.CountedStep:
        calls.append(args)
        if len(calls) == 1:
            monkeypatch.setitem(sys.modules, "made_by_an_import", None)
        return counted(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(activations, "_counted", importing)
    activations.trace_of(config_of_line("model=llama_tiny resources.device=cpu batch.micro=1 batch.seq=16"))
    assert len(calls) == 2


@pytest.mark.full
def test_a_lean_process_answers_as_one_with_all_imports_byte_for_byte(tmp_path: Path) -> None:
    units, families = {}, []
    for model in MODELS:
        for kind in ("none", "by_operation", "full"):
            line = f"model={model} resources.device=cpu recompute={kind} loss=tiled batch.seq=64"
            on_cpu = [config_of_line(f"{line} batch.micro={micro}") for micro in (1, 2, 4)]
            configs = [replace(one, resources=replace(one.resources, device=Device.cuda)) for one in on_cpu]
            families.append({activations_key(config): to_dict(config) for config in configs})
            units[units_key(configs[0])] = to_dict(configs[0])
    asked = json.dumps({"units": units, "activations": families})
    lean, complete = (_answers(asked, words) for words in ((LEAN,), ()))
    assert len(lean) == len(units) + len(families) * (3 + 2)  # each family has two traces
    assert lean == complete


LATER = """
from orchestrator.worker.lean_imports import import_lean
import_lean()
import sys, transformers
from orchestrator.wings.predict import shapes
assert "torch._dynamo.eval_frame" not in sys.modules, "torch._dynamo was executed"
assert not hasattr(sys.modules["transformers"], "__all__")
assert issubclass(transformers.LlamaForCausalLM, transformers.PreTrainedModel)
assert transformers.models.gpt2.GPT2Config().model_type == "gpt2"
"""


@pytest.mark.full
def test_names_of_transformers_are_there_when_a_lean_process_asks_for_them() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATER], capture_output=True, text=True, check=False, cwd=children.ROOT
    )
    assert ended.returncode == 0, ended.stderr


def _answers(asked: str, words: tuple[str, ...]) -> list[str]:
    command = children.words("orchestrator.wings.predict.count", *words)
    told = subprocess.run(
        command, input=asked, capture_output=True, text=True, check=True, env=children.environment(os.environ)
    )
    return sorted(filter(None, told.stdout.splitlines()))
