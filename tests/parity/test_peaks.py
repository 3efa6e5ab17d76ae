"""The peak bytes of a rank's model states in a step, counted in live storages, fall from stage to stage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec, TinyTransformer, batch, token_loss_sum
from harness.oracle import ADAMW, LR
from harness.ranks import run_ranks
from harness.unsharded import state_bytes_peak

from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

STAGES = (0, 1, 2, 3)
DEEP = TinySpec(blocks=8)


def _peaks(spec: TinySpec, precision: MixedPrecision) -> list[int]:
    """By stage: the counted peak of the third step."""
    found = []
    for stage in STAGES:
        plan = ZeroPlan.from_stage(stage)
        runtime = ZeroRuntime(TinyTransformer(spec), plan, precision, ADAMW, RuntimeSettings(), torch.device("cpu"))
        ids, labels = (part[:1] for part in batch(spec, 0, dist.get_rank(), 0))
        for _ in range(3):
            with state_bytes_peak(runtime) as peak:
                runtime.backward(token_loss_sum(runtime.model, ids, labels))
            runtime.step(LR)
        found.append(peak.bytes)
        runtime.close()
    return found


@pytest.mark.parametrize(
    ("param", "tied"),
    [
        ("bf16", True),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("fp32", False), ("fp32", True), ("bf16", False))),
    ],
)
def test_with_eight_blocks_each_stage_lowers_the_peak(param: str, tied: bool) -> None:
    spec = TinySpec(blocks=DEEP.blocks, tied=tied)
    for counted in run_ranks(_peaks, 2, spec, MixedPrecision(param)):
        assert counted == sorted(counted, reverse=True)
        assert len(set(counted)) == len(STAGES)
