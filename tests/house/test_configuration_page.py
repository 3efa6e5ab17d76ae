"""docs/configuration.md is up to date with the schema and conf/, from which it is generated."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

from harness import configuration_page

from orchestrator.compose.settable import WHOLE_FILES
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import hints_of

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.harness.configuration_page > docs/configuration.md"


def test_the_committed_page_equals_the_generated_page() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == configuration_page.page(), f"docs/configuration.md is stale; run: {COMMAND}"
    assert COMMAND in committed


def test_every_group_has_a_description_on_the_page() -> None:
    groups = [name for name, hint in hints_of(RunConfig).items() if is_dataclass(hint)]
    assert list(configuration_page.DECIDES) == [*groups, *WHOLE_FILES]


def test_no_line_of_text_is_longer_than_the_page_allows() -> None:
    lines = [line for line in configuration_page.page().splitlines() if not line.startswith("|")]
    assert max(map(len, lines)) <= configuration_page.WIDTH


def test_the_page_is_generated_without_torch_and_mlflow() -> None:
    code = "import sys; from tests.harness.configuration_page import page; page(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "mlflow", "hydra"} & set(run.stdout.split())
