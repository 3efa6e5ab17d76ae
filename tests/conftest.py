"""Starts one fork server for the test run: it imports torch and transformers once, so that a rank starts in 0.3 s."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile

import pytest
from harness import attack_counts, left_out, ranks, slowest_files
from platforms import machine

# These tests wait for limits of time more than they work, and at the end of a run one process would wait alone.
FIRST = "tests/zero_runtime/watch/"


def pytest_addoption(parser: pytest.Parser) -> None:
    slowest_files.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # ignored by a shell's `&` and then by every child
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(left_out)
    config.pluginmanager.register(attack_counts)
    if count := config.getoption(slowest_files.OPTION):
        config.pluginmanager.register(slowest_files.SlowestFiles(count))
    os.environ.pop("COLUMNS", None)  # a worker of xdist has 80, and tables in a pipe would be as narrow
    ranks.prepare_fork_server()
    # Separate slots: other work on this machine neither waits for the tests nor makes them wait.
    os.environ["ZLAB_LOCKS"] = tempfile.mkdtemp(prefix="zlab-locks-")


def pytest_sessionstart(session: pytest.Session) -> None:
    if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:  # None: xdist's worker
        reporter.write_line(f"processor: {machine.describe()}")  # -q leaves pytest's own header out


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # a collection visits what tests make, not a million objects of the libraries, which stay anyway
    atexit.register(gc.unfreeze)  # nanobind would report the frozen objects as leaked


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["ZLAB_LOCKS"], ignore_errors=True)
