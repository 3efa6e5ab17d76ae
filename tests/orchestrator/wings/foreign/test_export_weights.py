"""Weights are exported so that transformers reads them: same logits, tied weights once, several files, small blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import run_alone, run_ranks

from orchestrator import cli
from zero_runtime.checkpoint import files
from zero_runtime.checkpoint.hugging_face import folder as hf_folder
from zero_runtime.checkpoint.load import CheckpointReader
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.errors import CheckpointError
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    # Its head is tied to the embedding.
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
}
IDS = torch.arange(24).view(2, 12)


def _trained(root: Path) -> dict[str, torch.Tensor]:
    """Trains each model for one step with ZeRO stage 3 and saves a checkpoint. Returns the logits by kind of model."""
    from orchestrator.workloads.models import build_deferred_model, token_losses

    found = {}
    for kind, config in MODELS.items():
        runtime = ZeroRuntime(
            build_deferred_model(kind, config),
            ZeroPlan.from_stage(3),
            MixedPrecision(),
            AdamWConfig(),
            RuntimeSettings(seed=1),
            torch.device("cpu"),
        )
        runtime.backward(token_losses(runtime.model, IDS, IDS) / IDS.numel() / 2)
        runtime.step(1e-2)
        trainer = {"config": {"model": {"model_type": kind, "config": config}}}
        save_checkpoint(runtime, root / kind, step=1, trainer=trainer)
        with torch.no_grad():
            found[kind] = runtime(input_ids=IDS).logits
    return found


def _read_back(folders: dict[str, Path]) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Loads each folder with transformers. Returns by folder the logits, and the parameters by name."""
    from transformers import AutoModelForCausalLM

    found = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        with torch.no_grad():
            found[name] = model(input_ids=IDS).logits, {key: param.data for key, param in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("trained")
    return root, run_ranks(_trained, 2, root)[0]


def test_transformers_computes_the_same_logits_from_exported_weights(
    trained, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    root, logits = trained
    folders = {}
    for kind in MODELS:
        for dtype in ("fp32", "bf16"):
            folders[f"{kind}-{dtype}"] = out = tmp_path / f"{kind}-{dtype}"
            assert cli.main(["export-weights", str(root / kind / "step-00000001"), str(out), "--dtype", dtype]) == 0
            assert f"written: {out}" in capsys.readouterr().out
    found = run_alone(_read_back, folders)
    for kind in MODELS:
        (full_logits, full), (_, half) = found[f"{kind}-fp32"], found[f"{kind}-bf16"]
        assert torch.equal(full_logits, logits[kind]), kind
        assert full.keys() == half.keys()
        for name, weight in full.items():
            assert weight.dtype == torch.float32
            assert torch.equal(half[name], weight.to(torch.bfloat16)), name


def test_the_folder_of_a_point_means_its_newest_checkpoint(trained, tmp_path: Path) -> None:
    point = tmp_path / "point"
    point.mkdir()
    (point / "checkpoints").symlink_to(trained[0] / "llama")
    assert cli.main(["export-weights", str(point), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_files_are_in_numeric_order_and_a_tied_weight_is_written_once(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_folder, "MAX_FILE_BYTES", 4000)
    out = tmp_path / "out"
    with CheckpointReader.open(trained[0] / "gpt2" / "step-00000001") as checkpoint:
        source = checkpoint.state("master")
        written = hf_folder.write_weights(source, out, dtype=torch.bfloat16)
    index = json.loads((out / files.WEIGHTS_INDEX).read_text())
    assert len(written.files) > 9
    assert sorted(written.files) == list(written.files)
    assert list(dict.fromkeys(index["weight_map"].values())) == list(written.files)
    assert "lm_head.weight" not in index["weight_map"]
    assert index["metadata"]["total_size"] == written.bytes


def test_writing_in_small_blocks_gives_the_same_bytes(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointReader.open(trained[0] / "llama" / "step-00000001") as checkpoint:
        source = checkpoint.state("master")
        hf_folder.write_weights(source, tmp_path / "whole", dtype=torch.float32)
        monkeypatch.setattr(hf_folder, "BLOCK_NUMEL", 7)
        hf_folder.write_weights(source, tmp_path / "parts", dtype=torch.float32)
    whole, parts = (tmp_path / name / files.WEIGHTS for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_an_existing_folder_is_refused(trained, tmp_path: Path) -> None:
    with (
        CheckpointReader.open(trained[0] / "llama" / "step-00000001") as checkpoint,
        pytest.raises(CheckpointError, match="expected a folder that is not there yet"),
    ):
        hf_folder.write_weights(checkpoint.state("master"), tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        ([], "the following arguments are required: CHECKPOINT, OUT", 2),
        (["a", "b", "--dtype", "fp8"], "--dtype: invalid choice: 'fp8'", 2),
        (["nowhere", "out"], "expected the folder of a checkpoint", 1),
    ],
)
def test_wrong_arguments_are_reported(words: list[str], told: str, code: int, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["export-weights", *words]) == code
    assert told in capsys.readouterr().err
