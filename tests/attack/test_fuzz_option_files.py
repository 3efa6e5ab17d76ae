"""Any option file in a user's own conf/ gives a configuration or is refused with its name."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import odd_yaml
import pytest
from harness.attack_counts import Tally
from trials import Trial, attack, numbers
from typed import POINTS, Typist

from orchestrator.compose import folders
from orchestrator.compose.settable import read_tree
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import hints_of

DOOR = "option files"
GROUPS = sorted({path.parent.name for path in folders.CONF.glob("*/*.yaml")})
FILES = {group: sorted((folders.CONF / group).glob("*.yaml")) for group in GROUPS}
# Directives that Hydra reads in an option file in addition to its settings.
HEADS = ["# @package _global_", "# @package _group_", "# @package a.b", "# @package hydra", "# @package ", ""]
DEFAULTS = [
    *("defaults: [stage1]", "defaults: [mine]", "defaults: [/zero: stage1]", "defaults: [override /precision: fp32]"),
    *(
        "defaults: [missing, _self_]",
        "defaults: [{optional x: y}]",
        "defaults: ['*']",
        "defaults: {a: b}",
        "defaults: 3",
    ),
    *(
        "defaults: [override /hydra/launcher: basic]",
        "defaults: [/zero@_global_: stage3]",
        "defaults: [../../x]",
        "defaults:",
    ),
    *(
        "defaults: [_self_, _self_]",
        "defaults: [{/hydra/sweeper: zlab}]",
        "defaults: [${seed}]",
        "hydra: {mode: MULTIRUN}",
    ),
    *("hydra: {searchpath: ['pkg://zlab_canary']}", "hydra: {job_logging: {x: 1}}", "hydra: 3", "zero: {stage: 3}"),
    "hydra: {callbacks: {x: {_target_: zlab_canary.go}}}",
]
KEYS = [*read_tree().keys, *(one.rpartition(".")[2] for one in read_tree().keys), *hints_of(RunConfig), "_target_", ""]


def file_of(group: str, chance: random.Random) -> bytes:
    found = odd_yaml.document([path.read_text(encoding="utf-8") for path in FILES[group]], KEYS, chance)
    if chance.random() < 0.2:
        found = f"{chance.choice(HEADS)}\n{chance.choice(DEFAULTS)}\n".encode() + found
    return found


@pytest.mark.parametrize("tried", numbers(8, 400))
def test_any_option_file_is_composed_or_refused(
    tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    typist = Typist(tmp_path, monkeypatch)

    def case(trial: Trial) -> None:
        chance = trial.chance
        group, parent = chance.choice(GROUPS), chance.choice(("conf", "added"))
        shutil.rmtree(typist.work / "conf", ignore_errors=True)
        shutil.rmtree(typist.work / "added", ignore_errors=True)
        file = typist.work / parent / group / "mine.yaml"
        file.parent.mkdir(parents=True)
        data = file_of(group, chance)
        file.write_bytes(data)
        line = [f"{group}=mine", *(["--config-dir", "added"] if parent == "added" else []), "--max-points", str(POINTS)]
        line += chance.choice(([], [], ["--json"], ["--plan"], ["-m", "--plan", "seed=1,2"], ["--cfg", "job"]))
        trial.shown = f"{line} {group}\n{data!r:.3000}"
        typist.type(trial, line)
        assert typist.points <= POINTS, f"{typist.points} points were composed"
        assert file.read_bytes() == data

    attack(DOOR, tried, tally, case)
