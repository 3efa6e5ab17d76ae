"""One fork server for the whole run: torch and transformers are imported once, a rank then costs 0.3 s."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest
from harness import ranks


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's `&` has it ignored, and so would every child
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks.prepare_fork_server()
    # Slots of their own: what else runs on this machine neither waits for the tests nor keeps them waiting.
    os.environ["ZLAB_LOCKS"] = tempfile.mkdtemp(prefix="zlab-locks-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["ZLAB_LOCKS"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`full` tests run only when asked for (`-m full`), and say so."""
    if "full" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="long form; run by `make test-full`")
    for item in items:
        if item.get_closest_marker("full"):  # not by keyword: a folder of this name is one too
            item.add_marker(skip)
