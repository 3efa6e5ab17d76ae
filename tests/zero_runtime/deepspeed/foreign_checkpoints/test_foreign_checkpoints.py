"""Checkpoints written by DeepSpeed load into the runtime at every stage."""

from __future__ import annotations

import os
import shutil
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from foreign.make_deepspeed import STEPS, Model, groups_of
from harness.oracle import ADAMW
from harness.plain_optimizers import AdamW
from harness.ranks import run_ranks
from safetensors.torch import load_file
from torch import nn

from zero_runtime.deepspeed.foreign_checkpoints.deepspeed import is_deepspeed, open_deepspeed
from zero_runtime.deepspeed.foreign_checkpoints.source import load_foreign
from zero_runtime.errors import CheckpointError
from zero_runtime.optim.configs import AdamWConfig, OptimizerConfig, SgdConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

MADE = Path(__file__).resolve().parents[3] / "foreign" / "deepspeed"  # by tests/foreign/make_deepspeed.py


def _runtime(model: nn.Module, stage: int, optimizer: OptimizerConfig = ADAMW) -> ZeroRuntime:
    return ZeroRuntime(
        model, ZeroPlan.from_stage(stage), MixedPrecision(), optimizer, RuntimeSettings(), torch.device("cpu")
    )


def _model() -> nn.Module:
    model = Model()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7.0)
    return model


def _states(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    with runtime.full_params() as values:
        found = {f"master/{name}": value.reshape(-1) for name, value in values.items()}
    for unit in runtime.units:
        for name in unit.names if unit.trainable else ():
            states = runtime.full_optimizer_state(name)
            found |= {f"{state}/{name}": value.reshape(-1) for state, value in states.items()}
    return found


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def _from_deepspeed(saved: int) -> None:
    expected = load_file(MADE / f"stage{saved}" / "expected.safetensors")
    moments = load_file(MADE / "stage3" / "expected.safetensors")
    for stage in range(4):
        runtime = _runtime(_model(), stage)
        found = load_foreign(runtime, partial(open_deepspeed, MADE / f"stage{saved}"))
        assert found.updates == runtime.updates == STEPS
        assert torch.equal(runtime.model.shift, torch.arange(6.0))
        for key, values in _states(runtime).items():
            if key in expected:
                assert torch.equal(values, expected[key]), (saved, stage, key)
            else:
                # DeepSpeed merges moments only at stage 3. Each stage sums bf16 gradients in its own order, which
                # costs a rounding of 2^-8 per step; a value from a wrong position would differ by its full magnitude.
                bound = STEPS * 2.0**-8 * moments[key].abs().max()
                assert torch.allclose(values, moments[key], rtol=0, atol=float(2 * bound)), (saved, stage, key)
        runtime.close()


@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_a_deepspeed_checkpoint_loads_at_every_stage(saved: int, world: int) -> None:
    run_ranks(_from_deepspeed, world, saved)


def _continues_like_torch() -> None:
    """Training after the load equals plain torch that continues from the same weights, moments and step."""
    runtime = _runtime(_model(), 3, AdamWConfig(weight_decay=0.0))
    load_foreign(runtime, partial(open_deepspeed, MADE / "stage3"))
    expected = load_file(MADE / "stage3" / "expected.safetensors")
    plain = Model()
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(expected[f"master/{name}"].view(param.shape))
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = AdamW(trained, lr=1e-2, weight_decay=0.0)
    for name, param in plain.named_parameters():
        if param.requires_grad:
            state = {kind: expected[f"{kind}/{name}"].view(param.shape) for kind in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(float(STEPS)), **state}
    ids = torch.arange(10).view(2, 5)
    for _ in range(2):
        optimizer.zero_grad()
        wanted = nn.functional.cross_entropy(plain(ids).flatten(0, 1), ids.flatten())
        wanted.backward()
        loss = nn.functional.cross_entropy(runtime(ids).flatten(0, 1), ids.flatten())
        runtime.backward(loss)
        assert runtime.step(1e-2).loss == float(wanted)
        optimizer.step()
    assert len(groups_of(plain)) == 2


def test_training_after_loading_a_deepspeed_checkpoint_continues_like_plain_torch() -> None:
    run_ranks(_continues_like_torch, 1)


def _refused(path: Path, optimizer: OptimizerConfig, model: type[nn.Module] = Model) -> str:
    runtime = _runtime(model(), 2, optimizer)
    before = _states(runtime)
    with pytest.raises(CheckpointError) as error:
        load_foreign(runtime, partial(open_deepspeed, path))
    after = _states(runtime)
    assert all(torch.equal(values, after[key]) for key, values in before.items())
    return str(error.value)


class OtherModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 3)


class _Evil:
    """Exits the rank if unpickling runs the code that the file names."""

    def __reduce__(self):
        return os._exit, (3,)


def test_mismatched_and_damaged_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(MADE / "stage2", folder)

    def told(optimizer: OptimizerConfig = ADAMW, model: type[nn.Module] = Model) -> str:
        (text,) = run_ranks(_refused, 1, folder, optimizer, model)
        return text

    assert "another optimizer: expected Sgd" in told(SgdConfig(momentum=0.9))
    assert "another architecture" in told(model=OtherModel)
    file = folder / "global_step3" / "mp_rank_00_model_states.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:2000])
    assert "expected a file that torch reads without running code" in told()
    torch.save({"param_shapes": [], "evil": _Evil()}, file)
    assert "expected a file that torch reads without running code" in told()
    file.unlink()
    assert f"{file}: expected a file of the checkpoint, found none; copy the whole folder" in told()
    (folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "expected the files of 2 ranks, found 1" in told()


def test_checkpoint_formats_are_distinguished(tmp_path: Path) -> None:
    assert is_deepspeed(MADE / "stage1")
    assert is_deepspeed(MADE / "stage1" / "global_step3")
    assert not is_deepspeed(tmp_path)


def test_the_stored_deepspeed_files_are_zip_archives() -> None:
    files = list(MADE.glob("stage*/global_step3/*.pt"))
    assert len(files) == 10
    assert all(zipfile.is_zipfile(file) for file in files)
