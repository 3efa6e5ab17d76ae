"""A person's way from own files to text: a folder of weights, conversations in ShareGPT's form, LoRA, a merged model,
its text, what fits of a model that is named as on the hub; each next command is the one that the last one proposed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.browser import CHROMIUM, WHY_NOT, Browser
from harness.patience import HANG_S
from harness.sft_files import make_sft_files

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (
    "measure=train data=pairs data.path=talks.jsonl model=./mine/model adapter=lora train.max_steps=4 zero=stage2 "
    "precision=fp32 batch.micro=2 batch.seq=64 resources.ranks=2 resources.device=cpu checkpoint=sharded "
    "checkpoint.every=2"
)
MARGIN = 9  # of the column of names that a row begins with


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with weights, conversations, and a cache of the hub with one model's config.json."""
    weights, pairs = make_sft_files(tmp_path / "mine")
    with (tmp_path / "talks.jsonl").open("w", encoding="utf-8") as file:
        for pair in json.loads(pairs.read_text()):
            turns = [{"from": "human", "value": pair["prompt"]}, {"from": "gpt", "value": pair["response"]}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    model = tmp_path / "hub" / "models--someone--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0123abc")
    (model / "snapshots" / "0123abc").mkdir(parents=True)
    shutil.copy(weights / "config.json", model / "snapshots" / "0123abc" / "config.json")
    return tmp_path


def typed(folder: Path, words: list[str]) -> str:
    """What the command prints in a terminal of 80 columns."""
    environ = {**os.environ, "COLUMNS": "80", "HF_HUB_CACHE": str(folder / "hub")}
    line = [sys.executable, str(ROOT / "run.py"), *words]
    done = subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def proposed(shown: str, verb: str) -> list[str]:
    """The words of the command with `verb` among those that the last one proposed."""
    (line,) = (line for line in shown.splitlines() if re.search(rf"run\.py {verb}\b", line))
    words = shlex.split(line[MARGIN:])
    return words[words.index(verb) :]


@pytest.mark.full
def test_from_own_files_to_text(folder: Path) -> None:
    trained = typed(folder, TRAIN.split())
    assert "validation" in trained
    merged = typed(folder, proposed(trained, "export-weights"))
    assert "merged" in merged
    line = proposed(trained, "generate")
    assert typed(folder, [*line[:-1], "ask=What is 2 plus 5?", "new_tokens=4"])


@pytest.mark.full
def test_what_fits_of_a_model_that_is_named_as_on_the_hub(folder: Path) -> None:
    fits = typed(folder, ["fit", "model=someone/tiny", "hardware=rtx_4090", "batch.seq=64", "zero=stage1,stage3"])
    assert "tiny" in fits
    assert any(line.startswith("take ") for line in fits.splitlines())


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_the_page_of_a_sweep_is_whole_in_a_browser(folder: Path) -> None:
    line = "-m zero=stage1,stage2 model=./mine/model data=synthetic batch.seq=16 batch.micro=1 measure.steps=2"
    typed(folder, [*line.split(), "measure.warmup_steps=1", "resources.ranks=2", "resources.device=cpu"])
    (page,) = folder.glob("outputs/sweeps/*/report.html")
    with Browser(1280, 900) as browser:
        browser.open(f"file://{page}")
        browser.wait_for('document.querySelector("#points tbody tr")?.cells.length')
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.value(wide), "the page is wider than its window"
        assert browser.value('document.querySelectorAll("#points tbody tr").length') == 2
        assert browser.errors == []
