"""The table of tensor parallelism against stage 3: its rows, and what its rounds say."""

from __future__ import annotations

from typing import Any

from benchmarks import tp_vs_zero3

MIB = 2**20


def point(stage: int, tp: int, medians: list[float], offload: str = "device") -> dict[str, Any]:
    rounds = [{"number": number, "step_ms": [ms], "others_share": 0.02} for number, ms in enumerate(medians)]
    volumes = {"all_gather": {"bytes": 3 * MIB}} | ({"tensor_all_reduce": {"bytes": 5 * MIB}} if tp > 1 else {})
    states = [{"component": name, "measured_bytes": MIB} for name in ("params", "grads", "optimizer")]
    return {
        "config": {"zero": {"stage": stage}, "parallel": {"tp": tp}, "offload": {"optimizer": offload}},
        "result": {
            "rounds": rounds,
            "session": "together",
            "batch": {"tokens_per_step": 1000},
            "memory": {"states": states, "activations_bytes": 4 * MIB},
            "communication": {"data": volumes},
            "phases_ms": {"communication_exposed": 7.0},
            "throughput": {"step_ms": {"median": 100.0}},
        },
    }


WITHOUT = [point(1, 2, [200.0] * 6), point(3, 1, [100.0] * 6)]
OFFLOADED = [point(3, 1, [100.0, 200.0, 50.0]), point(3, 1, [125.0, 250.0, 62.5], "nvme")]


def test_a_row_has_its_speed_and_its_ratio_to_stage_3_of_the_same_rounds() -> None:
    divided, base = tp_vs_zero3.rows_of(WITHOUT)
    assert divided.startswith("| 1,000 | 1 | 2 | 5,000 (5,000-5,000) | 0.50 (0.50-0.50) | 7 of 100 |")
    assert divided.endswith("| 1.00, 1.00, 1.00 | 4.0 | 3.00 + 5.00 |")
    assert base.startswith("| 1,000 | 3 | 1 | 10,000 (10,000-10,000) | 1 |")
    _, offloaded = tp_vs_zero3.rows_of(OFFLOADED)
    assert "| 3, offloaded to NVMe | 1 |" in offloaded
    assert "| 0.80 (0.80-0.80) |" in offloaded, "the machine's speed changed between rounds, and the ratio did not"


def test_the_table_has_the_rows_of_both_batches_and_the_load_that_they_met() -> None:
    new = tp_vs_zero3.block({4: [WITHOUT, OFFLOADED], 32: [WITHOUT, OFFLOADED]}, "a machine", "today")
    assert len([line for line in new.splitlines() if line.startswith("| 1,000")]) == 2 * 3
    assert "Other processes took 2% of the cores in the median round, 2% at most" in new
