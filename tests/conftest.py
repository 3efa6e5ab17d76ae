"""One fork server for the whole run: torch and transformers are imported once, a rank then costs 0.3 s."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest
from harness import attack_counts, left_out, ranks


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's `&` has it ignored, and so would every child
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(left_out)
    config.pluginmanager.register(attack_counts)
    ranks.prepare_fork_server()
    # Slots of their own: what else runs on this machine neither waits for the tests nor keeps them waiting.
    os.environ["ZLAB_LOCKS"] = tempfile.mkdtemp(prefix="zlab-locks-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["ZLAB_LOCKS"], ignore_errors=True)
