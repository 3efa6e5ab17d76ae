"""What the host adds to plain torch in a step, in operations: one copy for each gradient, and a few for each unit."""

from __future__ import annotations

from collections import Counter

from harness.ranks import run_alone

LAYERS = 3


def counted() -> dict[str, dict[str, Counter[str]]]:
    """By row and phase, and by kind."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.host_work import WORLD, measured

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    return {name: row["counts"] for name, row in measured(LAYERS, 1).items()}


def test_the_operations_that_the_runtime_adds_are_few_and_known() -> None:
    rows = run_alone(counted)
    plain = rows.pop("plain torch")
    assert list(rows) == ["stage 0", "stage 1", "stage 2", "stage 3"]
    units = LAYERS + 3  # the embedding, the root with its norm, the head
    params = 9 * LAYERS + 3
    for name, phases in rows.items():
        assert phases["forward"]["aten"] == plain["forward"]["aten"], name
        # A copy for each gradient; zeros into the padding of each unit; the sum of the loss.
        assert phases["backward"]["aten"] - plain["backward"]["aten"] <= params + units + 1, name
        assert phases["backward"]["zero_lab"] == 0, name
        gathers = units if name == "stage 3" else 0
        assert phases["forward"]["collectives"] == gathers, name
        assert phases["backward"]["collectives"] == units + gathers, name
        # A sum of squares for each unit, and an update for each run of parameters with equal weight decay.
        assert phases["step"]["zero_lab"] <= units + 3 * units, name
