"""The contestants of the kernel benchmark step over numbers typical of training, from the first round to the last."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels as benchmark
from benchmarks.kernels import Streams, measure, refuse_unusual_numbers
from zero_runtime.kernels import ops


@pytest.mark.parametrize("kind", ["mixed", "fp32"])
def test_the_bare_loop_does_not_change_the_tensors_of_the_other_contestants(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums, used as second moments, would be negative for half of the elements."""
    # If DeepSpeed is installed, its first use would compile for a minute.
    monkeypatch.setattr(benchmark, "deepspeeds", lambda *_: lambda _threads: None)
    ops.prepare(torch.device("cpu"))
    threads = torch.get_num_threads()
    streams = Streams(4096)
    try:
        times = measure(kind, streams, rounds=1)
    finally:
        torch.set_num_threads(threads)
    assert "bare loop/1" in times
    assert bool(torch.isfinite(streams.master).all())
    assert bool((streams.second >= 0).all())


def test_non_finite_numbers_after_the_rounds_are_refused() -> None:
    streams = Streams(16)
    streams.master[3] = torch.nan
    with pytest.raises(SystemExit, match="mixed: expected finite numbers after the rounds, found others in master"):
        refuse_unusual_numbers("mixed", streams)
