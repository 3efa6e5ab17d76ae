"""AdamW with 8-bit moments: checkpoints load at any setting and into AdamW and back, and the loss stays close."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.checkpoints import GOES_ON, SAVED_AFTER, Setting, assert_states, load_into, save_after, train, whole
from harness.oracle import ADAMW, LR
from harness.plain_optimizers import rounded_to_codes
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step

from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.optim.configs import AdamW8bitConfig
from zero_runtime.precision import MixedPrecision

ADAMW8BIT = AdamW8bitConfig(ADAMW.beta1, ADAMW.beta2, ADAMW.eps, ADAMW.weight_decay)
TARGETS = [Setting(stage, world) for stage in (0, 1, 2, 3) for world in (1, 2, 3)] + [
    Setting(3, 2, unit_numel=500),
    Setting(2, 1, unit_numel=500),
    Setting(2, 3, MixedPrecision("bf16")),
]
STEPS = 40


def _save(root: Path, saved: Setting) -> dict[str, torch.Tensor]:
    return save_after(root, saved, ADAMW8BIT)[1]


def _load(path: Path, settings: list[Setting]) -> list[dict[str, torch.Tensor]]:
    found = []
    for setting in settings:
        runtime, _ = load_into(path, setting, ADAMW8BIT)
        found.append(whole(runtime))
        runtime.close()
    return found


def held(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in states.items() if not key.startswith("master/")}


@pytest.mark.parametrize(
    "saved",
    [Setting(2, 2), pytest.param(Setting(0, 3), marks=pytest.mark.full)],
    ids=["stage2-world2", "stage0-world3"],
)
def test_8_bit_states_load_as_the_same_numbers_at_every_setting(saved: Setting, tmp_path: Path) -> None:
    """At another world, stage, unit size and precision: blocks hold the same elements, so reading loses nothing."""
    wanted = run_ranks(_save, saved.world, tmp_path, saved)[0]
    path = next(tmp_path.glob("step-*"))
    for world in (1, 2, 3):
        targets = [target for target in TARGETS if target.world == world]
        for target, found in zip(targets, run_ranks(_load, world, path, targets)[0], strict=True):
            assert_states(found, wanted), target


def _continues(root: Path, setting: Setting) -> None:
    path, _ = save_after(root, setting, ADAMW8BIT)
    unbroken = setting.runtime(ADAMW8BIT)
    train(unbroken, setting.case(), 0, SAVED_AFTER)
    saver = BackgroundSaver(root / "behind")
    behind = saver.save(unbroken, step=SAVED_AFTER, trainer={})
    wanted = train(unbroken, setting.case(), SAVED_AFTER, GOES_ON)
    saver.wait(unbroken)
    states = whole(unbroken)
    unbroken.close()
    for one in (path, behind):
        resumed, _ = load_into(one, setting, ADAMW8BIT)
        assert train(resumed, setting.case(), SAVED_AFTER, GOES_ON) == wanted
        assert_states(whole(resumed), states)
        resumed.close()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_run(stage: int, tmp_path: Path) -> None:
    run_ranks(_continues, 2, tmp_path, Setting(stage, 2))


def _traded(root: Path, setting: Setting) -> None:
    path, wide = save_after(root / "wide", setting, ADAMW)
    narrow, _ = load_into(path, setting, ADAMW8BIT)
    for key, value in held(wide).items():
        blocks = value.reshape(-1).split(256)
        rounded = torch.cat([rounded_to_codes(block, signed=key.startswith("exp_avg/")) for block in blocks])
        assert torch.equal(whole(narrow)[key].reshape(-1), rounded), key
    path, codes = save_after(root / "narrow", setting, ADAMW8BIT)
    back, _ = load_into(path, setting, ADAMW)
    assert_states(whole(back), codes)
    assert back.optimizer.updates == SAVED_AFTER


def test_adamw_and_its_8_bit_form_load_each_others_checkpoints(tmp_path: Path) -> None:
    """The 8-bit form rounds the fp32 moments to codes; AdamW takes the numbers of the codes unchanged."""
    run_ranks(_traded, 1, tmp_path, Setting(2, 1))


def test_full_optimizer_state_returns_fp32_numbers() -> None:
    run_ranks(_told, 2)


def _told() -> None:
    setting = Setting(3, 2)
    runtime = setting.runtime(ADAMW8BIT)
    train(runtime, setting.case(), 0, 2)
    states = whole(runtime)
    for state, value in runtime.full_optimizer_state("head.weight").items():
        assert torch.equal(value, states[f"{state}/head.weight"])
        assert value.dtype == torch.float32


def _curves() -> dict[str, list[float]]:
    setting = Setting(2, 1, micro_batches=1)
    curves = {}
    for name, config, factor in (("fp32", ADAMW, 1.0), ("8 bit", ADAMW8BIT, 1.0), ("slower", ADAMW, 0.9)):
        runtime = setting.runtime(config)
        losses = []
        for step in range(STEPS):
            backwards_of_step(runtime, setting.case(), step)
            losses.append(runtime.step(LR * factor).loss)
        curves[name] = losses
        runtime.close()
    return curves


@pytest.mark.full
def test_8_bit_moments_change_the_loss_less_than_a_10_percent_lower_learning_rate(
    capsys: pytest.CaptureFixture,
) -> None:
    """The first update uses moments that were never rounded, so the first two losses have equal bits. The effect of
    rounding from then on is printed, and must stay below that of a change that would go unnoticed in a run."""
    curves = run_ranks(_curves, 1)[0]
    assert curves["8 bit"][:2] == curves["fp32"][:2]
    apart = {name: max(abs(a - b) for a, b in zip(curves[name], curves["fp32"], strict=True)) for name in curves}
    with capsys.disabled():
        ends = {name: round(curve[-1], 4) for name, curve in curves.items()}
        print(f"\nloss {curves['fp32'][0]:.4f} at first, after {STEPS} steps {ends}, largest distance {apart}")
    assert apart["8 bit"] < apart["slower"]
