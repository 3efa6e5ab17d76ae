"""The files that `export` writes of a measured point repeat its losses in a script that knows nothing of zero-lab."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from harness.patience import HANG_S
from points import config_of_line
from rank_runs import run
from safetensors.torch import save_file

from orchestrator import cli
from orchestrator.config.schema import RunConfig
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
    "fsdp2_3": "engine=fsdp2 zero=stage3 precision=bf16 optimizer=sgd +engine.fsdp2.reshard_after_forward=false",
    "deepspeed_0": "engine=deepspeed zero=stage0 precision=fp32 batch.accumulation=2",
    "deepspeed_1": "engine=deepspeed zero=stage1 precision=fp32 batch.accumulation=2 optimizer.clip_norm=0.5",
    "deepspeed_2": "engine=deepspeed zero=stage2 precision=bf16 batch.accumulation=2",
    "deepspeed_3": "engine=deepspeed zero=stage3 precision=bf16 +engine.deepspeed.zero_optimization.overlap_comm=false",
}


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


def test_the_exported_files_repeat_the_losses_of_the_run_bit_for_bit(tmp_path: Path) -> None:
    """Both make the same operations in the same order on two ranks, whose sums have one order."""
    cases = [name for name in CASES if not name.startswith("deepspeed") or find_spec("deepspeed")]
    if len(cases) < len(CASES):
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
