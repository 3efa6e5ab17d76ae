"""The peak bytes of a rank's model states in a step, counted in live storages, fall from stage to stage; or a warning
says that they cannot."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec, TinyTransformer, batch, token_loss_sum
from harness.oracle import ADAMW, LR
from harness.ranks import run_ranks
from harness.unsharded import state_bytes_peak

from zero_runtime.accounting import predicted_peak
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.state_bytes import StepPeak

STAGES = (0, 1, 2, 3)
DEEP = TinySpec(blocks=8)
SHALLOW = TinySpec(blocks=1, tied=True)


def _peaks(spec: TinySpec, precision: MixedPrecision) -> dict[int, tuple[int, StepPeak, list[str]]]:
    """By stage: the counted peak of the third step, the predicted peak, and the warnings at construction."""
    found = {}
    for stage in STAGES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runtime = ZeroRuntime(
                TinyTransformer(spec),
                ZeroPlan.from_stage(stage),
                precision,
                ADAMW,
                RuntimeSettings(),
                torch.device("cpu"),
            )
        ids, labels = (part[:1] for part in batch(spec, 0, dist.get_rank(), 0))
        for _ in range(3):
            with state_bytes_peak(runtime) as peak:
                runtime.backward(token_loss_sum(runtime.model, ids, labels))
            runtime.step(LR)
        found[stage] = (peak.bytes, predicted_peak(runtime), [str(one.message) for one in caught])
        runtime.close()
    return found


@pytest.mark.parametrize(
    ("param", "tied"),
    [
        ("bf16", True),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("fp32", False), ("fp32", True), ("bf16", False))),
    ],
)
def test_with_eight_blocks_each_stage_lowers_the_peak_and_none_exceeds_the_prediction(param: str, tied: bool) -> None:
    spec = TinySpec(blocks=DEEP.blocks, tied=tied)
    for by_stage in run_ranks(_peaks, 2, spec, MixedPrecision(param)):
        counted = [by_stage[stage][0] for stage in STAGES]
        predicted = [by_stage[stage][1].total for stage in STAGES]
        assert counted == sorted(counted, reverse=True)
        assert len(set(counted)) == len(STAGES)
        assert all(one <= bound for one, bound in zip(counted, predicted, strict=True))
        assert predicted == sorted(predicted, reverse=True)
        assert not any("whole at once" in text for _, _, texts in by_stage.values() for text in texts)


def test_a_stage_that_unshards_most_of_the_model_together_warns_with_the_bytes() -> None:
    for by_stage in run_ranks(_peaks, 2, SHALLOW, MixedPrecision()):
        warned = {
            stage: [text for text in texts if "whole at once" in text] for stage, (_, _, texts) in by_stage.items()
        }
        assert not warned[0]
        assert not warned[1]
        for stage in (2, 3):
            (text,) = warned[stage]
            assert f"up to {by_stage[stage][1].total:,} bytes" in text
            assert f"one state less {by_stage[stage - 1][1].total:,}" in text
