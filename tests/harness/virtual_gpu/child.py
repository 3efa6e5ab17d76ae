"""The process of the virtual GPU: reads jobs from standard input, runs each in a fork of its own, writes results.

`python -m harness.virtual_gpu.child GUARD`, with lines of JSON in both directions: a job is that of process.py, a
result is what rows.run returned, or {"error": traceback}. The library of the guard has to be loaded before torch, which
is why this is not a fork of the tests' fork server.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
import warnings
from typing import Any

from harness.virtual_gpu.build import load_guard


def main() -> None:
    os.environ["ZLAB_KERNELS"] = "reference"
    guard = load_guard(sys.argv[1])
    _warm_up()
    for line in sys.stdin:
        print(json.dumps(_in_a_fork(guard, json.loads(line))), flush=True)
    os._exit(0)  # nothing to clean up, and torch's own end takes seconds


def _warm_up() -> None:
    """Import all that a row needs, and run a fake operation, whose first call imports seconds' worth of modules."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.virtual_gpu import faults, rows, timed_rows  # noqa: F401

    torch.set_num_threads(1)
    with FakeTensorMode():
        torch.empty(4, 4, device="cuda:3") @ torch.empty(4, 4, device="cuda:3")


def _in_a_fork(guard: ctypes.CDLL, job: dict[str, Any]) -> dict[str, Any]:
    """The job's result. A fork, because rows replace parts of torch and of the product."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(_result(guard, job), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"ended with status {status} and without a result"}


def _result(guard: ctypes.CDLL, job: dict[str, Any]) -> dict[str, Any]:
    from harness.virtual_gpu import faults, rows, timed_rows
    from harness.virtual_gpu.row import Row

    warnings.simplefilter("ignore")
    try:
        for name in job["faults"]:
            faults.apply(name)
        if job["timed"]:
            return timed_rows.run_row(guard, Row(**job["row"]))
        return rows.run(guard, Row(**job["row"]), job["without"])
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main()
