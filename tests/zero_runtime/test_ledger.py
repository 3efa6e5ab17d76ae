"""The ledger knows what was sent by collective, unit and dtype."""

from __future__ import annotations

import torch

from zero_runtime.ledger import Ledger, Volume


def test_volumes_are_kept_by_unit_and_dtype_and_summed_by_collective() -> None:
    ledger = Ledger()
    ledger.record("all_gather", "a", 10, torch.bfloat16)
    ledger.record("all_gather", "a", 10, torch.bfloat16)
    ledger.record("all_gather", "b", 10, torch.float32)
    ledger.record("all_reduce", "a", 1, torch.float32)
    assert ledger.sent == {
        ("all_gather", "a", torch.bfloat16): Volume(2, 20, 40),
        ("all_gather", "b", torch.float32): Volume(1, 10, 40),
        ("all_reduce", "a", torch.float32): Volume(1, 1, 4),
    }
    assert ledger.data == {"all_gather": Volume(3, 30, 80), "all_reduce": Volume(1, 1, 4)}
    assert ledger.data_elements == 31
    counted = ledger.reset()
    assert counted.data_elements == 31
    assert (ledger.sent, ledger.data) == ({}, {})
