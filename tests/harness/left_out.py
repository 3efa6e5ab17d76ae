"""A pytest plugin that deselects and counts tests that a run leaves out on purpose, and prints one line per reason.

So a skip always means that something is missing on this machine.
"""

from __future__ import annotations

from collections import Counter

import pytest

LONG_FORM = "long-form tests left out: `make test-full`"
NO_GPU = "GPU tests left out, no CUDA device here: `make gpu`"
_COUNTS = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(trylast=True)  # after -m and -k: tests that those deselect are not counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wants_long_form = "full" in (config.option.markexpr or "")
    has_gpu = any(item.get_closest_marker("gpu") for item in items) and _finds_cuda()
    reasons = [reason_to_leave_out(item, wants_long_form=wants_long_form, has_gpu=has_gpu) for item in items]
    config.hook.pytest_deselected(items=[item for item, reason in zip(items, reasons, strict=True) if reason])
    items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]
    config.stash[_COUNTS] = dict(Counter(reason for reason in reasons if reason))


def reason_to_leave_out(item: pytest.Item, *, wants_long_form: bool, has_gpu: bool) -> str | None:
    if item.get_closest_marker("gpu") and not has_gpu:
        return NO_GPU
    if item.get_closest_marker("full") and not wants_long_form:  # not by keyword: a folder named full counts as one
        return LONG_FORM
    return None


def _finds_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist; its controller counts nothing
        session.config.workeroutput["left_out"] = session.config.stash.get(_COUNTS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Every worker of pytest-xdist collects all tests, so the count of any of them is complete."""
    output = getattr(node, "workeroutput", {})  # a worker that crashed has none
    if "left_out" in output:
        node.config.stash[_COUNTS] = output["left_out"]  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in sorted(config.stash.get(_COUNTS, {}).items()):
        terminalreporter.write_line(f"{count} {reason}")
