"""1-bit Adam: AdamW in the warm-up, then the average of signs, computed again by one process in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import Setting, assert_states, load_into, whole
from harness.models import TinyTransformer
from harness.oracle import ADAMW, LR, Case
from harness.plain_optimizers import root
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime, full_tensors

from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.census import take_census
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.limits import ConfigError
from zero_runtime.optim.configs import OneBitAdamConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import signs_bytes
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.wire import Wire

WARMUP, STEPS = 3, 7
ONEBIT = OneBitAdamConfig(ADAMW.beta1, ADAMW.beta2, ADAMW.eps, ADAMW.weight_decay, warmup_updates=WARMUP)


class Plain:
    """The compressed steps of one unit for all ranks in one process. Parts of the flat tensor as the runtime has them;
    sums of squares and roots in fp64, averages in the order of the ranks."""

    def __init__(self, real: torch.Tensor, world: int, states: dict[str, torch.Tensor]) -> None:
        self.real, self.world = real, world  # real: which elements are no padding
        self.master, self.momentum, self.second = (states[name] for name in ("master", "exp_avg", "exp_avg_sq"))
        self.lost = [torch.zeros_like(self.momentum) for _ in range(world)]
        self.lost_average = torch.zeros_like(self.momentum)

    def step(self, number: int, grads: list[torch.Tensor], decay: torch.Tensor) -> None:
        beta1, beta2 = ONEBIT.beta1, ONEBIT.beta2
        average = self.lost_average.clone()
        for rank, grad in enumerate(grads):
            own = self.lost[rank] + self.momentum * beta1 + grad * torch.tensor((1 - beta1) * self.world)
            read = torch.cat([self._signs(part, real) for part, real in self._parts(own)])
            self.lost[rank] = (own - read) * self.real
            average = average + read / self.world
        read = torch.cat([self._signs(part, real) for part, real in self._parts(average)])
        self.lost_average = (average - read) * self.real
        self.momentum = read * self.real
        divisor = root(self.second) / (1 - beta2**WARMUP) ** 0.5 + ONEBIT.eps
        self.master = self.master * (1 - LR * decay) - LR / (1 - beta1**number) * self.momentum / divisor

    def _parts(self, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(values.chunk(self.world), self.real.chunk(self.world), strict=True))

    def _signs(self, part: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        scale = (part.double().square().sum() / real.sum().clamp(min=1)).sqrt().float()
        return torch.where(part >= 0, scale, -scale)


def _compare(stage: int) -> float:
    """Trains, and recomputes the compressed steps of the first block from the ranks' own gradients; returns the largest
    difference of its weights."""
    world = dist.get_world_size()
    case = Case(world)
    runtime = build_runtime(case, stage, optimizer=ONEBIT)
    unit = next(unit for unit in runtime.units if unit.name == "blocks.0")
    real = torch.ones(unit.layout.padded_numel)
    decay = torch.zeros(unit.layout.padded_numel)
    for start, stop in unit.layout.gaps:
        real[start:stop] = 0
    for segment in unit.layout.segments:
        segment.of(decay).fill_(0.1 if len(segment.shape) > 1 else 0.0)
    plain, worst = None, 0.0
    for step in range(STEPS):
        backwards_of_step(runtime, case, step)
        if step == WARMUP:
            states = {"master": unit.master_shard, **runtime.optimizer.states_of(unit)}
            plain = Plain(real, world, {name: _full(unit, state) for name, state in states.items()})
        grads = [torch.empty_like(real) for _ in range(world)]
        dist.all_gather(grads, unit.gradients.unsharded_grad)
        runtime.step(LR)
        if plain is not None:
            plain.step(step + 1, grads, decay)
            worst = max(worst, float((_full(unit, unit.master_shard) - plain.master).abs().max()))
    return worst


def _full(unit, shard: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    found = torch.zeros(unit.layout.padded_numel)
    for name, values in unit.full_of(shard).items():
        next(segment for segment in unit.layout.segments if segment.name == name).of(found).copy_(values.reshape(-1))
    return found


@pytest.mark.parametrize(("world", "stage"), [(2, 1), (4, 0)])
def test_compressed_steps_are_those_of_one_process_that_averages_the_signs(world: int, stage: int) -> None:
    """A step moves a weight of at most 1 by about the rate and rounds a few dozen times by 2^-24 of such numbers, as do
    the scales, which both compute from fp64 sums: 4 steps stay below 2^-17. A sign that
    differs would move a weight by about twice the rate, 2^-6."""
    assert max(run_ranks(_compare, world, stage)) <= 2.0**-17


def _trained(case: Case) -> dict[str, tuple[dict[str, torch.Tensor], list[int], tuple[int, int]]]:
    """By name: the last weights, the bytes sent in each step, and the optimizer's bytes, counted and predicted."""
    found = {}
    for name, stage, config in (("adamw", 1, ADAMW), ("stage0", 0, ONEBIT), ("stage1", 1, ONEBIT)):
        runtime = build_runtime(case, stage, optimizer=config)
        sent, warm = [], {}
        for step in range(STEPS):
            runtime.reset_ledger()
            backwards_of_step(runtime, case, step)
            runtime.step(LR)
            sent.append(sum(volume.bytes for volume in runtime.reset_ledger().data.values()))
            if step == WARMUP - 1:
                warm = full_tensors(runtime, "master_shard")
        counted = take_census(runtime).optimizer, predicted_state_bytes(runtime).optimizer
        signs = sum(signs_bytes(unit.layout.padded_numel, case.world) for unit in runtime.units)
        gathers = sum(unit.layout.padded_numel for unit in runtime.units) * unit_bytes(case) * (case.world - 1)
        closed = signs + (gathers // case.world if stage else 0)
        found[name] = (full_tensors(runtime, "master_shard"), warm, sent, closed, counted)
        runtime.close()
    return found


def unit_bytes(case: Case) -> int:
    return 4 if case.precision.param == "fp32" else 2


@pytest.mark.parametrize(
    "case", [Case(2), pytest.param(Case(4, 2, precision=MixedPrecision("bf16")), marks=pytest.mark.full)]
)
def test_both_stages_have_equal_bits_the_warm_up_is_adamw_and_bytes_are_the_closed_forms(case: Case) -> None:
    for found in run_ranks(_trained, case.world, case):
        weights, warm, _, _, _ = found["stage0"]
        assert all(torch.equal(value, found["stage1"][0][name]) for name, value in weights.items())
        assert all(torch.equal(value, found["adamw"][1][name]) for name, value in warm.items())
        for name in ("stage0", "stage1"):
            _, _, sent, closed, (counted, predicted) = found[name]
            assert sent[WARMUP + 1 :] == [closed] * (STEPS - WARMUP - 1)
            assert counted == predicted
        # fp32 gradients are 64 times the two messages of one bit, less their scales
        assert found["stage0"][2][-1] * 40 < found["stage0"][2][WARMUP - 1] * 2


def _resumes(root: Path) -> None:
    setting = Setting(1, 2, micro_batches=1)
    runtime = setting.runtime(ONEBIT)
    for step in range(STEPS):
        backwards_of_step(runtime, setting.case(), step)
        runtime.step(LR)
    path = save_checkpoint(runtime, root, step=STEPS, trainer={})
    states = whole(runtime)
    resumed, _ = load_into(path, replace(setting, stage=0), ONEBIT)
    assert_states(whole(resumed), states)
    assert resumed.optimizer.updates == STEPS
    backwards_of_step(resumed, setting.case(), STEPS)
    resumed.step(LR)
    assert resumed.reset_ledger().data.keys() >= {"sign_all_to_all", "sign_all_gather"}


def test_a_checkpoint_loads_at_the_other_stage_and_goes_on_with_signs(tmp_path: Path) -> None:
    run_ranks(_resumes, 2, tmp_path)


def _refused(stage: int, clip_norm: float | None, wire: Wire) -> str:
    settings = RuntimeSettings(clip_norm=clip_norm, wire=wire)
    plan = ZeroPlan.from_stage(stage)
    with pytest.raises(ConfigError) as caught:
        ZeroRuntime(TinyTransformer(Case(2).model), plan, MixedPrecision("bf16"), ONEBIT, settings, torch.device("cpu"))
    return str(caught.value)


def test_what_needs_the_sum_of_the_gradients_is_refused() -> None:
    assert "needs each rank's full gradients" in run_ranks(_refused, 2, 2, None, Wire())[0]
    assert "cannot clip" in run_ranks(_refused, 2, 1, 1.0, Wire())[0]
    assert "no gradients to reduce" in run_ranks(_refused, 2, 1, None, Wire(None, "int8"))[0]
