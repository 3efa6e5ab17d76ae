"""A script that turns to DeepSpeed's own engine is told so, and with which lines this runtime trains."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from zero_runtime.import_finders import TOLD, OtherEngineFinder

# The script of a user who changed the first line; the stub stands for DeepSpeed's package.
_SCRIPT = """
import zero_runtime as deepspeed
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

arguments = TrainingArguments("out", deepspeed={"zero_optimization": {"stage": 2}}, use_cpu=True, report_to=[])
print("arguments made", flush=True)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8))
Trainer(model=model, args=arguments)
print("trainer made", flush=True)
"""


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> OtherEngineFinder:
    finder = OtherEngineFinder()
    others = [one for one in sys.meta_path if not isinstance(one, OtherEngineFinder)]
    monkeypatch.setattr(sys, "meta_path", [finder, *others])
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    return finder


def test_looking_for_deepspeed_without_accelerate_is_silent(
    heard: OtherEngineFinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOLD, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.util.find_spec("deepspeed")
    assert heard in sys.meta_path


def test_accelerates_search_for_deepspeed_is_told_once(
    heard: OtherEngineFinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOLD, "true")
    with pytest.warns(UserWarning, match="zero_runtime is imported, but does not train") as found:
        importlib.util.find_spec("deepspeed")
    assert heard not in sys.meta_path
    lines = [line.strip() for line in str(found[0].message).splitlines() if line.startswith(" ")]
    assert len(lines) == 2
    exec("\n".join(lines), {})  # the lines that it names can be typed


def test_the_search_is_told_too_when_a_library_has_imported_deepspeed_before(
    heard: OtherEngineFinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python asks no finder for a module that is imported, as TRL imports it; accelerate's look at the version does."""
    available = pytest.importorskip("accelerate", reason="accelerate is not installed").utils.is_deepspeed_available
    package = ModuleType("deepspeed")
    package.__spec__ = ModuleSpec("deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        available()  # engine=deepspeed imports both packages, and leaves accelerate alone
    monkeypatch.setenv(TOLD, "true")
    with pytest.warns(
        UserWarning, match="expected zero_runtime to train, found accelerate told to use the package deepspeed"
    ):
        available()
    assert heard not in sys.meta_path


@pytest.mark.full
def test_a_trainer_is_told_with_the_real_package_imported_before(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the package deepspeed is not installed")
    script = tmp_path / "train.py"
    script.write_text(f"import deepspeed as other\n{_SCRIPT}")
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "trainer made" in ran.stdout, ran.stderr
    assert ran.stderr.count("zero_runtime is imported, but does not train") == 1, ran.stderr


@pytest.mark.full
def test_a_trainer_on_the_installed_deepspeed_says_that_this_runtime_does_not_train(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    package.joinpath("__init__.py").write_text("")
    metadata = tmp_path / "deepspeed-0.19.8.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "arguments made" in ran.stdout
    assert "zero_runtime is imported, but does not train" in ran.stderr, ran.stderr
