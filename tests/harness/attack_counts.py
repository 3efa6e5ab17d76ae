"""A pytest plugin that prints how much the suites that count tried: one line per kind and one for the total.

These are the tests in tests/attack and in tests/virtual_gpu.

A count is part of its test's report, so the processes of pytest-xdist need no shared file.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import pytest

PROPERTY = "attack"
SUITES = {"virtual_gpu": "virtual GPU"}  # by folder; every other folder's counts are those of the attack tests
_COUNTS = pytest.StashKey[dict[tuple[str, str], Counter[str]]]()  # by suite and kind


class Tally(Protocol):
    def __call__(self, kind: str, **counts: int) -> None:
        """Add to the counts of a kind. `wrong_exit_codes=0` is printed as "0 wrong exit codes"."""


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Counts that are printed at the end of the run, those of failed tests included."""
    kinds: dict[str, dict[str, int]] = {}
    suite = SUITES.get(request.node.path.parent.name, "attack")

    def add(kind: str, **counts: int) -> None:
        if kind not in kinds:
            kinds[kind] = {}
            request.node.user_properties.append((PROPERTY, [suite, kind, kinds[kind]]))
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
            if name == PROPERTY:
                suite, kind, counts = value
                self.counts.setdefault((suite, kind), Counter()).update(counts)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Counting(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(_COUNTS, {})
    for suite in sorted({suite for suite, _ in counts}):
        own = {kind: counts[name, kind] for name, kind in sorted(counts) if name == suite}
        for kind, found in own.items():
            terminalreporter.write_line(f"{suite}: {kind}: {spelled(found)}")
        if len(own) > 1 and suite == "attack":
            every: Counter[str] = Counter()
            for found in own.values():
                every.update(found)
            terminalreporter.write_line(f"{suite}: in all: {spelled(every)}")


def spelled(counts: Counter[str]) -> str:
    """The counts as text: `2,500 inputs, 0 wrong exit codes`."""
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
