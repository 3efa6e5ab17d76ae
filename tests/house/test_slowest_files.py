"""`--slowest-files` sums the seconds of each file's tests, the slowest file first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from harness.slowest_files import SlowestFiles


def test_the_seconds_of_a_files_tests_are_summed_and_the_slowest_files_come_first() -> None:
    plugin = SlowestFiles(2)
    for test, duration in [("a.py::one", 1.0), ("b.py::one", 1.5), ("a.py::two[x::y]", 1.0), ("c.py::one", 0.1)]:
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=test, duration=duration))  # type: ignore[arg-type]
    assert plugin.lines() == ["    2.0 s  a.py", "    1.5 s  b.py"]


def test_nothing_is_printed_unless_it_is_asked_for(request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("slowest_files")
    assert any(isinstance(one, SlowestFiles) for one in request.config.pluginmanager.get_plugins()) is bool(asked)
