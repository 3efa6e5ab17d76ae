"""Defaults and schedules are DeepSpeed's: recorded values of 0.19.8, and those of the package where it is installed.

Every default that differs is in DIFFERS or UNSET, with the reason.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreign.real_values import CASES, RECORDED, STEPS, Seen, groups_of, real_defaults, real_rates, seen
from zero_runtime.deepspeed.config import DropinConfig, read_config
from zero_runtime.deepspeed.groups import groups_of_optimizer
from zero_runtime.deepspeed.schedule_section import choose_schedule
from zero_runtime.deepspeed.schedules import JsonSchedule
from zero_runtime.deepspeed.schema import Reader

KNOWN = json.loads(RECORDED.read_text())
DEFAULTS: dict[str, Any] = KNOWN["defaults"]

with_the_package = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: its recorded values are compared"
)

# Keys whose default there means something else here.
DIFFERS = {
    "aio.block_size": "1 MiB there; requests of 4 MiB are what the runtime's own scratch file was measured with",
    "aio.queue_depth": "8 there; the runtime has 4 reads and 4 writes in flight, which changes no number",
    "zero_optimization.offload_optimizer.pipeline_read": "false there; updates overlap with the disk if not given",
    "zero_optimization.offload_optimizer.pipeline_write": "false there; as pipeline_read",
    "zero_optimization.leaf_module": "the experts of three models there; here none are marked without the key",
}
# Keys with an effect here that have no value there: what that means there, and here.
UNSET = {
    "communication_data_type": "the model's dtype there; fp32 here, so that sums are not rounded",
    "data_types.grad_accum_dtype": "the model's dtype there; fp32 here, so that sums are not rounded",
    "data_types.param_dtype": "the dtype that fp16 and bf16 say, there and here",
    "data_types.buffer_dtype": "buffers keep their dtype, there and here",
    "gradient_accumulation_steps": "follows from the batch sizes, or is 1, there and here",
    "steps_per_print": "nothing is printed, there and here",
    "train_batch_size": "follows from the other sizes, there and here",
    "train_micro_batch_size_per_gpu": "follows from the other sizes, there and here",
    "scheduler.WarmupLR.warmup_max_lr": "each group's own rate, there and here (the schedules below)",
    "scheduler.OneCycle.cycle_second_step_size": "cycle_first_step_size, there and here (the schedules below)",
    "scheduler.OneCycle.cycle_second_stair_count": "cycle_first_stair_count, there and here (the schedules below)",
    "zero_optimization.offload_param": "no section, there and here",
    "zero_optimization.offload_optimizer": "no section, there and here",
    "zero_optimization.offload_param.nvme_path": "no folder there; nvme needs one here",
    "zero_optimization.offload_optimizer.nvme_path": "no folder there; nvme needs one here",
    "zero_optimization.cpu_offload": "an older name, there and here",
    "zero_optimization.cpu_offload_param": "an older name, there and here",
    "zero_optimization.zenflow": "not here",
}
REFUSED = {"optimizer.Lamb.max_grad_norm": "an error there too: it is gradient_clipping"}
NEEDED = {
    "WarmupDecayLR": {"total_num_steps": 50},
    "WarmupCosineLR": {"total_num_steps": 50},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
}
NVME = {"device": "nvme", "nvme_path": "/x"}


def test_the_recorded_values_are_of_one_version() -> None:
    assert KNOWN["version"] == "0.19.8"


@with_the_package
def test_the_recorded_defaults_are_those_of_the_package() -> None:
    assert real_defaults() == DEFAULTS


@with_the_package
def test_the_recorded_rates_are_those_of_the_package() -> None:
    assert real_rates() == KNOWN["rates"]


def place_of(path: str) -> tuple[dict[str, Any], list[str]]:
    """A configuration in which the key has an effect, and the names that lead to it."""
    section, *inner = path.split(".")
    base: dict[str, Any] = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    if section in ("optimizer", "scheduler"):
        params = copy.deepcopy(NEEDED.get(inner[0], {}))
        return base | {section: {"type": inner[0], "params": params}}, [section, "params", inner[1]]
    if section in ("fp16", "bf16") and inner != ["enabled"]:
        base[section] = {"enabled": True}
    if path.startswith(("zero_optimization.offload", "aio")) and inner[-1] != "device":
        base["zero_optimization"] = {"stage": 3, "offload_param": {**NVME}, "offload_optimizer": {**NVME}}
    elif section == "zero_optimization" and inner != ["stage"]:
        base["zero_optimization"] = {"stage": 3}
    return base, path.split(".")


def read(config: dict[str, Any]) -> DropinConfig:
    """What trains: without the sentences about it, and with the schedule of a group."""
    found = read_config(config, 2)
    schedule: Any = found.schedule and found.schedule(0.25)
    return replace(found, schedule=schedule, idle=(), notes=(), older={})


@pytest.mark.parametrize(
    "path", [path for path, value in DEFAULTS.items() if value is not None and path not in REFUSED]
)
def test_a_key_at_its_default_trains_as_without_the_key(path: str) -> None:
    base, names = place_of(path)
    given = copy.deepcopy(base)
    inside = given
    for name in names[:-1]:
        inside = inside.setdefault(name, {})
    inside[names[-1]] = DEFAULTS[path]
    assert (read(given) == read(base)) == (path not in DIFFERS)


def test_every_key_without_a_value_is_without_effect_or_told() -> None:
    told = []
    for path in (path for path, value in DEFAULTS.items() if value is None and path not in UNSET):
        base, names = place_of(path)
        inside = base
        for name in names[:-1]:
            inside = inside.setdefault(name, {})
        inside[names[-1]] = "auto"  # refused for every key that has an effect
        read_config(base, 2)
        told.append(path)
    assert told
    assert set(DIFFERS) | set(UNSET) | set(REFUSED) <= set(DEFAULTS)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_schedules_set_the_rates_and_betas_of_each_group(index: int) -> None:
    """Of two machines the last bits of log and cos may differ (2^-52 of their value), and at most 8 roundings follow;
    a difference of two rates loses none of them, because it is at most 10 times its result here."""
    expected: list[Seen] = KNOWN["rates"][str(index)]
    kind, params, rates = CASES[index]
    optimizer = torch.optim.AdamW(groups_of(rates))
    reader = Reader()
    chosen = choose_schedule({"type": kind, "params": params}, reader)
    assert chosen is not None, reader.problems
    model = torch.nn.ParameterList(param for group in optimizer.param_groups for param in group["params"])
    chosen, _, _ = groups_of_optimizer(model, optimizer).fitted_to(chosen)
    schedule = JsonSchedule(optimizer, chosen)
    found = [seen(optimizer)]
    for _ in range(STEPS - 1):
        schedule.step()
        found.append(seen(optimizer))
    assert torch.tensor(found).flatten().tolist() == pytest.approx(torch.tensor(expected).flatten().tolist(), rel=1e-14)
    if importlib.util.find_spec("deepspeed") is not None:  # the same machine
        assert found == expected


def test_onecycle_leaves_the_momentum_of_an_optimizer_without_betas_alone() -> None:
    """As DeepSpeed does, which looks for betas."""
    reader = Reader()
    chosen = choose_schedule({"type": "OneCycle", "params": NEEDED["OneCycle"]}, reader)
    assert chosen is not None
    optimizer = torch.optim.SGD(groups_of([1.0]), momentum=0.5)
    model = SimpleNamespace(named_parameters=lambda: [("weight", optimizer.param_groups[0]["params"][0])])
    chosen, trained, (note,) = groups_of_optimizer(model, optimizer).fitted_to(chosen)  # type: ignore[arg-type]
    JsonSchedule(optimizer, chosen).step()
    assert trained.param_groups[0]["momentum"] == 0.5
    assert "the momentum of Sgd is not cycled" in note


def test_a_list_of_rates_has_one_for_each_group() -> None:
    reader = Reader()
    chosen = choose_schedule({"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}, reader)
    assert chosen is not None
    with pytest.raises(ValueError, match="one for each of the 3 parameter groups, found 2"):
        JsonSchedule(torch.optim.AdamW(groups_of([1.0, 2.0, 3.0])), chosen)
