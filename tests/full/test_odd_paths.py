"""Complete runs with MLflow work in output folders whose names contain characters special to URLs and shells."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import HANG_S

from orchestrator.tracking import names

ROOT = Path(__file__).resolve().parents[2]
LINE = (
    "model=llama_tiny data=synthetic zero=stage2 precision=fp32 resources.device=cpu resources.ranks=2 "
    "resources.threads=1 batch.seq=16 batch.micro=1 measure.validation_batches=0 measure.warmup_steps=1 "
    "measure.steps=2"
)


# All in one folder: its full path works only if none of the characters is special anywhere.
NAME = "a#1 what? 100%25 tab\there line\nbreak ünï ';$(x)&"


@pytest.mark.full
def test_a_run_and_its_records_stay_in_the_output_folder(tmp_path: Path) -> None:
    here = tmp_path / "base" / (NAME if names.decodes() else NAME.replace("?", ""))  # else it is refused
    here.mkdir(parents=True)
    for seed in (1, 2, 1):  # the third run meets the output of the first
        line = [sys.executable, str(ROOT / "run.py"), *LINE.split(), f"seed={seed}"]
        subprocess.run(line, cwd=here, timeout=HANG_S, check=True)
    results = {path: json.loads(path.read_text()) for path in here.glob("outputs/points/*/attempts/*/result.json")}
    assert len(results) == 3
    assert len({one["loss"]["last"] for one in results.values()}) == 2
    with sqlite3.connect(here / "outputs" / "mlflow.db") as store:
        assert store.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)] * 3
    elsewhere = [one for one in (tmp_path / "base").rglob("*") if one.is_file() and not one.is_relative_to(here)]
    assert elsewhere == []
