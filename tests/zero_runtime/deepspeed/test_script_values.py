"""What DeepSpeed scripts read and set on parameters, and the modules that they mark, on two ranks against plain torch.

Values "of the real package" are those of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.plain_optimizers import AdamW
from harness.ranks import run_ranks
from harness.seed_loop import initialize_quietly
from harness.small_engine import CLIP, WIDTH, Small, at_level, drawn, mean_loss, trained
from torch import nn

import zero_runtime.deepspeed as deepspeed
from zero_runtime.deepspeed.leaf_modules import mark_leaf_modules
from zero_runtime.errors import CallOrderError, PlanError
from zero_runtime.unit_planner import ONE_UNIT


def from_all_ranks(value: torch.Tensor) -> list[torch.Tensor]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


# ---- utils.safe_get_... and safe_set_... ---------------------------------------------------------------------------


def set_and_used(folder: str) -> None:
    """What is set is what is read, whole and by rank, and the next step uses it, as a plain clipped AdamW does."""
    nvme = {"device": "nvme", "nvme_path": folder}
    cases = [*range(4), {"stage": 3, "offload_optimizer": nvme}, {"stage": 2, "offload_optimizer": nvme}]
    for case in cases:
        for local in (False, True):
            zero = case if isinstance(case, dict) else {"stage": case}
            check_set_values(at_level(0, zero_optimization=zero), local=local)


def check_set_values(config: dict[str, Any], *, local: bool) -> None:
    plain = Small()
    engine, *_ = initialize_quietly(model=Small(), config=config)
    engine.backward(mean_loss(engine))
    engine.step()
    expected = AdamW(trained(plain).values(), lr=0.01, weight_decay=0.0)
    for param in trained(plain).values():
        expected.state[param] = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
        expected.state[param]["step"] = torch.tensor(1.0)
    params = trained(engine.module)
    for place, (name, own) in enumerate(trained(plain).items()):
        values = {key: drawn(tuple(own.shape), 5 * place + at) for at, key in enumerate(("", "exp_avg", "exp_avg_sq"))}
        values["exp_avg_sq"].square_()
        own.data = values.pop("")
        set_value("fp32_param", params[name], own.data, local=local)
        for key, value in values.items():
            set_value("optimizer_state", params[name], value, key, local=local)
            expected.state[own][key].copy_(value)
    if config["zero_optimization"] in ({"stage": 0}, {"stage": 1}, {"stage": 2}):  # readable between steps
        assert all(torch.equal(params[name].detach(), own.detach()) for name, own in trained(plain).items())
    engine.backward(mean_loss(engine, 1))
    (mean_loss(plain, 1) / 2).backward()
    for place, (name, own) in enumerate(trained(plain).items()):
        own.grad = drawn(tuple(own.shape), 100 + place)
        set_value("grad", params[name], own.grad, local=local)
    norm = torch.stack([param.grad.double().square().sum() for param in trained(plain).values()]).sum().sqrt()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-12)  # fp64, in another order
    for param in trained(plain).values():
        param.grad *= (CLIP / norm).float()
    expected.step()
    for name, own in trained(plain).items():
        found = deepspeed.utils.safe_get_full_fp32_param(params[name])
        # One rounding of the clip's factor, whose norm was summed in another order.
        torch.testing.assert_close(found, own.detach(), rtol=1e-6, atol=1e-7, msg=f"{config} {name}")
    engine.destroy()


def set_value(what: str, param: nn.Parameter, value: torch.Tensor, *key: str, local: bool) -> None:
    """Set a value, whole or by rank, and read it back in both ways."""
    utils = deepspeed.utils
    own = getattr(utils, f"safe_get_local_{what}")(param, *key)
    assert own.dim() == 1
    sizes = [part.numel() for part in from_all_ranks(own)]
    start = 0 if sum(sizes) != value.numel() else sum(sizes[: dist.get_rank()])
    assert sum(sizes) in (value.numel(), 2 * value.numel())  # sharded, or whole on both ranks
    mine = value.reshape(-1)[start : start + own.numel()]
    if local:
        getattr(utils, f"safe_set_local_{what}")(param, mine, *key)
    else:  # the value of rank 0 counts
        getattr(utils, f"safe_set_full_{what}")(param, value if dist.get_rank() == 0 else value + 1, *key)
    assert torch.equal(getattr(utils, f"safe_get_local_{what}")(param, *key), mine), (what, key)
    assert torch.equal(getattr(utils, f"safe_get_full_{what}")(param, *key), value), (what, key)


def values_of_parameters() -> None:
    utils, fp16 = deepspeed.utils, {"enabled": True, "initial_scale_power": 4}
    for number in range(4):
        engine, *_ = initialize_quietly(model=Small(), config=at_level(number, fp16=fp16))
        params = dict(engine.module.named_parameters())
        engine.backward(mean_loss(lambda x, engine=engine: engine(x.half())))
        # As in the real package, a frozen parameter has none of these.
        assert utils.safe_get_full_fp32_param(params["frozen.bias"]) is None
        assert utils.safe_get_full_grad(params["frozen.bias"]) is None
        assert utils.safe_get_local_optimizer_state(params["frozen.bias"], "exp_avg") is None
        with pytest.raises(PlanError, match=r"'frozen\.bias': expected one that is trained, found a frozen one"):
            utils.safe_set_full_fp32_param(params["frozen.bias"], torch.zeros(WIDTH))
        with pytest.raises(PlanError, match=r"'first.bias': expected this rank's \d elements, found 99"):
            utils.safe_set_local_fp32_param(params["first.bias"], torch.zeros(99))
        with pytest.raises(PlanError, match=r"expected values of shape \[6\], found \[2\]"):
            utils.safe_set_full_grad(params["first.bias"], torch.zeros(2))
        with pytest.raises(PlanError, match="expected one of exp_avg, exp_avg_sq, found 'momentum'"):
            utils.safe_set_full_optimizer_state(params["first.bias"], torch.zeros(WIDTH), "momentum")
        engine.step()
        with pytest.raises(CallOrderError, match="after the step's last backward and before step"):
            utils.safe_get_local_grad(params["first.bias"])
        engine.destroy()


# ---- attributes of sharded parameters ------------------------------------------------------------------------------


def attributes() -> None:
    """ds_id and its like tell sharded parameters from whole ones, and their status is that of the moment."""
    Status, names = deepspeed.zero.ZeroParamStatus, ("ds_id", "ds_shape", "ds_numel", "ds_status")
    seen: list[Any] = []

    class Looking(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            seen.append(getattr(self.first.weight, "ds_status", None))
            return found

    for number in range(4):
        with deepspeed.zero.Init():
            model = Looking()
        ids = [param.ds_id for param in model.parameters()]
        assert {param.ds_status for param in model.parameters()} == {Status.NOT_AVAILABLE}
        assert model.second.bias.ds_shape == (WIDTH + 1,)
        engine, *_ = initialize_quietly(model=model, config=at_level(number))
        assert [deepspeed.zero.is_zero_param(param) for param in model.parameters()] == [number == 3] * 6
        assert [hasattr(model.first.weight, name) for name in names] == [number == 3] * 4
        with deepspeed.zero.GatheredParameters(model.first.weight):
            seen.append(getattr(model.first.weight, "ds_status", None))
        engine(torch.ones(1, WIDTH))
        if number == 3:
            assert [param.ds_id for param in model.parameters()] == ids == sorted(set(ids))
            assert model.first.weight.ds_numel == WIDTH * WIDTH
            assert model.first.weight.ds_status is Status.NOT_AVAILABLE
        engine.destroy()
        assert not hasattr(model.first.weight, "ds_id")
    assert seen == [None] * 6 + [Status.AVAILABLE] * 2


# ---- modules that are one unit -------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Each rank, and each step, takes another of two towers, as routed experts do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.towers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.towers[way](x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Towers(), nn.Linear(WIDTH, 1, bias=False)
        nn.init.ones_(self.head.weight)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.head(self.inner(x, way))


def different_ways() -> None:
    """Ranks that call different parts of a marked module train as one process that has both batches."""
    utils = deepspeed.utils
    for number in range(4):
        for marks in ([Towers], ["Around"], [nn.ModuleList], {"classes": "Towers"}, {"name_suffixes": ["towers"]}):
            model, plain = Around(), Around()
            config = at_level(number)
            if isinstance(marks, dict):
                config["zero_optimization"] = {**config["zero_optimization"], "leaf_module": marks}
            else:
                assert len(utils.set_z3_leaf_modules(model, marks)) == 1
            engine, *_ = initialize_quietly(model=model, config=config)
            assert len(marked(model)) == 1
            optimizer = AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
            for step in range(3):
                engine.backward(engine(torch.ones(1, WIDTH), (dist.get_rank() + step) % 2).mean())
                engine.step()
                optimizer.zero_grad()
                (sum(plain(torch.ones(1, WIDTH), way).mean() for way in (0, 1)) / 2).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
                optimizer.step()
            with engine.runtime.full_params() as values:
                for name, param in plain.named_parameters():
                    torch.testing.assert_close(values[name], param.detach(), rtol=1e-5, atol=1e-6)
            with pytest.raises(PlanError, match="expected a model before initialize, which reads the marks"):
                utils.set_z3_leaf_modules(model, [nn.Module])
            engine.destroy()


def marked(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, ONE_UNIT, False)]


def test_marks_are_set_and_returned_as_the_real_package_does() -> None:
    utils = deepspeed.utils
    for classes in ([Towers], ["Towers"], [f"{Towers.__module__}.{Towers.__qualname__}"]):
        model = Around()
        assert utils.set_z3_leaf_modules(model, classes) == [model.inner] == marked(model)
    model = Around()
    wanted = {"classes": ["No", "Towers"], "names": "inner.towers", "name_suffixes": ["none"]}
    assert mark_leaf_modules(model, wanted) == ["zero_optimization.leaf_module: the model has no module No, none"]
    assert marked(model) == [model.inner, model.inner.towers]
    model = Around()
    assert mark_leaf_modules(model, {"name_suffixes": ["towers"]}) == []
    assert marked(model) == [model.inner.towers]
    with pytest.raises(ValueError, match="expected modules of the classes"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])


def own_gradients() -> None:
    """Where the ranks' gradients are not summed yet, safe_get_full_grad gives this rank's, as the real package does."""
    for number, inside in ((0, False), (1, False), *((number, True) for number in range(4))):
        engine, *_ = initialize_quietly(model=Small(), config=at_level(number, gradient_accumulation_steps=2))
        plain = Small()
        for step in range(2):
            with engine.no_sync() if inside else nullcontext():
                engine.backward(mean_loss(engine, step))
            (mean_loss(plain, step) / 2).backward()
            if step and not inside:
                break  # at the boundary they are summed
            for name, param in trained(engine.module).items():
                assert torch.equal(deepspeed.utils.safe_get_full_grad(param), trained(plain)[name].grad), name
        engine.destroy()


CHECKS = (values_of_parameters, own_gradients, attributes, different_ways)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_parameters_and_marks_are_those_that_scripts_expect(check: Callable[[], None]) -> None:
    run_ranks(check, 2)


def test_the_next_step_uses_what_a_script_has_set(tmp_path: Path) -> None:
    run_ranks(set_and_used, 2, str(tmp_path))
