"""A pytest plugin for DeepSpeed's suite: each test runs in ranks that are forked from this process, for 60 s at most.

It replaces the suite's own start of ranks, and its comparison with references that sum in bf16; the bodies of the tests
are the checkout's.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import stand_in
import torch
import torch.distributed as dist

LIMIT_S = 60.0
GRACE_S = 5.0  # for the other ranks, after one has failed
MOST_RANKS = 2
_FORK = mp.get_context("fork")
_asked = json.loads(os.environ["DEEPSPEED_SUITE"])  # checkout, results, sampled, done
stand_in.install(Path(_asked["checkout"]))


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # a thread pool of this process would not exist in the ranks
    import unit.common
    import unit.util

    for name in ("torch._dynamo", "zero_runtime.deepspeed.entry"):  # else each rank would import them at its first step
        import_module(name)
    unit.common.DistributedExec._launch_procs = _launch
    unit.common.torch_assert_close = _close
    unit.common.reduce_boolean_flags = _on_all_ranks  # its own makes a tensor on device 0, also without one
    unit.util.no_child_process_in_deepspeed_io = nullcontext  # no loader here starts processes
    plain = torch.nn.parallel.DistributedDataParallel.__init__

    def without_devices(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any) -> None:
        plain(self, module, **more)

    if not torch.cuda.is_available():
        torch.nn.parallel.DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]


def _close(actual: torch.Tensor, expected: torch.Tensor, **more: Any) -> None:
    """The suite's comparison, where `expected` in bf16 is as exact as the sums that its own loop rounds to bf16.

    A sum of at most four addends is rounded thrice, each time by up to 2^-9 of its size, which no element exceeds by
    much: together below 2^-7 of the largest element. The runtime sums in fp32.
    """
    if expected.dtype == torch.bfloat16 and not more:
        more = {"rtol": 1.6e-2, "atol": float(expected.abs().max()) * 2**-7}
    torch.testing.assert_close(actual, expected, **more)


def _on_all_ranks(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    flags = [flag] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(flags, flag)
    return op(flags)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each function's parameter sets, `sampled` at even distances, the first and the last among them."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    most, done = _asked["sampled"], set(_asked["done"])
    kept = []
    for group in groups.values():
        count = min(most, len(group)) if most else len(group)
        places = {round(at * (len(group) - 1) / max(count - 1, 1)) for at in range(count)}
        kept += [item for at, item in enumerate(group) if at in places and item.nodeid not in done]
    items[:] = kept
    stand_in.Missing.collecting = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: Any) -> None:
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
    else:
        _raise(_in_ranks([item.runtest]))
    item.runtest = lambda: True  # it has run


def pytest_fixture_setup(fixturedef: Any, request: Any) -> None:
    if getattr(fixturedef.func, "is_dist_fixture", False):
        fixturedef.func()(request)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    if report.outcome == "passed" and report.when != "call":
        return
    error, trace = "", report.longreprtext
    if isinstance(getattr(call.excinfo, "value", None), RankFailedError):
        error, trace = call.excinfo.value.args  # type: ignore[union-attr]
    elif call.excinfo is not None:
        error = f"{call.excinfo.typename}: {call.excinfo.value}"
    _write(item.nodeid, report.outcome, error, trace, call.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        last = (report.longreprtext.splitlines() or [""])[-1].removeprefix("E").strip()
        _write(report.nodeid, report.outcome, f"while collecting: {last}", report.longreprtext, 0.0)


def _write(test: str, outcome: str, error: str, trace: str, seconds: float) -> None:
    line = {"test": test, "outcome": outcome, "error": error[:3000], "trace": trace[-3000:], "seconds": seconds}
    with open(_asked["results"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class RankFailedError(Exception):
    """The error of the rank that failed first: its type and message, and its traceback."""


class Outcome(NamedTuple):
    """How one rank ended, or the test."""

    kind: str
    error: str = ""
    trace: str = ""


def _launch(test: Any, num_procs: int, init_method: str) -> None:
    """In place of DistributedExec._launch_procs."""
    if num_procs > MOST_RANKS:
        pytest.skip(f"harness: {num_procs} ranks")
    _raise(
        _in_ranks([lambda rank=rank: test._dist_run(rank, num_procs, "0", init_method) for rank in range(num_procs)])
    )


def _raise(outcome: Outcome) -> None:
    if outcome.kind == "skipped":
        pytest.skip(outcome.error)
    if outcome.kind == "failed":
        raise RankFailedError(outcome.error, outcome.trace)


def _in_ranks(bodies: list[Callable[[], Any]]) -> Outcome:
    """Run each body in a forked process; the outcome of the one that failed first, or of all."""
    pairs = [_FORK.Pipe(duplex=False) for _ in bodies]
    ranks = [_FORK.Process(target=_rank, args=(body, send)) for body, (_, send) in zip(bodies, pairs, strict=True)]
    for rank, (_, send) in zip(ranks, pairs, strict=True):
        rank.start()
        send.close()
    try:
        return _first_failure([receive for receive, _ in pairs])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _first_failure(waiting: list[Connection]) -> Outcome:
    until, worst = time.monotonic() + LIMIT_S, Outcome("passed")
    while waiting:
        ready = wait(waiting, max(until - time.monotonic(), 0.0))
        if not ready:
            return worst if worst.kind == "failed" else Outcome("failed", f"Hang: no answer in {LIMIT_S:.0f} s")
        for one in ready:
            assert isinstance(one, Connection)
            waiting.remove(one)
            try:
                found = one.recv()
            except EOFError:
                found = Outcome("failed", "Crash: a rank ended without an answer")
            if worst.kind != "failed" and found.kind != "passed":
                worst = found
                until = min(until, time.monotonic() + GRACE_S)
    return worst


def _rank(body: Callable[[], Any], answer: Connection) -> None:
    try:
        told = body()
        outcome = Outcome("skipped", told) if isinstance(told, str) and told else Outcome("passed")
    except pytest.skip.Exception as skipped:
        outcome = Outcome("skipped", str(skipped))
    except BaseException as error:
        outcome = Outcome("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
    answer.send(outcome)
    time.sleep(LIMIT_S)  # until it is killed: the other ranks may still need this one
    os._exit(1)
