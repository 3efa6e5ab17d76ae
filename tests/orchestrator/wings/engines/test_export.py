"""The files that `export` writes of a measured point repeat its losses in a script that knows nothing of zero-lab."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import HANG_S
from points import config_of_line
from rank_runs import run
from safetensors.torch import save_file

from orchestrator import cli, wings
from orchestrator.config.engine import EngineChoice, EngineKind
from orchestrator.config.schema import RunConfig
from orchestrator.wings.engines import torch_optimizer
from orchestrator.wings.foreign import loop_lines
from orchestrator.wings.foreign.export_config import WRITERS
from orchestrator.worker.setup import build_data, build_deferred
from orchestrator.workloads.models import saved_config
from zero_runtime.initial_values import InitialValues

SCRIPT = Path(__file__).with_name("plain_script.py")
SMALL = (
    "model=llama_tiny model.config.num_hidden_layers=2 model.config.hidden_size=48 model.config.intermediate_size=64 "
    "batch.seq=32 batch.micro=2 measure.steps=5 measure.warmup_steps=1 measure.validation_batches=0 seed=5 "
    "resources.device=cpu resources.ranks=2 resources.threads=1 tracking=none scheduler=cosine "
)
# By folder: the engine's words.
CASES = {
    "ddp": "engine=ddp zero=stage0 precision=fp32 batch.accumulation=2 optimizer.clip_norm=0.5",
    "ddp_bf16": "engine=ddp zero=stage0 precision=bf16 batch.accumulation=2 model.config.tie_word_embeddings=true",
    "fsdp2_1": "engine=fsdp2 zero=stage1 precision=fp32 batch.accumulation=2 optimizer.clip_norm=0.5",
    "fsdp2_2": "engine=fsdp2 zero=stage2 precision=bf16 batch.accumulation=2 model.config.tie_word_embeddings=true",
    "fsdp2_3": "engine=fsdp2 zero=stage3 precision=bf16 optimizer=sgd engine.fsdp2.reshard_after_forward=false",
    "deepspeed_1": "engine=deepspeed zero=stage1 precision=fp32 batch.accumulation=2 optimizer.clip_norm=0.5",
    "deepspeed_2": "engine=deepspeed zero=stage2 precision=bf16 batch.accumulation=2",
    "deepspeed_3": "engine=deepspeed zero=stage3 precision=bf16 engine.deepspeed.zero_optimization.overlap_comm=false",
    # Last: DeepSpeed's autocast stays on for later engines of a process.
    "deepspeed_0": "engine=deepspeed zero=stage0 precision=bf16 batch.accumulation=2",
}
SHORT = ("fsdp2_2",)


def write_what_the_user_has(folder: Path, config: RunConfig) -> None:
    """The architecture, the first weights and the batches of all steps."""
    model, initialise = build_deferred(config)
    values = InitialValues(model, seed=config.seed, initialise=initialise)
    save_file(
        {name: values.draw(name, param) for name, param in model.named_parameters()}, folder / "first.safetensors"
    )
    assert config.model.model_type is not None
    saved_config(config.model.model_type, config.model.config, torch.float32).save_pretrained(folder)
    data, size, steps = build_data(config), config.batch.global_size, config.steps()
    assert size is not None
    assert steps is not None
    batches = [data.train_batch(step * size, size) for step in range(steps)]
    stacked = {
        "ids": torch.stack([torch.from_numpy(one.input_ids) for one in batches]),
        "labels": torch.stack([torch.from_numpy(one.labels) for one in batches]),
    }
    save_file(stacked, folder / "batches.safetensors")


def trained_by_the_script(folders: list[Path]) -> list[list[float]]:
    """The losses by the exported files, in folders with what the user has."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "LOCAL_SIZE": "2",
        "HOME": str(folders[0]),
    }
    done = subprocess.run(
        [*words, *map(str, folders)], env=environment, cwd=folders[0], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / "trained.json").read_text())["losses"] for folder in folders]


def test_the_script_imports_nothing_of_this_program() -> None:
    nodes = list(ast.walk(ast.parse(SCRIPT.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name.partition(".")[0] in ("orchestrator", "zero_runtime", "kernels")}


@pytest.mark.parametrize(
    "names",
    [SHORT, pytest.param([one for one in CASES if one not in SHORT], marks=pytest.mark.full)],
)
def test_the_exported_files_repeat_the_losses_of_the_run_bit_for_bit(names: Sequence[str], tmp_path: Path) -> None:
    """Both make the same operations in the same order on two ranks, whose sums have one order."""
    cases = [name for name in names if not name.startswith("deepspeed") or find_spec("deepspeed")]
    if len(cases) < len(names):
        print("without the files for DeepSpeed, which is not installed (extra deepspeed)")
    expected: dict[str, list[float]] = {}
    for name in cases:
        config = config_of_line(SMALL + CASES[name])
        expected[name] = run(tmp_path / name, config)["curve"]
        assert cli.main(["export", str(tmp_path / name), "--out", str(tmp_path / name / "user")]) == 0
        write_what_the_user_has(tmp_path / name / "user", config)
    found = trained_by_the_script([tmp_path / name / "user" for name in cases])
    assert dict(zip(cases, found, strict=True)) == expected
    assert all(curve[-1] < curve[0] for curve in found)


@pytest.mark.parametrize(
    ("engine", "words", "native", "told"),
    [
        ("ddp", "zero=stage0", {"bucket_cap_mb": 5}, "bucket_cap_mb=5"),
        ("ddp", "zero=stage0 precision=bf16 precision.reduce=bf16", {}, "register_comm_hook(None, default_hooks.bf16_"),
        ("fsdp2", "zero=stage3", {"cast_forward_inputs": False}, "cast_forward_inputs=False"),
        ("fsdp2", "zero=stage2", {}, "set_reshard_after_backward(last)"),
        ("fsdp2", "zero=stage3 zero.shard_ranks=2 resources.ranks=4", {}, "dist.get_world_size() // 2, 2)"),
        ("fsdp2", "zero=stage3 offload=optimizer_param_cpu", {}, "CPUOffloadPolicy(pin_memory=False)"),
        ("deepspeed", "zero=stage2", {"zero_optimization": {"round_robin_gradients": True}}, "ds_config.json"),
    ],
)
def test_the_files_set_what_the_engine_was_given(engine: str, words: str, native: dict[str, Any], told: str) -> None:
    asked = config_of_line(f"{SMALL} {words}")  # as zero-lab's own: another engine may not be installed here
    config = replace(asked, engine=EngineChoice(EngineKind(engine), **{engine: native}))
    files = WRITERS[engine](config, "").files
    if told in files:
        settings = wings.load(wings.ENGINES[engine]).settings_of(config)
        assert json.loads(files[told]) == settings
        assert settings["zero_optimization"]["round_robin_gradients"] is True
    else:
        (text,) = files.values()
        assert told in text


def test_the_groups_of_weight_decay_are_those_of_the_run() -> None:
    model = torch.nn.Module()
    names = ("ln_f.weight", "q_norm.weight", "lm_head.weight", "lm_head.bias", "normal.weight", "LayerNorm.weight")
    for name in names:
        path, _, own = name.partition(".")
        if not hasattr(model, path):
            model.add_module(path, torch.nn.Module())
        model.get_submodule(path).register_parameter(own, torch.nn.Parameter(torch.zeros(2, 2)))
    for words in ("", "optimizer.no_decay=false"):
        config, found = config_of_line(f"{SMALL} {words}"), dict[str, Any]()
        exec(loop_lines.needed(config, steps=False) + loop_lines.parameter_groups(config), found)
        expected = torch_optimizer.groups_of(config, model.named_parameters())
        assert [[id(param) for param in group["params"]] for group in found["parameter_groups"](model)] == [
            [id(param) for param in group["params"]] for group in expected
        ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("engine=zero zero=stage2", "engine=zero is zero-lab's own runtime, for which no file is needed"),
        ("engine=plain zero=stage0 resources.ranks=1", "engine=plain is plain PyTorch in one process"),
        ("engine=ddp zero=stage0 precision=fp16", "the written loop has no loss scale"),
    ],
)
def test_a_point_without_files_of_its_own_is_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", *words.split(), "resources.device=cpu"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "fix: " in error
