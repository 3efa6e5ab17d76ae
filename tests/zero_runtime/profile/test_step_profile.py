"""Profiled steps: counted operations follow their closed form, memory is that of the census, training is unchanged."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from points import config_of_line

from orchestrator.worker.setup import build_runtime
from orchestrator.workloads.models import token_losses
from zero_runtime.census import ActivationCensus, take_census
from zero_runtime.profile import step_profile
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.state_bytes import ONE_NUMBER_BYTES

MICRO, SEQ, LAYERS, WIDTH, INNER, VOCAB = 2, 64, 2, 96, 128, 256
MODEL = (
    f"model=llama_tiny model.config.num_hidden_layers={LAYERS} model.config.hidden_size={WIDTH} "
    f"model.config.intermediate_size={INNER} model.config.vocab_size={VOCAB} batch.micro={MICRO} batch.seq={SEQ}"
)
TOKENS = MICRO * SEQ
HEAD = 2 * TOKENS * WIDTH * VOCAB  # operations of its forward
DOWN = 2 * TOKENS * INNER * WIDTH  # of the last product of a block
BLOCK = 2 * TOKENS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)  # of a block's products
ATTENTION = 2 * MICRO * SEQ * SEQ * WIDTH  # of a causal kernel: half of two products of all pairs
FORWARD = LAYERS * (BLOCK + ATTENTION) + HEAD


def _profile(line: str, profiles: bool = True) -> dict[str, Any]:
    """The profile of a rank, with the census of a step before it and the losses of all steps.

    profiles: False makes as many steps without a profile.
    """
    config = config_of_line(f"{MODEL} {line} resources.threads=1")
    torch.manual_seed(0)
    runtime = build_runtime(config, torch.device("cpu"), None, None).runtime
    ids = torch.randint(VOCAB, (MICRO, SEQ))
    seen: dict[str, Any] = {"losses": []}

    def step(counting: bool = False) -> None:
        clock = runtime.clock
        clock.start()
        tokens = runtime.sum_over_ranks(TOKENS)
        census = ActivationCensus(runtime) if counting else None
        with clock.phase("forward"):
            if census is not None:
                census.__enter__()
            loss = token_losses(runtime.model, ids, ids, config.loss.tile_tokens, None, runtime.sequence) / tokens
            if census is not None:
                census.__exit__(None, None, None)
                seen["activations"] = census.bytes
        with clock.phase("backward"):
            runtime.backward(loss)
        del loss
        if counting:
            seen["states"] = take_census(runtime).states
        with clock.phase("optimizer"):
            seen["losses"].append(runtime.step(1e-2).loss)
        clock.end().forget()

    step()
    step(counting=True)
    if profiles:
        seen |= _profiled(runtime, step)
    else:
        step()
        step()
    step()
    return seen


def _profiled(runtime: ZeroRuntime, step: Callable[[], None]) -> dict[str, Any]:
    open_at_ends = []

    class Watched(torch.profiler.profile):
        """Notes the messages under way when a profile ends."""

        def __exit__(self, *error: Any) -> None:
            open_at_ends.append(sum(len(unit.message_tensors()) for unit in runtime.units))
            super().__exit__(*error)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_profile, "profile", Watched)
        file = Path(folder, "rank.json.gz")
        found = step_profile.profile_step(runtime, step, file)
        found["open_at_ends"] = open_at_ends
        found["trace"] = [event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
        return {**found, "files": sorted(path.name for path in Path(folder).iterdir())}


def of_module(profile: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in profile["modules"] if one["name"] == name]
    return found


def test_counted_operations_are_those_of_the_closed_form() -> None:
    """6N + 12LHQT of PaLM's appendix B, with half of the scores: the kernels are causal."""
    (found,) = run_ranks(_profile, 1, "zero=stage0 precision=fp32 resources.ranks=1")
    assert found["model_flops"] == 3 * FORWARD
    # Backward of the attention kernel has five products: it computes the scores again.
    assert found["executed_flops"] == 3 * FORWARD + LAYERS * ATTENTION // 2
    query = of_module(found, "model.layers.*.self_attn.q_proj")
    assert query["forward_flops"] == LAYERS * 2 * TOKENS * WIDTH * WIDTH
    assert query["backward_flops"] == 2 * query["forward_flops"]
    assert query["forward_ms"] > 0 < query["backward_ms"]
    assert query["recompute_ms"] == query["recompute_flops"] == 0
    assert found["files"] == ["rank.json.gz"]
    assert {"zlab phase: forward", "zlab phase: backward", "zlab module: model.layers.0.mlp"} <= set(found["trace"])
    times = [one[f"{way}_ms"] for one in found["modules"] for way in ("forward", "recompute", "backward")]
    assert sum(times) + sum(found["outside_ms"].values()) == pytest.approx(found["step_ms"], rel=1e-6)


@pytest.mark.full
def test_operations_that_are_repeated_are_executed_but_not_the_models() -> None:
    (full,) = run_ranks(_profile, 1, "zero=stage0 precision=fp32 resources.ranks=1 recompute=full")
    assert full["model_flops"] == 3 * FORWARD
    # A recomputation ends once it has all that backward needs: before the block's last product.
    again = LAYERS * (BLOCK - DOWN + ATTENTION)
    assert full["executed_flops"] == 3 * FORWARD + LAYERS * ATTENTION // 2 + again
    assert of_module(full, "model.layers.*.self_attn.q_proj")["recompute_ms"] > 0
    line = "zero=stage0 precision=fp32 resources.ranks=1 loss=tiled loss.tile=32"
    (tiled,) = run_ranks(_profile, 1, line)
    assert tiled["model_flops"] == 3 * FORWARD
    assert tiled["executed_flops"] == 3 * FORWARD + LAYERS * ATTENTION // 2 + HEAD


@pytest.mark.full
def test_the_timeline_has_the_bytes_of_the_census_and_profiling_changes_no_loss() -> None:
    line = "zero=stage3 precision=bf16 resources.ranks=2"
    for found, plain in zip(run_ranks(_profile, 2, line), run_ranks(_profile, 2, line, False), strict=True):
        held = found["timeline"]["bytes"]
        # The census leaves out storages of one number.
        assert 0 <= max(held["activations"]) - found["activations"] <= 4 * ONE_NUMBER_BYTES
        # Before the step there are no gradients, and at its end, for a while, those of this rank's shards alone.
        kept = sum(held[kind][0] for kind in ("parameters", "masters", "optimizer_states"))
        assert held["gradients"][0] == 0
        assert found["states"] - kept in held["gradients"][len(held["gradients"]) // 2 :]
        assert max(held["messages"]) > 0
        assert found["peak"]["bytes"] == max(map(sum, zip(*held.values(), strict=True)))
        assert found["peak"]["bytes"] == sum(found["peak"]["components"].values())
        assert found["outside_ms"]["communication_exposed"] > 0
        assert found["losses"] == plain["losses"]


@pytest.mark.full
def test_no_collective_is_under_way_when_a_profile_ends() -> None:
    """Stage 1 ends a step while it gathers the next one's parameters; see the note in step_profile.py."""
    for found in run_ranks(_profile, 2, "zero=stage1 precision=bf16 resources.ranks=2"):
        assert found["open_at_ends"] == [0, 0]
        assert max(found["timeline"]["bytes"]["messages"]) > 0
