"""Where processes may not read each other, these tests have nothing to run, and say why."""

from __future__ import annotations

import pytest

from zero_runtime.same_host import probe


@pytest.fixture(autouse=True)
def _ranks_may_read_each_other(request: pytest.FixtureRequest) -> None:
    if request.path.name != "test_probe.py" and (reason := probe.trouble()):
        pytest.skip(reason)
