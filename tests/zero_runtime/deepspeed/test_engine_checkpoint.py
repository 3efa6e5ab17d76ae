"""The drop-in engine saves checkpoints that load at another stage, and loads checkpoints written by DeepSpeed."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from foreign.make_deepspeed import STEPS, Model
from harness.checkpoints import flip_a_bit
from harness.ranks import run_ranks
from harness.seed_loop import initialize_quietly
from safetensors.torch import load_file
from torch import nn

from orchestrator import cli
from zero_runtime.checkpoint.retention import committed
from zero_runtime.errors import CheckpointError, PlanError

MADE = Path(__file__).resolve().parents[2] / "foreign" / "deepspeed"


def _engine(
    stage: int,
    seed: int,
    model: nn.Module | None = None,
    zero: dict[str, Any] | None = None,
    batch: int = 4,
    more: dict[str, Any] | None = None,
):
    torch.manual_seed(seed)
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **(more or {}),
    }
    return initialize_quietly(model=model or nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), config=config)[0]


# What DeepSpeed 0.19.8, which pickles it, gives back as it is.
CLIENT_STATE = {
    "epoch": 3,
    1: 2,
    (0, True): {"best": float("-inf"), "//tuple": [float("nan"), None, ()]},
    "rows": [{1.5: "a"}, {"1.5": ("b", [2])}],
    "counts": Counter([2, 5, 5]),
    "tensors": [torch.tensor(0.1), torch.tensor([[1, -2]]), torch.tensor([float("inf")], dtype=torch.bfloat16)],
    "numpy": [np.float32(0.1), np.int8(3), np.array([[0.1]]), np.bool_(True)],
}


def _train(engine, steps: range) -> list[float]:
    losses = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in steps:
        batch = torch.sin(torch.arange(16.0) + step).view(4, 4).chunk(world)[rank]
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _save(root: Path) -> tuple[list[float], list[float]]:
    engine = _engine(2, 1)
    _train(engine, range(4))
    assert engine.save_checkpoint(root, client_state=CLIENT_STATE)
    engine.save_checkpoint(root, tag="best")
    engine.save_16bit_model(root / "weights")
    rest, lr = _train(engine, range(4, 7)), engine.get_lr()
    engine.destroy()
    return rest, lr


def _load(root: Path, stage: int, tag: str | None) -> tuple[list[float], list[float]]:
    engine = _engine(stage, 2)
    path, client = engine.load_checkpoint(root, tag=tag)
    assert path is not None
    assert repr(client) == repr({} if tag else CLIENT_STATE)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (4, 4, 0)
    found = _train(engine, range(4, 7)), engine.get_lr()
    engine.destroy()
    return found


def test_training_resumes_at_another_stage_with_its_schedule_and_the_client_state(tmp_path: Path) -> None:
    saved = run_ranks(_save, 2, tmp_path)
    for stage, tag in ((2, None), (3, "best")):
        assert run_ranks(_load, 2, tmp_path, stage, tag) == saved
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert {name: (tuple(value.shape), value.dtype) for name, value in weights.items()} == {
        "0.weight": ((5, 4), torch.bfloat16),
        "0.bias": ((5,), torch.bfloat16),
        "1.weight": ((2, 5), torch.bfloat16),
        "1.bias": ((2,), torch.bfloat16),
    }


def _weights_only(root: Path) -> None:
    engine = _engine(1, 2)
    before = _train(engine, range(1))
    engine.load_checkpoint(root, load_module_only=True)
    assert engine.global_steps == 1
    assert engine.runtime.updates == 1
    assert _train(engine, range(1)) != before
    assert engine.load_checkpoint(root / "nothing") == (None, {})
    with pytest.raises(PlanError, match="a model half loaded is none"):
        engine.load_checkpoint(root, load_module_strict=False)
    (root / "a_file").touch()
    with pytest.raises(CheckpointError, match="a_file"):
        engine.save_16bit_model(root / "a_file")
    with pytest.raises(PlanError, match=r"expected the name of a file that ends in \.safetensors"):
        engine.save_16bit_model(root / "x", "other.txt")
    engine.destroy()


def test_loading_weights_alone_keeps_the_optimizer_and_the_counters(tmp_path: Path) -> None:
    run_ranks(_save, 1, tmp_path)
    run_ranks(_weights_only, 1, tmp_path)


def _within_a_step(root: Path) -> None:
    """A save between two micro-batches has the weights of the last step, trains on, and resumes from that step."""
    for stage in range(4):
        engine = _engine(stage, 1, batch=8)
        _train(engine, range(4))
        with engine.runtime.full_params() as values:
            whole = {name: value.clone() for name, value in values.items()}
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        folder = root / str(stage)
        assert all(torch.equal(value, whole[name]) for name, value in engine.module_state_dict().items())
        engine.save_16bit_model(folder, "model.pt")
        assert all(
            torch.equal(value, whole[name].bfloat16()) for name, value in torch.load(folder / "model.pt").items()
        )
        with pytest.warns(UserWarning, match="are not saved") if dist.get_rank() == 0 else nullcontext():
            engine.save_checkpoint(folder)
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        assert (engine.global_steps, engine.micro_steps) == (3, 6)
        engine.destroy()
        resumed = _engine(stage, 2, batch=8)
        resumed.load_checkpoint(folder)
        assert (resumed.global_steps, resumed.micro_steps) == (2, 4)
        found = _train(resumed, range(4, 8))
        resumed.destroy()
        straight = _engine(stage, 1, batch=8)
        assert _train(straight, range(8))[4:] == found
        straight.destroy()


def test_a_save_within_an_accumulation_has_the_end_of_the_last_step(tmp_path: Path) -> None:
    run_ranks(_within_a_step, 2, tmp_path)


def _misnamed(root: Path) -> None:
    """Folders and tags that no checkpoint can be saved under are refused on all ranks, before anything is written."""
    os.chdir(root)
    engine = _engine(2, 1)
    rank = dist.get_rank()
    calls = (engine.save_checkpoint, engine.load_checkpoint)
    for state, where, kind in (
        ({"seen": [0, torch.ones(1 << 17)]}, r"client_state\['seen'\]\[1\]", "Tensor"),
        ({torch.float32: 1}, "a key of client_state", "dtype"),
        ({"path": root}, r"client_state\['path'\]", "PosixPath"),
    ):
        with pytest.raises(PlanError, match=rf"^engine\.save_checkpoint: {where}: expected numbers, .* found a {kind}"):
            engine.save_checkpoint("ck", client_state=state if rank == 1 else {})
    for folder in ("", None, 3):
        for call in (*calls, engine.save_16bit_model):
            with pytest.raises(PlanError, match=rf"^engine\.{call.__name__}: expected a folder, found {folder!r}"):
                call(folder)
    for tag in ("../escaped", str(root / "absolute"), "a/../../b", "", "."):
        for call in calls:
            with pytest.raises(PlanError, match=f"expected a tag that names a folder inside ck, found {tag!r}"):
                call("ck", tag if rank == 1 else "good")
    for call in calls:
        with pytest.raises(
            PlanError, match=r"expected one folder and one tag on all ranks, found .*/tag0 and .*/tag1$"
        ):
            call("ck", f"tag{rank}")
    assert not list(root.iterdir())
    engine.save_checkpoint("ck", "epoch/1")
    engine.save_checkpoint("ck", 2)
    assert sorted(str(path) for path in Path("ck").glob("*/**/step*")) == [
        "ck/2/step-00000000",
        "ck/epoch/1/step-00000000",
    ]
    engine.destroy()


def test_a_checkpoint_needs_one_folder_and_a_tag_inside_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_misnamed, 2, tmp_path)
    assert cli.main(["export-weights", str(tmp_path / "ck"), str(tmp_path / "out")]) == 1
    assert "found folders of tags: 2; take one" in capfd.readouterr().err


def _damaged(root: Path) -> None:
    """A damaged newest checkpoint is passed over and kept; where none is good, no script trains from new weights."""
    engine = _engine(1, 1)
    for tag in (None, "best"):
        for _ in range(2):
            _train(engine, range(1))
            engine.save_checkpoint(root, tag=tag)
    newest = {tag: list(committed(root / tag)) for tag in ("", "best")}
    assert newest == {"": [1, 2], "best": [3, 4]}
    flip_a_bit(next((root / "step-00000002").glob("rank*")), -3)
    assert Path(engine.load_checkpoint(root)[0]) == root / "step-00000001"
    _train(engine, range(1))
    engine.save_checkpoint(root)
    assert sorted(path.name[:19] for path in root.glob("step*")) == [
        "step-00000001",
        "step-00000002",
        "step-00000002.aside",
    ]
    for place in (root, root / "best"):
        for path in place.glob("step*/rank*"):
            path.write_bytes(path.read_bytes() + b"x")
    for tag in (None, "best"):
        for weights_only in (True, False):
            with pytest.raises(CheckpointError, match="expected a good checkpoint, found none among"):
                engine.load_checkpoint(root, tag, load_module_only=weights_only)
    assert engine.load_checkpoint(root, "other") == (None, {})
    for path in root.glob("step*"):
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match=r"expected a tag, found its folders in .*: best; give one"):
        engine.load_checkpoint(root)
    engine.destroy()


def test_damaged_checkpoints_are_never_taken_for_an_empty_folder(tmp_path: Path) -> None:
    run_ranks(_damaged, 1, tmp_path)


def _from_deepspeed(zero: dict[str, Any]) -> None:
    engine = _engine(3, 2, Model(), zero)
    path, _ = engine.load_checkpoint(MADE / "stage2")
    assert path == str(MADE / "stage2" / "global_step3")
    assert engine.global_steps == engine.runtime.updates == STEPS
    expected = load_file(MADE / "stage2" / "expected.safetensors")
    with engine.runtime.full_params() as values:
        for name, value in values.items():
            assert torch.equal(value.reshape(-1), expected[f"master/{name}"]), name
    engine.destroy()


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_a_checkpoint_written_by_deepspeed_loads_with_load_checkpoint(device: str, tmp_path: Path) -> None:
    section = {"device": device, "nvme_path": str(tmp_path)}
    run_ranks(_from_deepspeed, 2, {"offload_optimizer": section, "offload_param": section})


def _hugging_face(root: Path) -> list[str]:
    """Train a small GPT-2 for a step, save it in every way into existing folders, and return the files under `root`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    engine = _engine(3, 1, GPT2LMHeadModel(config))
    engine.save_checkpoint(root / "checkpoint", tag="tag")
    ids = torch.arange(8).view(1, 8)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(root / "checkpoint")
    engine.save_checkpoint(root / "checkpoint", tag="tag")
    for name in ("model.safetensors", "pytorch_model.bin", "adapter.bin", "model.pt"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "notes.txt").write_text("kept")
        for _ in range(2):  # the second replaces the first
            assert engine.save_16bit_model(root / name, name)
    pickled = torch.load(root / "model.pt/model.pt", weights_only=True)  # DeepSpeed's form: a state dict of torch.save
    assert pickled.keys() == engine.module_state_dict().keys()
    if dist.get_rank() == 0:
        told = GPT2LMHeadModel.from_pretrained(root / "pytorch_model.bin", dtype="auto")
        with engine.runtime.full_params() as values, torch.no_grad():
            for key, param in told.named_parameters():
                assert torch.equal(param, values[key].bfloat16()), key
                assert torch.equal(param, pickled[key]), key
    else:
        with engine.runtime.full_params():
            pass
    engine.destroy()
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*") if path.parent.name != "checkpoint")


def test_16_bit_weights_are_saved_as_safetensors_into_existing_folders(tmp_path: Path) -> None:
    for files in run_ranks(_hugging_face, 2, tmp_path):
        assert files == sorted(
            f"{folder}/{file}"
            for folder, weights in (
                ("model.safetensors", "model.safetensors"),
                ("pytorch_model.bin", "model.safetensors"),
                ("adapter.bin", "adapter.safetensors"),
                ("model.pt", "model.pt"),
            )
            for file in (weights, "config.json", "notes.txt")
            if (folder, file) != ("model.pt", "config.json")
        )
    # `export-weights` also accepts the engine's checkpoint, including the configuration in it, and the folder of a tag,
    # in which the newest is taken.
    for given, out in ((next((tmp_path / "checkpoint").glob("step*")), "out"), (tmp_path / "checkpoint/tag", "again")):
        assert cli.main(["export-weights", str(given), str(tmp_path / out)]) == 0
        exported, saved = (load_file(tmp_path / folder / "model.safetensors") for folder in (out, "model.safetensors"))
        assert exported.keys() == saved.keys()
        assert all(torch.equal(exported[key], saved[key]) for key in saved)
        written = (tmp_path / out / "config.json").read_text()
        assert written == (tmp_path / "model.safetensors/config.json").read_text()


# ---- a folder for each node ------------------------------------------------------------------------------------------


def on_nodes(root: Path, stage: int) -> tuple[list[float], list[float], list[str]]:
    """The losses of an unbroken run and of a resumed one, and the names of the errors, with a rank on each of two
    nodes that share no folder."""
    rank, told = dist.get_rank(), []
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    local, own = {"checkpoint": {"use_node_local_storage": True}}, root / f"node{rank}"
    engine = _engine(stage, 1, more=local)
    _train(engine, range(3))
    engine.save_checkpoint(own, tag="last")
    rest = _train(engine, range(3, 6))
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(root / "shared")
    told.append(str(caught.value))
    engine.destroy()
    assert sorted(path.name for path in (own / "last" / "step-00000003").iterdir()) == [
        "index.json",
        f"rank-0000{rank}-of-00002.safetensors",
    ]
    engine = _engine(stage, 2, more=local)
    assert engine.load_checkpoint(own, "last")[0] == str(own / "last" / "step-00000003")
    again = _train(engine, range(3, 6))
    with pytest.raises(PlanError) as caught_tags:
        engine.save_checkpoint(own, f"tag{rank}")
    told.append(str(caught_tags.value))
    dist.barrier()
    if rank:
        (own / "last" / "step-00000003").rename(own / "step-00000003")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(own, "last")
    told.append(str(caught.value))
    engine.destroy()
    return rest, again, told


@pytest.mark.parametrize("stage", [1, 3])
def test_each_node_writes_and_reads_its_own_folder(stage: int, tmp_path: Path) -> None:
    reasons = ("another rank has none of this step", "this rank's folder has none of them")
    for (rest, again, (shared, tags, lacking)), reason in zip(
        run_ranks(on_nodes, 2, tmp_path, stage), reasons, strict=True
    ):
        assert rest == again
        assert "give each node a folder on its own disk" in shared  # whichever of the two leaders fails first
        assert "expected one folder and one tag on all ranks, found tag tag0 and tag tag1" in tags
        assert f"found none among those of steps 3 ({reason}); bring back a copy of one" in lacking


def without_a_place(root: Path) -> str:
    os.environ.pop("LOCAL_RANK", None)
    engine = _engine(1, 1, more={"checkpoint": {"use_node_local_storage": True}})
    with pytest.raises(PlanError) as caught:
        engine.save_checkpoint(root)
    engine.destroy()
    return str(caught.value)


def test_ranks_that_do_not_know_their_node_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(without_a_place, 2, tmp_path):
        assert told == "a folder for each node: expected LOCAL_RANK, found none; start the ranks with torchrun"
