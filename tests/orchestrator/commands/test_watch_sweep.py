"""What a command does at the end of a sweep that it has watched."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from made_sweep import write_sweep
from rich.console import Console

from orchestrator.commands.sweep import watch
from orchestrator.report.screen import Screen


@pytest.mark.parametrize(("code", "writes"), [(0, False), (1, True), (130, True), (-9, True)])
def test_a_command_writes_the_report_only_if_its_controller_has_not_ended_well(
    code: int, writes: bool, tmp_path: Path
) -> None:
    sweep = write_sweep(tmp_path, 2)
    controller = cast(subprocess.Popen[bytes], SimpleNamespace(poll=lambda: code, wait=lambda: code))
    assert watch(sweep, Screen(Console(file=io.StringIO(), width=300)), controller) == 0
    assert (sweep.report.exists(), sweep.page.exists()) == (writes, writes)
