"""What a watcher shows of the GPUs' memory, by a stand-in for NVML."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from made_sweep import write_sweep
from rich.console import Console

from orchestrator.commands.watch_sweep import SweepWatch
from orchestrator.records.sweep_record import standings
from orchestrator.report.screen import Screen
from orchestrator.wings.gpus import memory_text

GIB = 2**30


class FakeNvml(ModuleType):
    """NVML whose GPUs hold so many GiB of so many. lost: it fails from then on, as with a GPU that fell off the bus."""

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: tuple[float, int], starts: bool = True) -> None:
        super().__init__("pynvml")
        self.gpus, self.starts, self.lost = gpus, starts, False

    def nvmlInit(self) -> None:
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        used, total = self.gpus[handle]
        return SimpleNamespace(used=int(used * GIB), total=total * GIB)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, ""),  # the package is not there
        (FakeNvml(starts=False), ""),
        (FakeNvml(), ""),
        (FakeNvml((0.5, 80), (12.25, 80)), "   GPUs: 512 MiB, 12.2 GiB of 80.0 GiB"),
        (FakeNvml((1, 24), (2, 80)), "   GPUs: 1.00 GiB, 2.00 GiB of 24.0 GiB/80.0 GiB"),
    ],
)
def test_memory_is_told_where_nvml_knows_it(found: FakeNvml | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", found)
    assert memory_text() == text
    if found is not None:
        found.lost = True
        assert memory_text() == ""


def test_a_watched_sweep_of_this_machine_has_it_beside_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = write_sweep(tmp_path, 2)
    console = Console(width=200)
    watch = SweepWatch(sweep, Screen(console), lambda: True)
    for found, expected in ((FakeNvml((3, 80)), "   GPUs: 3.00 GiB of 80.0 GiB   Ctrl-C"), (None, "   Ctrl-C")):
        monkeypatch.setitem(sys.modules, "pynvml", found)
        with console.capture() as shown:
            console.print(watch._table(standings(sweep)))
        title = shown.get().splitlines()[0]
        assert "done 2/2   00:00:0" in title
        assert title.partition("00:00:0")[2][1:].startswith(expected)
