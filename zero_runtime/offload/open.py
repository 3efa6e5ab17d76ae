"""Opens the tier of a rank's offloaded units."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.collectives import Collectives
from zero_runtime.errors import CheckpointError, OffloadError
from zero_runtime.offload.copy_streams import copies_for
from zero_runtime.offload.host import HostTier
from zero_runtime.offload.nvme import NvmeTier
from zero_runtime.offload_plan import OffloadPlan
from zero_runtime.state_tier import StatesOf, StateTier, is_offloaded
from zero_runtime.unit import Unit


def open_tier(
    plan: OffloadPlan, units: Sequence[Unit], states_of: StatesOf, collectives: Collectives, device: torch.device
) -> StateTier:
    """The tier of the offloaded units. If a rank cannot open its tier, all ranks raise OffloadError."""
    held = [unit for unit in units if is_offloaded(unit)]
    opened: list[StateTier] = []

    def open_own() -> None:
        copies = (plan.copies or copies_for)(device)
        if plan.uses_nvme:
            opened.append(NvmeTier(held, states_of, plan, copies, collectives.rank))
        else:
            assert copies is not None, "host offload needs copies between two memories"
            opened.append(HostTier(held, states_of, copies))

    try:
        agree(collectives, trouble_of(open_own))
    except CheckpointError as error:
        for tier in opened:
            tier.close()
        raise OffloadError(str(error)) from None
    return opened[0]
