"""The names that people's DeepSpeed scripts import, by DeepSpeed's paths: each does on two ranks what they expect.

Values "of the real package" are those of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import initialize_quietly
from harness.small_engine import WIDTH, Small, at_level, mean_loss, trained
from torch import nn

import zero_runtime
import zero_runtime.deepspeed as deepspeed
from zero_runtime.deepspeed.accelerator import CurrentAccelerator
from zero_runtime.deepspeed.runtime import lr_schedules, utils
from zero_runtime.errors import CallOrderError, CheckpointError, PlanError

# ---- the rest on ranks ---------------------------------------------------------------------------------------------


def generation_and_groups() -> None:
    groups = deepspeed.utils.groups
    counts = [("get_data_parallel", (dist.get_rank(), 2)), ("_get_data_parallel", (dist.get_rank(), 2))]
    counts += [(f"{kind}_parallel", (0, 1)) for kind in ("get_model", "_get_tensor_model", "_get_sequence")]
    for number in (None, 0, 3):
        engine = None if number is None else initialize_quietly(model=Small(), config=at_level(number))[0]
        for start, expected in counts:
            assert (getattr(groups, f"{start}_rank")(), getattr(groups, f"{start}_world_size")()) == expected
        assert groups._get_data_parallel_group() is deepspeed.comm.get_world_group()
        assert deepspeed.comm.get_all_ranks_from_group() == [0, 1]
        if engine is not None:
            with deepspeed.zero.unwrap_model_for_generation(engine) as model:
                for _ in range(1 + dist.get_rank()):
                    assert not model(torch.ones(1, WIDTH)).requires_grad
            engine.backward(mean_loss(engine))
            engine.step()
            engine.destroy()


def schedules() -> None:
    """A class made for an optimizer, handed over, and the section of the same name give one sequence of rates."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("WarmupLR", {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 4}),
        ("WarmupDecayLR", {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": 0.1}),
        ("WarmupCosineLR", {"total_num_steps": 8, "warmup_num_steps": 3}),
        ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_momentum": False}),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2}),
    ]
    for kind, params in cases:
        alone = torch.optim.AdamW(Small().parameters(), lr=0.01)
        schedule = getattr(lr_schedules, kind)(alone, **params)
        found = []
        for _ in range(6):
            found.append([float(group["lr"]) for group in alone.param_groups])
            schedule.step()
        section = {"type": kind, "params": params}
        made, *_, of_section = initialize_quietly(model=Small(), config=at_level(1, scheduler=section))
        assert type(of_section).__name__ == kind in lr_schedules.VALID_LR_SCHEDULES
        assert isinstance(of_section, getattr(lr_schedules, kind))
        model = Small()
        given = torch.optim.AdamW(model.parameters(), lr=0.01)
        handed = getattr(lr_schedules, kind)(given, **params)
        config = {key: value for key, value in at_level(3).items() if key != "optimizer"}
        other, *_ = initialize_quietly(model=model, optimizer=given, lr_scheduler=handed, config=config)
        for engine in (made, other):
            rates = []
            for step in range(6):
                rates.append(engine.get_lr())
                engine.backward(mean_loss(engine, step))
                engine.step()
            assert rates == found, kind
            state = engine.lr_scheduler.state_dict()
            assert state == {"last_batch_iteration": 5}
            again = getattr(lr_schedules, kind)(torch.optim.AdamW(Small().parameters(), lr=0.01), **params)
            again.load_state_dict(state)
            assert again.get_last_lr() == engine.get_lr()
            engine.destroy()
    cycle = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_min_mom": [0.5, 0.75]}
    section = {"type": "OneCycle", "params": cycle}
    with pytest.raises(PlanError, match="expected one momentum for all groups"):
        initialize_quietly(model=Small(), config=at_level(2, scheduler=section))


def weights_of_checkpoints(folder: str) -> None:
    zero_to_fp32 = deepspeed.utils.zero_to_fp32

    class Tied(Small):
        def __init__(self) -> None:
            super().__init__()
            self.third = nn.Linear(WIDTH, WIDTH, bias=False)
            self.third.weight = self.first.weight

    for number in range(4):
        engine, *_ = initialize_quietly(model=Tied(), config=at_level(number))
        root = Path(folder, str(number))
        for tag in ("one", "two"):
            engine.backward(mean_loss(engine))
            engine.step()
            engine.save_checkpoint(root, tag=tag)
        with engine.runtime.full_params() as values:
            state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(root)
            assert state.keys() == Tied().state_dict().keys()
            assert all(torch.equal(state[name], value) for name, value in values.items())
        assert state["third.weight"] is state["first.weight"]
        older = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(root, "one")
        assert not torch.equal(older["first.weight"], state["first.weight"])
        loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), root)
        assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
        with engine.runtime.full_params(write=True) as values:
            for value in values.values():
                value.zero_()
        own = engine.module.shift
        own.zero_()
        assert zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, root) is engine.module
        with engine.runtime.full_params() as values:
            assert all(torch.equal(value, state[name]) for name, value in values.items())
        assert torch.equal(own, state["shift"])
        engine.backward(mean_loss(engine))  # it trains on
        engine.step()
        with pytest.raises(CheckpointError, match="expected the parameters of Linear"):
            zero_to_fp32.load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), root)
        engine.destroy()
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        zero_to_fp32.main([str(root), str(root / "bin")])
        written = torch.load(root / "bin" / "pytorch_model.bin")
        assert Tied().load_state_dict(written) == ([], [])  # nothing is missing
        assert all(torch.equal(value, state[name]) for name, value in written.items())
        zero_to_fp32.main([str(root), str(root / "out"), "--safe_serialization"])
        written = load_file(root / "out" / "model.safetensors")
        assert all(torch.equal(value, state[name]) for name, value in written.items())
    with pytest.raises(CheckpointError, match="found nothing"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(Path(folder, "none"))


def optimizers() -> None:
    """FusedLion and FusedLamb, which torch does not have, update as the section of the same name does."""
    from zero_runtime.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from zero_runtime.deepspeed.ops.lamb import FusedLamb
    from zero_runtime.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    constants = {"lr": 0.01, "weight_decay": 0.1}
    for made, name in ((FusedLion, "Lion"), (DeepSpeedCPULion, "Lion"), (FusedLamb, "Lamb")):
        model, values = Small(), []
        optimizer = made(trained(model).values(), **constants)
        with pytest.raises(CallOrderError, match=r"engine\.step\(\) updates"):
            optimizer.step()
        config = at_level(2)
        config.pop("optimizer")
        of_class, *_ = initialize_quietly(model=model, optimizer=optimizer, config=config)
        section = {"type": name, "params": constants}
        of_section, *_ = initialize_quietly(model=Small(), config=at_level(2, optimizer=section))
        for engine in (of_class, of_section):
            engine.backward(mean_loss(engine))
            engine.step()
            with engine.runtime.full_params() as full:
                values.append({key: value.clone() for key, value in full.items()})
            engine.destroy()
        assert all(torch.equal(value, values[1][key]) for key, value in values[0].items())
        assert not torch.equal(values[0]["first.weight"], Small().first.weight)
    assert DeepSpeedCPUAdagrad is torch.optim.Adagrad
    with pytest.raises(PlanError, match=r"optimizer\.params\.beta"):
        FusedLion(Small().parameters(), beta=0.5)


CHECKS = (generation_and_groups, schedules, optimizers)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_names_of_scripts_do_what_they_promise_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(check, 2)


def test_the_weights_of_a_checkpoint_are_read_without_an_engine(tmp_path: Path) -> None:
    run_ranks(weights_of_checkpoints, 2, str(tmp_path))


# ---- without ranks -------------------------------------------------------------------------------------------------

PATHS = {  # what scripts import, and the attribute of `zero_runtime` that it is
    "accelerator": "get_accelerator",
    "comm": "init_distributed",
    "ops.adam": "ops.adam.FusedAdam ops.adam.DeepSpeedCPUAdam",
    "runtime.config": "DeepSpeedConfig DeepSpeedConfigError",
    "runtime.dataloader": "utils.RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.zero": "zero.Init zero.GatheredParameters zero.ZeroParamStatus zero.unwrap_model_for_generation",
    "runtime.zero.partition_parameters": "zero.Init zero.GatheredParameters zero.ZeroParamStatus",
    "runtime.zero.stage3": "zero.estimate_zero3_model_states_mem_needs_all_live",
    "runtime.zero.stage_1_and_2": "zero.estimate_zero2_model_states_mem_needs_all_live",
    "utils": "utils.logger utils.safe_get_full_grad OnDevice utils.set_z3_leaf_modules log_dist utils.groups",
    "utils.logging": "logger log_dist",
    "utils.zero_to_fp32": "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
}


@pytest.mark.parametrize("path", ["accelerator", "comm", "integrations.trainer_config", "ops.adam", "utils", "zero"])
def test_a_short_path_is_a_second_name_of_the_same_module(path: str) -> None:
    module = import_module(f"zero_runtime.{path}")
    assert module is import_module(f"zero_runtime.deepspeed.{path}")
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == f"zero_runtime.deepspeed.{path}"


@pytest.mark.parametrize(("path", "names"), PATHS.items(), ids=list(PATHS))
def test_a_path_of_deepspeed_has_the_names_of_the_top(path: str, names: str) -> None:
    for name in names.split():
        found: dict[str, Any] = {}
        exec(f"from zero_runtime.deepspeed.{path} import {name.split('.')[-1]} as found", found)
        for top in (zero_runtime, deepspeed):
            expected: Any = top
            for part in name.split("."):
                expected = getattr(expected, part)
            assert found["found"] is expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import zero_runtime.ops.transformer", "zero_runtime.ops.transformer is not here: there are no fused layers"),
        ("from zero_runtime import PipelineModule", "PipelineModule is not here: pipelines"),
        ("from zero_runtime.deepspeed.pipe import PipelineModule", "pipe is not here: pipelines"),
        ("import zero_runtime.deepspeed.moe.layer", "moe is not here: pipelines"),
        ("from zero_runtime import add_tuning_arguments", "is not here: initialize reads none of its options"),
        ("from zero_runtime.deepspeed.runtime.pipe.engine import PipelineEngine", "pipe is not here"),
        ("from zero_runtime.deepspeed.ops import op_builder", "op_builder is not here: kernels for CPUs"),
    ],
)
def test_an_import_of_what_is_not_here_says_what_to_do(line: str, words: str) -> None:
    with pytest.raises(ImportError, match=words):
        exec(line, {})
    assert not hasattr(deepspeed, "moe")
    assert not hasattr(zero_runtime, "PipelineModule")


def test_an_import_of_the_package_imports_none_of_it() -> None:
    code = "import sys, zero_runtime.deepspeed; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name for name in run.stdout.split() if name.startswith(("zero_runtime", "torch"))}
    own = ("zero_runtime", "zero_runtime.import_finders", "zero_runtime.deepspeed", "zero_runtime.deepspeed.absent")
    assert found == {*own}


def test_helpers_of_scripts() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with deepspeed.OnDevice(dtype=torch.half, device="meta"):
        inside = nn.Linear(2, 2)
    assert (inside.weight.is_meta, inside.weight.dtype, torch.empty(0).dtype) == (True, torch.half, torch.float32)
    with deepspeed.OnDevice(dtype=torch.half, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    config = deepspeed.DeepSpeedConfig(
        {"train_batch_size": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    )
    batch = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert batch == (4, 4, 1)
    assert (config.zero_enabled, config.zero_optimization_stage, config.fp16_enabled) == (True, 2, False)
    with pytest.raises(deepspeed.runtime.config.DeepSpeedConfigError, match="unknown key"):
        deepspeed.DeepSpeedConfig({"train_batchsize": 4})
    moved = deepspeed.runtime.utils.move_to_device({"a": [torch.ones(1), "b"]}, "meta")
    assert (moved["a"][0].is_meta, moved["a"][1]) == (True, "b")
    base = torch.arange(8.0)
    held = {"a": [base[:2], "b"], "c": (nn.Parameter(base[2:3]),)}
    batch = deepspeed.runtime.utils.move_to_device(OrderedDict(a=torch.ones(1)), "meta")
    accelerator = copy.deepcopy(deepspeed.get_accelerator())
    assert (batch["a"].device.type, accelerator.memory_allocated(0) > 0) == ("meta", True)
    copies = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(held)
    assert (copies["a"][0].tolist(), copies["a"][1], copies["c"][0].requires_grad) == ([0.0, 1.0], "b", False)
    assert (copies["a"][0].untyped_storage().nbytes(), type(copies["c"])) == (8, tuple)
    assert deepspeed.zero.register_external_parameter(inside, inside.weight) is None


def test_a_schedule_fills_a_rate_that_is_a_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate)
    schedule = lr_schedules.WarmupLR(optimizer, 0.125, 0.25, 2)
    assert optimizer.param_groups[0]["lr"] is rate
    found = []
    for _ in range(3):
        found.append(float(rate))
        schedule.step()
    assert found == [0.125, 0.125, 0.25]  # of the real package


def test_schedules_refuse_what_they_cannot_do(caplog: pytest.LogCaptureFixture) -> None:
    def adam() -> torch.optim.Optimizer:
        return torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.1)

    lr_schedules.WarmupCosineLR(adam(), 8, warmup_num_steps=4, warmup_type="other")
    assert "warmup_type 'other'" in caplog.text
    for kind, more in (("WarmupLR", {}), ("WarmupCosineLR", {"total_num_steps": 9})):
        with pytest.raises(ValueError, match="expected a whole number, found null"):
            getattr(lr_schedules, kind)(adam(), warmup_num_steps=None, **more)
    with pytest.raises(PlanError, match="OneCycle: it cycles the momentum, which the section scheduler alone"):
        lr_schedules.OneCycle(adam(), 0.1, 0.2)
    assert lr_schedules.OneCycle(adam(), 0.1, 0.2, cycle_momentum=False).get_lr() == [0.1]


def device() -> None:
    found = deepspeed.get_accelerator()
    assert found.device_count() == 1
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    assert found.device_count() == 2
    found.manual_seed_all(4)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(4))
    assert found.total_memory() > 0
    assert min(found.memory_reserved(), found.max_memory_reserved()) > 0
    with found.device(0):
        assert found.on_accelerator(found.pin_memory(torch.ones(1)))
    lines: list[str] = []
    deepspeed.logger.info = lambda *_: None  # type: ignore[method-assign]
    deepspeed.logger.log = lambda level, text, *more: lines.append(text % more)  # type: ignore[method-assign]
    deepspeed.runtime.utils.see_memory_usage("not asked for")
    deepspeed.runtime.utils.see_memory_usage("now", force=True)
    assert [line.split(" GiB")[0].rstrip(".0123456789") for line in lines] == ["[rank 0] now: process "]
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    answers = {name: lambda gib=gib: gib << 30 for gib, name in enumerate(names, start=1)}
    with mock.patch.multiple(torch.cuda, is_available=lambda: True, reset_peak_memory_stats=lambda: None, **answers):
        on_gpu = CurrentAccelerator()
        with mock.patch.object(utils, "get_accelerator", return_value=on_gpu):
            utils.see_memory_usage("then", force=True)
    assert lines[1] == ("[rank 0] then: allocated 1.00 GiB, at most 2.00 GiB; reserved 3.00 GiB, at most 4.00 GiB")


def test_the_accelerator_and_the_memory_of_a_cpu() -> None:
    run_alone(device)
