"""A helper process of the tests that dies says how it ended and what it wrote last, whatever the test was doing."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from harness import browser
from harness.helper_process import HelperProcess
from harness.ranks import run_ranks

DYING = "import sys; sys.exit('no such device')"
ASKED = {
    "sends until the pipe is broken": lambda helper: [helper.send(b"x" * 4096) for _ in range(10_000)],
    "reads": lambda helper: helper.read(8),
    "reads a line": lambda helper: helper.read_line(),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_dead_helper_process_says_its_exit_status_and_its_last_words(asked: str) -> None:
    helper = HelperProcess("the helper", [sys.executable, "-S", "-c", DYING])
    with pytest.raises(AssertionError, match=r"the helper has ended with exit status 1;.*\nno such device"):
        ASKED[asked](helper)
    helper.close()


def test_a_dead_browser_says_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "CHROMIUM", "/bin/false")
    with pytest.raises(AssertionError, match="the browser has ended with exit status 1"):
        browser.Browser()


def test_a_helper_process_answers_and_ends() -> None:
    echo = "import sys; [print(line.strip()[::-1], flush=True) for line in sys.stdin]"
    helper = HelperProcess("the helper", [sys.executable, "-S", "-c", echo])
    helper.send(b"ab", b"c\n")
    assert helper.read_line() == b"cba\n"
    helper.close()


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_is_killed_by_a_signal_says_which() -> None:
    with pytest.raises(AssertionError, match="rank 0: ended without a result, with exit code -11"):
        run_ranks(kill_itself, 1)
