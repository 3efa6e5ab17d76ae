"""What must be true of every row, as lines of text about what is not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness.virtual_gpu.row import SEQUENCES, Row

Result = dict[str, Any]
Waits = Counter[tuple[str, str, str]]  # kind, place, thread
READ = ("copy of pageable memory", "runtime.py:_agree", "main")
EVENT = ("event", "copy_streams.py:wait")
NUMBERS = 8  # of 8 bytes, that may exist at the peak and are not predicted


def troubles(row: Row, found: Result) -> dict[str, list[str]]:
    """The rules that a row breaks, with the details."""
    every = {
        "unordered accesses": unordered(found),
        "another device is current": [f"{count} x {place}" for place, count in found["elsewhere"].items()],
        "contexts on other devices": [str(index) for index in found["contexts"] if index != found["device"]],
        "waits of the host": waits(row, found),
        "events that are kept": kept_events(found),
        "order of destruction": destruction(found),
        "memory of the device": memory(row, found),
        "other dtypes than asked for": found["dtypes"],
    }
    return {rule: lines for rule, lines in every.items() if lines}


def unordered(found: Result) -> list[str]:
    return [
        f"{pair['later']}\n  || {pair['earlier']}\n  of memory from {pair['allocated']}" for pair in found["disorders"]
    ]


def expected_waits(row: Row, found: Result) -> Waits:
    """The waits of a steady step, with "helper" for every thread that is not the main one.

    The main thread reads the loss and the norm once. The thread that updates offloaded units waits for each gradient
    and, if the parameters stay on the device, for the previous step's copy of the new ones. Parameters in a file are
    read into host buffers, which are reused when the host knows that the copy of each gather has left them.
    """
    expected: Waits = Counter({READ: 1})
    if row.offload in ("none", "activations", "params"):
        return expected
    sends_params = row.offload.startswith("optimizer")
    expected[(*EVENT, "helper")] = found["trained_units"] * (2 if sends_params else 1)
    if row.offload == "both nvme":
        expected[(*EVENT, "main")] = found["gathers"]
    return expected


def waits(row: Row, found: Result) -> list[str]:
    expected = expected_waits(row, found)
    counted: Waits = Counter(
        (kind, place, "main" if thread == "main" else "helper") for kind, place, thread in found["syncs"]
    )
    every = sorted({*expected, *counted})
    return [
        f"{site}: expected {expected[site]}, found {counted[site]}" for site in every if expected[site] != counted[site]
    ]


def kept_events(found: Result) -> list[str]:
    """A steady step leaves as many CUDA events alive as it found."""
    before, after = found["alive_before"], found["events_alive"]
    return [] if before == after else [f"{before} before the step, {after} after it"]


def memory(row: Row, found: Result) -> list[str]:
    """The allocator needs as much as the tensors, and a traced row's tensors are those that were predicted.

    See [Note: pending] in allocator.py, and `unpredicted_bytes`.
    """
    tensors, taken, pools = (found["peaks"][name] for name in ("tensors", "taken", "pools"))
    lines = [] if tensors == taken else [f"{taken - tensors:,} bytes of {taken:,} wait for another stream"]
    if pools > taken:
        lines.append(f"{pools - taken:,} bytes of {pools:,} are held by streams that do not use them at that time")
    if row.traced and not 0 <= unpredicted_bytes(row, found) <= NUMBERS * 8:
        lines.append(f"predicted {found['predicted']:,} bytes without the token ids, found {taken:,}")
    return lines


def unpredicted_bytes(row: Row, found: Result) -> int:
    """The peak of the tensors less the predicted peak and the token ids: the loss, its sum, the norm and the like."""
    taken: int = found["peaks"]["taken"]
    return taken - found["predicted"] - SEQUENCES * row.tokens * 8


def destruction(found: Result) -> list[str]:
    """Groups are destroyed in the reverse order of making on every rank, and the default group at the end."""
    default, *made = found["made"]
    expected = [*reversed(made), default]
    return [] if found["destroyed"] == expected else [f"expected {expected}, found {found['destroyed']}"]
