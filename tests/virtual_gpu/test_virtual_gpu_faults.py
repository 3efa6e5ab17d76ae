"""The virtual GPU can fail: every named fault breaks its rule, and a wait that is left out leaves something unordered.

A site is a kind of wait and the three innermost functions of the product that wait there (Machine.follow). Every site
of the rows below is left out in turn, so a new wait in the product is a new fault here, or is listed as redundant.
Waits of threads for each other stay: they order what threads do in Python's own data, which is not recorded.
"""

from __future__ import annotations

import pytest
from harness.attack_counts import Tally
from harness.virtual_gpu.checks import troubles, unordered
from harness.virtual_gpu.faults import FAULTS
from harness.virtual_gpu.process import Job, VirtualGpu
from harness.virtual_gpu.row import Row

ROWS = [
    Row(stage=2, offload="optimizer"),
    Row(stage=2, offload="optimizer", late=True),
    Row(offload="both", shard_ranks=4),
    Row(offload="both", late=True),
    Row(offload="params"),
    Row(offload="activations", recompute="by_operation"),
    Row(offload="both nvme"),
    Row(offload="params cpu optimizer nvme", late=True),
    Row(optimizer="lamb"),
]
SETTLED = "before the memory is unlocked, every unit has settled and the step has read its loss on the host"
SETTLES = "host waits for event at copy_streams.py:wait < device_host.py:end_copies < device_host.py:settle"
CLOSES = "host waits for device at copy_streams.py:close < host.py:close < closed.py:hand_back"
REDUNDANT = {
    SETTLES: "between two steps only a close settles units here, which waits for the device too: see the test of both",
    CLOSES: SETTLED,
    "host waits for device at copy_streams.py:close < nvme.py:close < closed.py:hand_back": SETTLED,
    "host waits for device at copy_streams.py:close < offload.py:close < recompute.py:remove": SETTLED,
    "stream waits for event at copy_streams.py:hold_device < copy_streams.py:to_device < device_host.py:send_params": (
        "new parameters come from an update that has waited for the gradient, whose copy follows every reader"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_every_named_fault_is_found(name: str, virtual_gpu: VirtualGpu, checked: Tally) -> None:
    fault = FAULTS[name]
    sound = virtual_gpu.result(Job(fault.row))
    assert not troubles(fault.row, sound)
    # A prediction replays the runtime's own schedule, so a fault of the schedule would change it too.
    result = virtual_gpu.result(Job(fault.row, (name,))) | {"predicted": sound["predicted"]}
    found = fault.rule in troubles(fault.row, result)
    checked("named faults on the virtual GPU", tried=1, found=int(found))
    assert found


def test_there_are_enough_named_faults() -> None:
    assert len(FAULTS) >= 30


def can_be_left_out(site: str) -> bool:
    """Threads' waits for each other: see above. A copy without non_blocking waits by itself."""
    return not site.startswith("thread waits") and " copy of " not in site


@pytest.mark.full
def test_every_wait_that_is_left_out_is_found(virtual_gpu: VirtualGpu, checked: Tally) -> None:
    missed, sites = set(), set()
    for row in ROWS:
        for site in filter(can_be_left_out, virtual_gpu.result(Job(row))["waits"]):
            if site in sites - missed:
                continue  # found in a row before
            sites.add(site)
            if unordered(virtual_gpu.result(Job(row, without=(site,)))):
                missed.discard(site)
            else:
                missed.add(site)
    checked("waits left out on the virtual GPU", tried=len(sites), found=len(sites - missed), redundant=len(missed))
    assert missed == set(REDUNDANT)


@pytest.mark.full
def test_two_waits_that_cover_each_other_are_found_together(virtual_gpu: VirtualGpu) -> None:
    row = Row(stage=2, offload="optimizer")
    assert {SETTLES, CLOSES} <= set(virtual_gpu.result(Job(row))["waits"])
    assert unordered(virtual_gpu.result(Job(row, without=(SETTLES, CLOSES))))
