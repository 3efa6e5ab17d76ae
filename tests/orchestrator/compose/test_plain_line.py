"""Lines that are composed without Hydra have the points that Hydra gives, and all others are left to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.compose import arguments, compose, plain_line
from orchestrator.compose.composition import Composition
from orchestrator.compose.settable import WHOLE_FILES, read_tree
from orchestrator.text.paths import CODE

FIT = (
    "--plan model=llama2_70b hardware=h100_80gb resources.ranks=64 resources.nodes=8 batch.seq=4096 "
    "zero=stage0,stage1,stage2,stage3 offload=none,optimizer_cpu,optimizer_param_cpu "
    "recompute=none,by_operation,full loss=full,tiled"
)
OPTIONS = {group: names for group, names in read_tree().groups.items() if group not in WHOLE_FILES}
# Words whose values Hydra reads as each of its kinds of values.
WORDS = [
    "optimizer.lr=1e-3 optimizer.lr=0.5 optimizer.weight_decay=2E+1 seed=-3 seed=0",
    "batch.accumulation=null precision.tf32=true precision.tf32=false batch.micro=8",
    "data.path=/tmp/a-b.c/d_1.txt output=out/a.b model=pretrained model.path=x.y/z optimizer.lr=-0.5",
    "-m seed=1,2,3 batch.micro=4,8 zero=stage3,stage1 batch.micro=2,1 --max-points 100 --json",
    "-m precision.tf32=true optimizer.lr=3 output=e5,nullx,a1",
    "-m zero=stage2 --prune off --fresh",
]
BY_HYDRA = [
    "+resources.ranks=3",
    "++zero.stage=1",
    "~experiment",
    "experiment=paper_bytes",
    "sweeps=stages",
    "zero=stage1,stage2",  # without -m
    "-m zero=stage1,stage2 --max-points 1",
    "-m seed=range(1,4)",
    "-m zero=glob(*)",
    "-m optimizer.lr=1e-3,1e-4",
    "-m precision.tf32=true,false",
    "batch.micro=${measure.steps}",
    "data.path='a'",
    "output=1_000",
    "output=007",
    "output=NaN",
    "output=True",
    "output=a b",
    "output=",
    "zero=",
    "zero=3",
    "zero=stage9",
    "model.config.foo=1",
    "zero={a: 1}",
    "zero.stagee=1",
    "hydra.mode=RUN",
    "--config-name other",
    "--cfg job",
]


def asked(line: str) -> arguments.Arguments:
    return arguments.split(line.split(" "))


def by_hydra(line: str) -> Composition:
    return compose.compose(asked(line))


@pytest.mark.parametrize("line", [FIT.replace("--plan", "-m --plan"), *WORDS])
def test_a_plain_line_has_the_points_that_hydra_gives(line: str) -> None:
    found = plain_line.composed(asked(line))
    assert repr(found) == repr(by_hydra(line))  # 1 and 1.0 are equal, but not as text


@pytest.mark.parametrize("group", OPTIONS)
def test_every_option_of_every_group_is_as_hydra_composes_it(group: str) -> None:
    # An option file with a list of defaults, which only Hydra can compose, makes its whole line Hydra's.
    plain = [name for name in OPTIONS[group] if plain_line.composed(asked(f"{group}={name}"))]
    line = f"-m {group}={','.join(plain)} seed=7"
    assert len(plain) >= len(OPTIONS[group]) - 1
    assert repr(plain_line.composed(asked(line))) == repr(by_hydra(line))


@pytest.mark.parametrize("line", BY_HYDRA)
def test_what_is_not_plain_is_left_to_hydra(line: str) -> None:
    assert plain_line.composed(asked(line)) is None


def test_a_folder_of_ones_own_is_merged_as_hydra_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(
        "name: mine\ngpus: 2\nmemory_mib: 8e3\nfp32_tflops: 1e1\n"
    )
    (tmp_path / "conf" / "hardware" / "twice.yaml").write_text("name: a\nname: b\n")
    (tmp_path / "conf" / "hardware" / "date.yaml").write_text("name: 2026-11-23\n")
    for name in ("mine", "date"):
        found = plain_line.composed(asked(f"hardware={name}"))
        assert found is not None
        assert repr(found) == repr(by_hydra(f"hardware={name}"))
    assert plain_line.composed(asked("hardware=twice")) is None


def test_a_key_that_is_a_list_is_left_to_hydra_which_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "hardware" / "listed.yaml").write_text("name: mine\n[a, b]: 2\n")
    assert plain_line.composed(asked("hardware=listed")) is None


def test_a_plain_line_imports_neither_hydra_nor_torch() -> None:
    code = (
        "import sys; from orchestrator.compose import arguments; from orchestrator.compose.line import composed; "
        f"composed(arguments.split({FIT.split()!r} + ['-m'])); "
        "print([name for name in ('hydra', 'omegaconf', 'torch', 'transformers', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CODE, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
