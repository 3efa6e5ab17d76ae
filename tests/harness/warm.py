"""Imported by the fork server after the libraries: does once what each rank would otherwise do at its start."""

from __future__ import annotations

from contextlib import suppress

import torch

from zero_runtime.kernels.cpu.build import BuildError
from zero_runtime.kernels.registration import prepare


def _prepare_kernels() -> None:
    """Loads and checks the C++ kernels. Without them each rank tries again, and reports why."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a pool would be missing in forked processes
    with suppress(BuildError, ValueError):
        prepare(torch.device("cpu"))
    torch.set_num_threads(threads)


_prepare_kernels()
