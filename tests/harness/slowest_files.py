"""A pytest plugin with the option `--slowest-files N`: prints the N test files that took longest, in seconds.

A file is what pytest-xdist gives to a process at once. Set-up counts for the file that needed it first.
"""

from __future__ import annotations

from collections import Counter

import pytest

OPTION = "--slowest-files"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=int, default=0, metavar="N", help="print the N slowest test files")


class SlowestFiles:
    """Sums the seconds of set-up, call and teardown from the reports, of this process or of pytest-xdist's workers."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        return [f"{seconds:7.1f} s  {file}" for file, seconds in self._seconds.most_common(self._count)]
