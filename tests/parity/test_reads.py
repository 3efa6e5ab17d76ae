"""Every read of a weight, at every stage, in and between steps, gives this step's value or an error that names it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from harness.shapes import Base, Borrowed, Tied, build_shape, ids_of
from torch import nn

from zero_runtime.errors import CallOrderError, ParameterReadError
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

STAGES = (0, 1, 2, 3)
PRECISIONS = {
    "fp32": MixedPrecision(),
    "bf16": MixedPrecision("bf16"),
    "bf16 in fp32": MixedPrecision("bf16", compute="fp32"),  # gathered values are cast into the full copy
}
FEW = ("named_parameters", "references", "deepcopy")  # of WAYS
LR = 1e-2
Values = dict[str, torch.Tensor]
Way = Callable[[nn.Module, dict[str, nn.Parameter]], Values]


def make(stage: int, precision: MixedPrecision, kind: type[Base] = Borrowed) -> tuple[ZeroRuntime, Values]:
    """A runtime, and references to its model's parameters that were taken before the runtime was created."""
    model = build_shape(kind)
    before = dict(model.named_parameters())
    plan = ZeroPlan.from_stage(stage)
    return ZeroRuntime(model, plan, precision, AdamWConfig(), RuntimeSettings(), torch.device("cpu")), before


def train(runtime: ZeroRuntime, step: int) -> None:
    runtime.backward(runtime.model.loss_of(runtime(ids_of(step, dist.get_rank()))) / dist.get_world_size())
    runtime.step(LR)


def in_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(kept: Values) -> Values:
    """An exponential average that keeps no history: lerp by 1 gives the parameter's own bits."""
    mean = {name: torch.zeros_like(param) for name, param in kept.items()}
    torch._foreach_lerp_(list(mean.values()), list(kept.values()), 1.0)
    return mean


WAYS: dict[str, Way] = {
    "named_parameters": lambda model, _: {name: param.detach().clone() for name, param in model.named_parameters()},
    "cpu": lambda model, _: {name: param.cpu() for name, param in model.named_parameters()},
    "data": lambda model, _: {name: param.data.clone() for name, param in model.named_parameters()},
    "attributes": lambda model, kept: {name: model.get_parameter(name) + 0 for name in kept},
    "references": lambda _, kept: {name: param * 1 for name, param in kept.items()},
    "state_dict": lambda model, _: model.state_dict(),
    "modules": lambda model, _: {f"embed.{name}": value for name, value in model.embed.state_dict().items()},
    "state_dict_of_references": lambda model, _: {
        name: param.float() for name, param in model.state_dict(keep_vars=True).items()
    },
    "average": lambda _, kept: averaged(kept),
    "lists": lambda _, kept: {name: torch.tensor(param.tolist()) for name, param in kept.items()},
    "deepcopy": lambda model, _: dict(copy.deepcopy(model).named_parameters()),
    "deepcopy_of_a_parameter": lambda _, kept: {"norm.weight": copy.deepcopy(kept["norm.weight"])},
    "pickle": lambda model, _: dict(pickle.loads(pickle.dumps(model)).named_parameters()),
    "file": lambda model, _: in_file(model.state_dict()),
    "file_of_references": lambda _, kept: in_file(kept),
    "norms": lambda _, kept: dict(zip(kept, torch._foreach_norm(list(kept.values())), strict=True)),
}


def outcome(way: Way, runtime: ZeroRuntime, kept: dict[str, nn.Parameter]) -> str:
    """`current` if all values are right; otherwise the parameter that the error names, or the names of wrong values."""
    try:
        found = way(runtime.model, kept)
    except ParameterReadError as error:
        return next((name for name in kept if f"parameter {name!r}" in str(error)), f"no name: {error}")
    wanted = current(runtime)
    if way is WAYS["norms"]:
        wanted = {name: torch.linalg.vector_norm(value) for name, value in wanted.items()}
    wrong = [name for name, value in found.items() if not torch.equal(value.float(), wanted[name].float())]
    return f"wrong: {wrong}" if wrong or not found else "current"


def current(runtime: ZeroRuntime) -> Values:
    """The values that a forward computes with: the masters, rounded as the parameters are. Every rank must call it."""
    with runtime.full_params() as masters:
        narrow = torch.bfloat16 if runtime.precision.param == "bf16" else torch.float32
        return {name: value.to(narrow).to(runtime.model.get_parameter(name).dtype) for name, value in masters.items()}


def every_way() -> dict[tuple[int, str, str], str]:
    """Outcomes by stage, precision and way. Each way is the first read after a separate step, so that none relies on
    another one having waited for the gather."""
    found = {}
    for stage in STAGES:
        for label, precision in PRECISIONS.items():
            runtime, kept = make(stage, precision)
            shapes = {name: param.shape for name, param in kept.items()}
            for step, name in enumerate(WAYS if label == "fp32" else FEW):
                train(runtime, step)
                assert {name: param.shape for name, param in kept.items()} == shapes, "a shape is no value"
                found[stage, label, name] = outcome(WAYS[name], runtime, kept)
            runtime.close()
            whole = stage < 3 or runtime.collectives.world == 1  # what close leaves: the others stay guarded
            assert all((type(param) is nn.Parameter) is whole for param in kept.values())
    return found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_after_a_step_every_read_of_a_weight_gives_its_value_or_an_error_that_names_it(world: int) -> None:
    names = {name for name, _ in build_shape(Borrowed).named_parameters()}
    for found in run_ranks(every_way, world):
        for (stage, label, way), told in found.items():
            assert told in (names if stage == 3 else {"current"}), (stage, label, way, told)


# ---- in a step -------------------------------------------------------------------------------------------------------


def told_of(way: Way, runtime: ZeroRuntime, kept: dict[str, nn.Parameter], wanted: Values) -> str:
    try:
        read = way(runtime.model, kept)
    except ParameterReadError as error:
        return str(error)
    return "current" if all(torch.equal(read[name], wanted[name]) for name in read) else "wrong"


def in_a_step() -> dict[int, list[str]]:
    """Outcomes of the reads in hooks that hold references, in forward and in backward, by stage."""
    found: dict[int, list[str]] = {}
    for stage in STAGES:
        runtime, kept = make(stage, MixedPrecision())
        train(runtime, 0)
        wanted, told = current(runtime), found.setdefault(stage, [])

        def look(
            *_: Any, runtime: ZeroRuntime = runtime, kept: Any = kept, wanted: Any = wanted, told: Any = told
        ) -> None:
            told.extend(told_of(WAYS[way], runtime, kept, wanted) for way in ("references", "cpu", "attributes"))

        before = runtime.model.blocks[0].register_forward_pre_hook(look)
        after = runtime.model.blocks[0].register_forward_hook(look)
        seen = runtime.model.blocks[1].register_full_backward_hook(look)
        loss = runtime.model.loss_of(runtime(ids_of(1, dist.get_rank()))) / dist.get_world_size()
        for handle in (before, after):
            handle.remove()
        runtime.backward(loss)
        seen.remove()
        assert len(told) == 9
        runtime.step(LR)
        runtime.close()
    return found


def test_a_hook_that_holds_references_reads_this_steps_values_in_forward_and_backward() -> None:
    for by_stage in run_ranks(in_a_step, 2):
        for stage, told in by_stage.items():
            assert told[:6] == ["current"] * 6, stage
            # A unit's backward that has ended on this rank may still run on another, so no gather is safe.
            assert all(one == "current" or (stage == 3 and "full_params" in one) for one in told), stage


def wrong_calls() -> None:
    for stage in STAGES:
        runtime, kept = make(stage, MixedPrecision("bf16"))
        for step in range(2):  # in the second step the schedule knows the order of the units
            train(runtime, step)
            loss = runtime.model.loss_of(runtime(ids_of(0, dist.get_rank())))
            with pytest.raises(CallOrderError, match=r"call runtime\.backward\(loss\)"):
                loss.backward()
            assert all(param.grad is None for param in kept.values())
        # autograd.grad gives no parameter a gradient, so the runtime does not take part in this backward.
        x = torch.randn(2, 12, dtype=torch.bfloat16, requires_grad=True)
        block = runtime.model.blocks[0]
        (slope,) = torch.autograd.grad(block(x).sum(), x)
        assert bool(slope.abs().sum() > 0)
        train(runtime, 2)
        for write in (
            lambda param: param.mul_(2),
            lambda param: torch.mul(param, 2, out=param),
            lambda param: torch._foreach_zero_([param]),
            lambda param: setattr(param, "data", torch.zeros(param.shape)),
            lambda param: param.__setitem__(0, 0.0),
        ):
            with torch.no_grad(), pytest.raises(ParameterReadError, match=r"'norm\.weight'.*write=True"):
                write(kept["norm.weight"])
        with pytest.raises(ParameterReadError, match=r"'norm\.weight'"):
            nn.Module.double(runtime.model.norm)
        runtime.model.to("cpu")  # it is there already: nothing is read
        kept["norm.weight"].requires_grad_(True)
        train(runtime, 3)
        runtime.close()


def test_a_backward_or_write_that_bypasses_the_runtime_raises_and_training_continues() -> None:
    run_ranks(wrong_calls, 2)


def copies() -> None:
    runtime, _ = make(2, MixedPrecision())
    train(runtime, 0)
    copied = copy.deepcopy(runtime.model)
    train(runtime, 1)
    for module in copied.modules():
        assert type(module._parameters) is dict
    assert {type(param) for param in copied.parameters()} == {nn.Parameter}
    calls = len(runtime.collectives.journal.read()[1])
    copied.loss_of(copied(ids_of(0, 0))).backward()
    assert all(param.grad is not None for param in copied.parameters())
    copied.load_state_dict(copied.state_dict())
    assert len(runtime.collectives.journal.read()[1]) == calls, "a copy has nothing to do with the runtime"
    runtime.close()


def test_a_deep_copy_is_a_plain_model_that_trains_without_the_runtime() -> None:
    run_ranks(copies, 2)


def one_rank_alone() -> None:
    """Only rank 0 reads: a read that gathered would hang or mix up the ranks' messages."""
    for stage in (0, 1, 2):
        runtime, kept = make(stage, MixedPrecision())
        for step in range(3):
            train(runtime, step)
            if dist.get_rank() == 0:
                assert len(runtime.model.state_dict()) > 0
                sum(float(param.detach().sum()) for param in kept.values())
                with torch.no_grad():
                    runtime(ids_of(step, 0))
        runtime.close()


def test_a_single_rank_may_read_and_evaluate_if_full_parameters_are_kept() -> None:
    run_ranks(one_rank_alone, 2)


# ---- parts of a model ------------------------------------------------------------------------------------------------


def part_calls() -> dict[tuple[int, str], bool]:
    """Whether parts called separately equal the plain model's, before and after a step, with and without no_grad."""
    found = {}
    for stage in STAGES:
        runtime, _ = make(stage, MixedPrecision(), Tied)
        for step in range(2):
            with runtime.full_params() as values:
                plain = build_shape(Tied)
                plain.load_state_dict(values, strict=False)
            with torch.no_grad():
                for name, call in PARTS.items():
                    found[stage, f"{name}, step {step}"] = torch.equal(call(runtime.model), call(plain))
            # All parts and the full model in one graph; the embedding is called again at the end.
            losses = []
            for model in (plain, runtime.model):
                loss = sum((call(model).square().mean() for call in PARTS.values()), model.loss_of(model(ids_of(0, 0))))
                loss = loss + PARTS["embedding"](model).square().mean()
                losses.append(loss)
            assert torch.equal(losses[0], losses[1])
            losses[0].backward()
            runtime.backward(losses[1] / dist.get_world_size())
            for name, param in plain.named_parameters():
                found[stage, f"gradient of {name}, step {step}"] = torch.equal(
                    runtime.full_grad(name), torch.zeros_like(param) if param.grad is None else param.grad
                )
            runtime.step(LR)
            whole = [unit.name for unit in runtime.units if unit.parameters.unsharded_param.untyped_storage().size()]
            assert stage < 3 or whole == [], "what was lent to a part is released by a step"
        runtime.close()
    return found


PARTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "embedding": lambda model: model.embed(ids_of(0, 0)),
    "head": lambda model: model.head(torch.ones(2, 12)),
    "norm": lambda model: model.norm(torch.ones(2, 12) * torch.arange(12.0)),
    "block": lambda model: model.blocks[1](torch.ones(2, 12)),
    "part of a block": lambda model: model.blocks[1].up(torch.ones(2, 12)),
}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_separately_called_part_has_the_outputs_and_gradients_of_the_plain_model(world: int) -> None:
    for found in run_ranks(part_calls, world):
        assert [case for case, same in found.items() if not same] == []


def released_parts() -> None:
    runtime, _ = make(3, MixedPrecision(), Tied)
    model = runtime.model

    def whole() -> set[str]:
        return {unit.name for unit in runtime.units if unit.parameters.unsharded_param.untyped_storage().size()}

    with torch.no_grad():
        for _ in range(3):
            for block in model.blocks:
                block.up(torch.ones(2, 12))
                assert len(whole()) == 1, "one part's units at a time"
        model(ids_of(0, 0))
    assert whole() == set()
    # A read outside any call is refused, even right after a call that read the same parameter.
    with pytest.raises(ParameterReadError, match=r"'norm\.weight'"):
        model.norm.weight.sum()
    runtime.close()


def test_units_read_by_a_part_are_released_after_a_call_of_another_part_or_the_full_model() -> None:
    run_ranks(released_parts, 2)
