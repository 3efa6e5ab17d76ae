"""The drop-in engine saves checkpoints that load at another stage, and loads checkpoints written by DeepSpeed."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from foreign.make_deepspeed import STEPS, Model
from harness.checkpoints import flip_a_bit
from harness.ranks import run_ranks
from harness.seed_loop import full_values, initialize_quietly, unequal
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from orchestrator import cli
from zero_runtime.checkpoint.retention import committed
from zero_runtime.deepspeed import engine_checkpoint
from zero_runtime.errors import CheckpointError, PlanError

MADE = Path(__file__).resolve().parents[2] / "foreign" / "deepspeed"


def _engine(stage: int, seed: int, model: nn.Module | None = None, zero: dict[str, Any] | None = None, batch: int = 4):
    torch.manual_seed(seed)
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage, **(zero or {})},
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


class Fading:
    """A callable with a state of its own, which torch's schedules save."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _place: float) -> float:
        self.calls += 1
        return 0.9**self.calls


class NumpyRate(schedules.LRScheduler):
    """A schedule of the user's with a function, and with values that JSON does not have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rule = lambda count: 0.1 / (1 + count)
        self.count, self.seen, self.tensors = np.int64(0), np.zeros(2), (torch.zeros(2, dtype=torch.bfloat16),)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.count, self.seen, self.tensors = self.count + 1, self.seen + 1, (self.tensors[0] + 0.5,)
        return [self.rule(self.count) + self.seen[1] + self.tensors[0][1].item() for _ in self.base_lrs]


def _warm_cosine(opt: torch.optim.Optimizer) -> schedules.LRScheduler:
    parts = [schedules.LinearLR(opt, 0.1, 1.0, 3), schedules.CosineAnnealingLR(opt, 5)]
    return schedules.SequentialLR(opt, parts, [3])


def _chained(opt: torch.optim.Optimizer) -> schedules.LRScheduler:
    return schedules.ChainedScheduler([_warm_cosine(opt), schedules.LambdaLR(opt, Fading())], opt)


Kind = Callable[..., torch.optim.Optimizer]
KINDS: tuple[Kind, ...] = (
    partial(torch.optim.AdamW, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: schedules.LambdaLR(opt, Fading()),
    "MultiplicativeLR": lambda opt: schedules.MultiplicativeLR(opt, lambda _: 0.8),
    "StepLR": lambda opt: schedules.StepLR(opt, 3),
    "MultiStepLR": lambda opt: schedules.MultiStepLR(opt, [2, 5, 5], 0.5),
    "ConstantLR": lambda opt: schedules.ConstantLR(opt, 0.5, 6),
    "LinearLR": lambda opt: schedules.LinearLR(opt, 0.1, 1.0, 7),
    "ExponentialLR": lambda opt: schedules.ExponentialLR(opt, 0.8),
    "PolynomialLR": lambda opt: schedules.PolynomialLR(opt, 7, 2.0),
    "CosineAnnealingLR": lambda opt: schedules.CosineAnnealingLR(opt, 7),
    "CosineAnnealingWarmRestarts": lambda opt: schedules.CosineAnnealingWarmRestarts(opt, 3),
    "SequentialLR": _warm_cosine,
    "ChainedScheduler": _chained,
    "OneCycleLR": lambda opt: schedules.OneCycleLR(opt, 0.05, total_steps=12),
    "CyclicLR": lambda opt: schedules.CyclicLR(opt, 0.01, 0.1, 3, scale_fn=Fading()),
    "ReduceLROnPlateau": lambda opt: schedules.ReduceLROnPlateau(opt, factor=0.5, patience=2),
    "SWALR": lambda opt: SWALR(opt, 0.01, anneal_epochs=6),
    "a user's": NumpyRate,
}


def _rates(opt: Any, updates: range, update: Callable[[int], None], schedule: Any) -> list[Any]:
    """The rate and the momentum of each update; `schedule` is stepped here, unless it is None."""
    found = []
    for number in updates:
        [group] = opt.param_groups
        found.append((float(group["lr"]), group.get("betas", group.get("momentum"))))
        update(number)
        if schedule is not None:
            schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
    return found


def _plain_rates(name: str, kind: Kind) -> list[Any]:
    opt = kind([nn.Parameter(torch.ones(2))])
    return _rates(opt, range(8), lambda _: opt.step(), SCHEDULES[name](opt))


def _begin(name: str, kind: Kind, seed: int) -> tuple[Any, Any]:
    """An engine with the schedule, and the schedule if the script steps it."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    opt = kind(model.parameters())
    driven = None if name == "ReduceLROnPlateau" else SCHEDULES[name](opt)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    engine = initialize_quietly(model=model, optimizer=opt, lr_scheduler=driven, config=config)[0]
    return engine, None if driven else SCHEDULES[name](engine.optimizer)


def _go_on(engine: Any, own: Any, updates: range) -> list[Any]:
    return _rates(engine.optimizer, updates, lambda count: _train(engine, range(count, count + 1)), own)


def _end(engine: Any) -> dict[str, torch.Tensor]:
    weights = full_values(engine)
    engine.destroy()
    return weights


def _schedules_go_on(root: Path) -> None:
    for (name, kind), place in zip(((name, kind) for name in SCHEDULES for kind in KINDS), count()):
        if kind is not KINDS[0] and name not in ("OneCycleLR", "CyclicLR", "SequentialLR"):
            continue  # the others leave the momentum alone
        engine, own = _begin(name, kind, 0)
        found = _go_on(engine, own, range(4))
        engine.save_checkpoint(root / str(place), client_state={"own": own and own.state_dict()})
        _go_on(engine, own, range(4, 8))
        unbroken = _end(engine)
        engine, own = _begin(name, kind, 1)
        state = engine.load_checkpoint(root / str(place))[1]
        if own is not None:
            own.load_state_dict(state["own"])
        found += _go_on(engine, own, range(4, 8))
        assert found == _plain_rates(name, kind), name
        assert unequal(_end(engine), unbroken) == [], name


def test_every_schedule_of_torch_goes_on_after_a_load_as_in_plain_torch(tmp_path: Path) -> None:
    of_torch = {kind.__name__ for kind in vars(schedules).values() if isinstance(kind, type)}
    kinds = {name for name in of_torch if name.endswith(("LR", "Scheduler", "Plateau", "Restarts")) and name[0] != "_"}
    assert kinds - {"LRScheduler"} <= SCHEDULES.keys()
    run_ranks(_schedules_go_on, 1, tmp_path)


def _odd_schedules(root: Path) -> None:
    """A schedule whose state cannot be saved is refused at the save; one that an earlier release saved is loaded."""
    engine, _ = _begin("SequentialLR", KINDS[0], 0)
    _go_on(engine, None, range(4))
    engine.lr_scheduler._schedulers[1].owner = engine.module
    with pytest.raises(
        PlanError, match=r"SequentialLR\.state_dict\(\)\['_schedulers'\]\[1\]\['owner'\].*found a Linear"
    ):
        engine.save_checkpoint(root)
    assert not list(root.iterdir())
    del engine.lr_scheduler._schedulers[1].owner
    saved = partial(_states_of_0_1, engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_checkpoint, "_states", lambda *_: saved())
        engine.save_checkpoint(root)
    lr = engine.get_lr()
    engine.destroy()
    engine, _ = _begin("SequentialLR", KINDS[0], 0)
    with pytest.warns(UserWarning, match="an earlier release saved without _schedulers, which begin anew"):
        engine.load_checkpoint(root)
    assert (engine.get_lr(), engine.lr_scheduler.last_epoch) == (lr, 4)
    engine.destroy()


def _states_of_0_1(engine: Any) -> dict[str, Any]:
    """What release 0.1 saved: the plain values of a schedule and lists of them, and the groups' rates."""
    kept = engine.lr_scheduler.state_dict()
    del kept["_schedulers"]
    return {"client_state": {}, "schedule": kept, "lr": engine.get_lr()}


def test_a_schedule_that_cannot_be_saved_is_refused_and_one_of_an_earlier_release_loads(tmp_path: Path) -> None:
    run_ranks(_odd_schedules, 1, tmp_path)


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
