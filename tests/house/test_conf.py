"""conf/ mirrors the dataclasses: every option file builds its dataclass, and every entry of the defaults exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import is_dataclass
from enum import EnumMeta
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import yaml

from orchestrator.compose import arguments, compose
from orchestrator.compose.settable import WHOLE_FILES
from orchestrator.config.cluster import Cluster
from orchestrator.config.hardware import PRICE, GpuNode
from orchestrator.config.parts import keys_of_kind, kinds_of
from orchestrator.config.schema import AskedConfig
from orchestrator.config.strict import build, hints_of
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from zero_runtime.limits import keys_of
from zero_runtime.optim.loss_scaler import LossScaleRule

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
GROUPS = {name: hint for name, hint in hints_of(AskedConfig).items() if is_dataclass(hint)}
OPTIONS = sorted(file for group in GROUPS for file in (CONF / group).glob("*.yaml"))
SCENE = Scene(Hardware(cores=2, cpu="cpu", slurm=True), plan_only=True)  # hardware is described: no GPU is here
# Keys that an option does not use, in groups whose keys are those of one class.
LOSS_SCALE = tuple(keys_of(LossScaleRule))
NVME = ("folder", "block_mib", "requests", "ahead", "verify")
SLURM = {*hints_of(Cluster)} - {"kind", "exclusive", "usd_per_gpu_hour"}
NOT_FOR: dict[str, Collection[str]] = {
    **dict.fromkeys(("precision/fp32", "precision/bf16", "precision/bf16_pure"), LOSS_SCALE),
    **dict.fromkeys(("offload/optimizer_cpu", "offload/optimizer_param_cpu"), NVME),
    **dict.fromkeys(("recompute/none", "recompute/full"), ("every", "products")),
    "recompute/by_operation": ("every",),
    "recompute/every_nth": ("products",),
    **dict.fromkeys(("data/stdlib", "data/synthetic"), ("path", "packing")),
    "data/text": ("packing",),
    "offload/none": ("ratio", "step", *NVME),
    "offload/param_cpu": ("step", *NVME),
    "zero/stage0": (
        "shard_ranks",
        "outer_sharding",
        "reduce_at_boundary",
        "gather_dtype",
        "reduce_dtype",
        "error_feedback",
    ),
    "zero/stage1": ("outer_sharding", "reduce_at_boundary"),
    "zero/stage2": ("outer_sharding",),
    **{f"model/{one.stem}": ("adapter",) for one in CONF.glob("model/*.yaml") if one.stem != "pretrained"},
    "loss/full": ("tile",),
    "parallel/none": ("patterns",),
    "parallel/tp2": ("sp",),
    "parallel/sp2": ("tp", "patterns"),
    "adapter/none": ("rank", "alpha", "targets"),
    "checkpoint/none": ("every", "keep_last", "keep_every", "background", "node_folder"),
    "tracking/none": ("uri", "experiment"),
    "cluster/local": SLURM,
    "hardware/auto": {*hints_of(GpuNode)} - {"name", *PRICE},
}
# Settings that an option needs in addition: for example, data=text and model=pretrained alone have no path.
NEEDS = {
    "measure/eval.yaml": ["zero=stage3"],
    "data/text.yaml": [f"data.path={ROOT / 'run.py'}"],
    "model/pretrained.yaml": ["model.path={weights}"],
    "data/pairs.yaml": ["data.path={weights}/pairs.json"],
    "measure/train.yaml": ["train.max_steps=10"],
    "experiment/sft_qwen.yaml": ["model.path={weights}", "data.path={weights}/pairs.json"],
}
NEEDS |= {"optimizer/onebitadam.yaml": ["zero=stage1"], "engine/plain.yaml": ["resources.ranks=1"]}
NEEDS |= {"cluster/slurm.yaml": ["resources.device=cpu", "resources.ranks=2"]}
NEEDS |= {f"hardware/{name}.yaml": ["precision=fp16"] for name in ("v100_16gb", "v100_32gb", "t4")}
NEEDS |= {
    f"offload/{name}.yaml": ["zero=stage3"] for name in ("param_cpu", "optimizer_param_cpu", "optimizer_param_nvme")
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A model folder with only the files that the command line inspects, and a file of pairs."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 300}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # a header without tensors
    (tmp_path / "pairs.json").write_text('{"prompt": "a", "response": "b"}')
    return tmp_path


def name_of(file: Path) -> str:
    return file.relative_to(file.parents[1]).as_posix()


@pytest.mark.parametrize("file", OPTIONS, ids=name_of)
def test_every_file_builds_its_dataclass_and_has_the_keys_of_its_kind(file: Path) -> None:
    # OmegaConf instead of plain YAML: only OmegaConf reads 1e-8 as a number.
    content = compose.OmegaConf.to_container(compose.OmegaConf.load(file))
    kind = GROUPS[file.parent.name]
    _, broken = build(kind, content, file.parent.name)
    assert broken == []
    assert isinstance(content, dict)
    keys = list(keys_of_kind(kind, content["kind"] if kinds_of(kind) else ""))
    assert set(content) == {key for key in keys if key not in NOT_FOR.get(f"{file.parent.name}/{file.stem}", ())}


@pytest.mark.parametrize("file", OPTIONS, ids=name_of)
def test_every_option_can_be_chosen_without_breaking_a_rule(file: Path, weights: Path) -> None:
    if name_of(file) == "engine/deepspeed.yaml" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install '.[deepspeed]'")
    needs = [word.format(weights=weights) for word in NEEDS.get(name_of(file), [])]
    line = [f"{file.parent.name}={file.stem}", *needs]
    _, problems = checked_points(compose.compose(arguments.split(line)), SCENE)
    if file.parent.name == "engine" and any("needs the package" in problem for problem in problems):
        pytest.skip(problems[0])
    assert problems == []


@pytest.mark.parametrize("name", [file.stem for file in (CONF / "experiment").glob("*.yaml")])
def test_every_experiment_composes_and_breaks_no_rule(name: str, weights: Path) -> None:
    needs = [word.format(weights=weights) for word in NEEDS.get(f"experiment/{name}.yaml", [])]
    points, problems = checked_points(compose.compose(arguments.split([f"experiment={name}", *needs])), SCENE)
    assert problems == []
    assert points


@pytest.mark.parametrize("name", [file.stem for file in (ROOT / "sweeps").glob("*.yaml")])
def test_every_shipped_sweep_has_several_points_and_breaks_no_rule(name: str) -> None:
    composition = compose.compose(arguments.split([f"sweeps={name}"]))
    points, problems = checked_points(composition, SCENE)
    missing = "engine=deepspeed needs the package deepspeed"  # which these tests do without
    assert [problem for problem in problems if missing not in str(problem)] == []
    assert composition.is_sweep
    assert len(points) > 1


def test_groups_conf_folders_and_defaults_name_the_same_set() -> None:
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    assert defaults[0] == "_self_", "experiment and sweep files must win over this file"
    chosen = {name: option for entry in defaults[1:] for name, option in entry.items()}
    assert set(chosen) == {*GROUPS, *WHOLE_FILES}
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} == {*GROUPS, "experiment"}
    for name in GROUPS:
        assert (CONF / name / f"{chosen[name]}.yaml").exists()
    assert list(chosen)[-2:] == list(WHOLE_FILES)


def test_every_kind_of_a_group_has_an_option_file() -> None:
    for group, hint in GROUPS.items():
        kind = hints_of(hint).get("kind")
        if kind is not None:
            chosen = {yaml.safe_load(file.read_text())["kind"] for file in (CONF / group).glob("*.yaml")}
            assert chosen == (
                {str(member.value) for member in kind} if isinstance(kind, EnumMeta) else set(get_args(kind))
            )


def test_hydra_is_configured_to_create_no_output_folders() -> None:
    settings = yaml.safe_load((CONF / "config.yaml").read_text())["hydra"]
    assert settings["output_subdir"] is None
    assert settings["run"]["dir"] == "."


def test_the_package_contains_the_data_files_of_its_code_folders() -> None:
    """Such as a template: without its line in pyproject.toml it is missing only in installed copies."""
    text = (ROOT / "pyproject.toml").read_text()
    lines = re.findall(r'^"([\w.]+)" = (\[[^]]*\])', text.split("[tool.setuptools.package-data]", 1)[1], re.MULTILINE)
    packed = {package: ast.literal_eval(patterns) for package, patterns in lines}
    for top in ("zero_runtime", "orchestrator"):
        for file in (ROOT / top).rglob("*.*"):
            if file.suffix not in (".py", ".pyc") and not file.is_dir() and "kernels" not in file.parts:
                package = ".".join(file.parent.relative_to(ROOT).parts)
                assert any(file.match(pattern) for pattern in packed.get(package, ())), file


def test_the_package_contains_every_code_folder_and_both_configuration_folders() -> None:
    """`pip install` copies what pyproject.toml lists; a folder that it omits is missing only in installed copies."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"([\w.]+)"', text.split("packages = [", 1)[1].split("]", 1)[0]))
    folders = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in ("kernels", "zero_runtime", "orchestrator")
        for file in (ROOT / top).rglob("*.py")
    }
    code = {re.sub(r"^kernels\b", "zero_runtime.kernels", folder) for folder in folders}
    data = {file.parent.relative_to(ROOT).parts for top in ("conf", "sweeps") for file in (ROOT / top).rglob("*.yaml")}
    assert listed == code | {".".join(("orchestrator.shipped", *folder)) for folder in data}
