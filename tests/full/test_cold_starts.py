"""`fit` with an empty cache gives its whole table at each start: its processes are forked from one that has torch.

A race between the first threads of autograd in such a fork ended a third of these starts ([Note: threads after a fork]
in orchestrator/wings/predict/shapes.py), and each start was another throw of the dice.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
# The model of README's line. Two families of traces, so that two processes count.
LINE = "fit model=llama2_7b hardware=a100_80gb resources.ranks=8 batch.seq=4096 recompute=none,full loss=full"
ROWS = 18  # of four stages and two recomputations: stage 3 has three kinds of offload, the others have two
BUSY = "while True: pass"


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("starts", "busy"), [(80, 0), (20, 4)], ids=["alone", "beside four busy processes"])
def test_each_start_with_an_empty_cache_has_the_whole_table(tmp_path: Path, starts: int, busy: int) -> None:
    ends: Counter[tuple[int, str]] = Counter()
    with busy_processes(busy):
        for number in range(starts):
            environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / f"cache-{number}"), "PYTHONFAULTHANDLER": "1"}
            words = [sys.executable, str(ROOT / "run.py"), *LINE.split(), "--all"]
            done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
            lines = [line for line in done.stderr.splitlines() if not line.startswith("counting without running")]
            assert not lines, done.stderr
            ends[done.returncode, done.stdout] += 1
    ((code, table),) = ends
    assert code == 0
    assert sum(line.startswith("stage") for line in table.splitlines()) == ROWS
