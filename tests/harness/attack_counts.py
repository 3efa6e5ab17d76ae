"""A pytest plugin that prints how much the tests in tests/attack tried, and how much other tests checked: one line per
kind, and one for the total of the attacks.

A count is part of its test's report, so the processes of pytest-xdist need no shared file.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import pytest

ATTACK, CHECKED = "attack", "checked"  # names of the properties of a test's report, and the first words of the lines
_COUNTS = pytest.StashKey[dict[tuple[str, str], Counter[str]]]()


class Tally(Protocol):
    def __call__(self, kind: str, **counts: int) -> None:
        """Add to the counts of a kind. `wrong_exit_codes=0` is printed as "0 wrong exit codes"."""


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Counts that are printed at the end of the run, those of failed tests included."""
    return _tally(request, ATTACK)


@pytest.fixture
def checked(request: pytest.FixtureRequest) -> Tally:
    """The same for tests that attack nothing and check a number of cases."""
    return _tally(request, CHECKED)


def _tally(request: pytest.FixtureRequest, label: str) -> Tally:
    kinds: dict[str, dict[str, int]] = {}

    def add(kind: str, **counts: int) -> None:
        if kind not in kinds:
            kinds[kind] = {}
            request.node.user_properties.append((label, [kind, kinds[kind]]))
        for name, count in counts.items():
            kinds[kind][name] = kinds[kind].get(name, 0) + count

    return add


class _Counting:
    """Collects counts from the reports, of this process or of pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.counts = config.stash.setdefault(_COUNTS, {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":  # each of a test's three reports holds the counts so far
            return
        for name, value in report.user_properties:
            if name in (ATTACK, CHECKED):
                kind, counts = value
                self.counts.setdefault((name, kind), Counter()).update(counts)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Counting(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = dict(sorted(config.stash.get(_COUNTS, {}).items()))
    for (name, kind), found in counts.items():
        terminalreporter.write_line(f"{name}: {kind}: {spelled(found)}")
    attacks = [found for (name, _), found in counts.items() if name == ATTACK]
    if len(attacks) > 1:
        every: Counter[str] = Counter()
        for found in attacks:
            every.update(found)
        terminalreporter.write_line(f"attack: in all: {spelled(every)}")


def spelled(counts: Counter[str]) -> str:
    """The counts as text: `2,500 inputs, 0 wrong exit codes`."""
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
