"""Lets a test step the wall clock in every process of a command: Python imports this file first if its folder is on
PYTHONPATH. The file named by ZLAB_CLOCK holds the seconds by which the clock is stepped; monotonic clocks do not
change."""

import contextlib
import os
import time

import psutil

_time, _time_ns, _boot_time = time.time, time.time_ns, psutil._psplatform.boot_time


def _step_s():
    with (
        contextlib.suppress(OSError, ValueError),
        open(os.environ.get("ZLAB_CLOCK", os.devnull), encoding="ascii") as file,
    ):
        return float(file.read())
    return 0.0


time.time = lambda: _time() + _step_s()
time.time_ns = lambda: _time_ns() + int(1e9 * _step_s())
# The kernel's btime is the wall clock less the time since boot, so it moves with every step.
psutil._psplatform.boot_time = psutil.boot_time = lambda: _boot_time() + _step_s()
