"""Any file in sweeps/ gives a plan of bounded size or is refused with its name, and nothing is started."""

from __future__ import annotations

import random
from pathlib import Path

import odd
import odd_yaml
import pytest
from harness.attack_counts import Tally
from trials import Trial, attack, numbers
from typed import POINTS, Typist

from orchestrator.compose import folders
from orchestrator.compose.overrides import SWEEP_KEYS

DOOR = "sweep files"
RIGHT = [path.read_text(encoding="utf-8") for path in sorted((folders.SHIPPED / "sweeps").glob("*.yaml"))]
RIGHT += [
    "base: {model: llama_tiny}\naxes:\n  zero: [stage0, stage1]\n  optimizer.lr: [1e-3, 3e-4]\nseeds: [1, 2]\n",
    "zip: [{batch.micro: [1, 2], batch.accumulation: [2, 1]}]\nconcat: [{zero: stage3, offload: optimizer_nvme}]\n",
    "axes: {zero: [stage0, stage3]}\nexclude: [{zero: stage0}]\n"
    "when: [{if: {zero: stage3}, set: {resources.ranks: 1}}]\n",
    "axes: {seed: [1, 2, 3]}\nrank_by: tokens_per_second\nprune: off\n",
    "axes:\n  batch.micro: [1, 2, 4]\n  batch.seq: [32, 64]\n  zero: [stage1, stage2, stage3]\nprune: safe\n",
    "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {zero: 'stage0,stage1', seed: 'range(1,3)'}}}\n",
    "# @package _global_\ndefaults: [override /precision: fp32]\n"
    "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n",
]
# A file as large as a program might write: the limit of points must apply before the file is expanded.
LARGE = "axes: {seed: [%s], batch.micro: [%s], batch.seq: [%s]}\n"
KEYS = [*SWEEP_KEYS, "zero", "precision", "batch.micro", "seed", "model", "model.config.hidden_size", "optimizer.lr"]
KEYS += ["resources.ranks", "cluster", "output", "hydra", "defaults", "if", "set", "zeroo", "a b", "", "~", "${seed}"]
TYPED = ["zero=stage1", "zero=stage0,stage2", "seed=range(1,4)", "batch.micro=1,2", "seed=1", "-m", "output=outputs/a"]


def file_of(chance: random.Random) -> bytes:
    if chance.random() < 0.005:
        many = ",".join(map(str, range(1, chance.choice((30, 400)))))
        return (LARGE % (many, many, many)).encode()
    return odd_yaml.document(RIGHT, KEYS, chance)


@pytest.mark.parametrize("tried", numbers(30, 900))
def test_any_sweep_file_is_planned_or_refused(
    tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    typist = Typist(tmp_path, monkeypatch)
    (typist.work / "sweeps").mkdir()
    file = typist.work / "sweeps" / "mine.yaml"

    def case(trial: Trial) -> None:
        chance = trial.chance
        data = file_of(chance)
        file.write_bytes(data)
        line = ["sweeps=mine", *chance.sample(TYPED, chance.choice((0, 0, 0, 1, 2))), "--max-points", str(POINTS)]
        line += chance.choice((["--plan"], ["--plan"], ["--plan", "--json"], []))
        if chance.random() < 0.05:
            line.append(odd.value(chance).replace("\0", ""))
        trial.shown = f"{line}\n{data!r:.3000}"
        typist.type(trial, line)
        # Points that are listed one by one are not a product: there are only as many as the file has lines for them.
        assert typist.points <= POINTS, f"{typist.points} points were composed"
        assert file.read_bytes() == data

    attack(DOOR, tried, tally, case)
