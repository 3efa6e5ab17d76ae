"""What the host adds to plain torch in a step: a copy for each gradient, some operations and calls for each unit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness.ranks import run_alone

LAYERS = 3
# A block is one call of a module that bounds a unit. It has 9 parameters, and 16 attributes that are parameters or
# could be: a weight and a bias of each of 7 matrices, a weight of each of 2 norms.
PARAMS, READS = 9, 16
# Calls of the runtime's Python functions, counted under Python 3.11 (later versions have fewer, see PythonCalls):
CALL, USE = 13, 5  # the hooks of a module's call in forward; one use of a unit
GATHER, RELEASE = 37, 9  # from the schedule through the collective to the guard of the parameters, and back
LEFT_OPEN = 2  # the end of the forward asks each unit again whether it is released
GRADIENT = 5  # for each parameter: the hook, the copy into the flat gradient, and the question whether it was the last
CALL_BACKWARD, REDUCTION = 14, 38
UPDATE = 19  # the norm, the update, the end of the gradients
GATHER_BEGUN = 22  # rows that keep full parameters begin the gather in the step


def measured_alone(layers: int) -> dict[str, dict[str, Any]]:
    """What the benchmark counts of each row."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.host_work import WORLD, measured

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    return measured(layers, 1)


def test_the_operations_that_the_runtime_adds_are_few_and_known() -> None:
    rows: dict[str, dict[str, Counter[str]]] = {
        name: row["counts"] for name, row in run_alone(measured_alone, LAYERS).items()
    }
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


def test_a_block_costs_no_more_python_calls_of_the_runtime_than_are_accounted_for() -> None:
    """What a block adds: the difference of two models, one of which has a block more."""
    fewer, more = (run_alone(measured_alone, layers) for layers in (LAYERS, LAYERS + 1))
    ceilings = {
        "forward": READS + CALL + USE + GATHER + RELEASE + LEFT_OPEN,
        "backward": PARAMS * GRADIENT + CALL_BACKWARD + GATHER + RELEASE + REDUCTION,
        "step": UPDATE + GATHER_BEGUN,
    }
    for name in ("stage 0", "stage 1", "stage 2", "stage 3"):
        for phase, ceiling in ceilings.items():
            calls = more[name]["calls"][phase] - fewer[name]["calls"][phase]
            assert calls <= ceiling, f"{name}, {phase}: {calls} calls for a block, at most {ceiling} accounted for"
    assert more["stage 3"]["calls"]["step"] - fewer["stage 3"]["calls"]["step"] <= UPDATE
