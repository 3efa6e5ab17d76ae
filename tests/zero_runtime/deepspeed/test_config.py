"""A DeepSpeed configuration is mapped, or refused with the reason and the fix; no key is silently ignored."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero_runtime.deepspeed.config import read_config
from zero_runtime.deepspeed.keys import HOMES, TOP
from zero_runtime.errors import PlanError
from zero_runtime.offload_plan import OffloadPlan
from zero_runtime.optim.configs import (
    AdamConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OneBitAdamConfig,
    SgdConfig,
    TorchConfig,
)
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.optim.lr_schedule import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.wire import EXACT, Wire


def config(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "gradient_clipping": 0.0, **more}


def zero(level: int, **more: Any) -> dict[str, Any]:
    return config(zero_optimization={"stage": level, **more})


def problems(source: Any, world: int = 2) -> list[str]:
    with pytest.raises(PlanError) as caught:
        read_config(source, world)
    return str(caught.value).splitlines()[1:]


def test_without_its_key_gradients_are_clipped_at_1_as_in_deepspeed_0_19_and_it_is_said() -> None:
    read = read_config({"train_batch_size": 8}, 2)
    assert read.clip_norm == 1.0
    (note,) = read.notes
    assert note.startswith("gradient_clipping is not given: gradients are clipped at a norm of 1.0, as in DeepSpeed")
    assert read_config(config(), 2).notes == ()
    assert read_config(config(gradient_clipping=0.5), 2).clip_norm == 0.5


def test_keys_of_newer_versions_are_known() -> None:
    """Those of DeepSpeed 0.19.8 that 0.16 did not have, with values that describe what holds here."""
    read = read_config(
        zero(2, compute_grad_norm=False, parameter_alignment=True, allgather_sequential=True)
        | {
            **{"disable_python_gc": True, "log_level": "info", "managed_gradient_accumulation": True},
            **{"gradient_allreduce_op": "mean", "zero_allow_untested_optimizer": 1, "bf16": {"enabled": 1}},
            "data_types": {"param_dtype": "bf16", "buffer_dtype": "fp32", "keep_in_fp32_modules": ["bias"]},
        },
        2,
    )
    assert (read.precision.param, read.fp32_buffers, read.notes) == ("bf16", True, ())
    assert {"zero_optimization.compute_grad_norm", "zero_allow_untested_optimizer", "log_level"} < set(read.idle)
    assert not read_config(config(data_types={"buffer_dtype": "fp32"}), 2).fp32_buffers  # as in DeepSpeed


def test_what_newer_versions_made_of_a_schedule_is_told() -> None:
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_stair_count": 3}
    (stairs,) = read_config(config(scheduler={"type": "OneCycle", "params": cycle}), 2).notes
    assert "stair counts have an effect, as in DeepSpeed 0.19.8" in stairs
    (own,) = read_config(config(scheduler={"type": "WarmupLR"}), 2).notes
    assert "rises to each group's own lr, as in DeepSpeed since 0.17.2 (before, to 0.001)" in own
    null = {"total_num_steps": 9, "warmup_max_lr": None}
    assert "own lr" in read_config(config(scheduler={"type": "WarmupDecayLR", "params": null}), 2).notes[0]
    assert read_config(config(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}), 2).notes == ()


def test_numbers_of_numpy_are_numbers() -> None:
    params = {"lr": np.float32(0.5), "betas": [np.float64(0.5), 0.75]}
    read = read_config(config(optimizer={"type": "AdamW", "params": params}), 2)
    assert read.optimizer is not None
    assert (read.optimizer.lr, type(read.optimizer.lr)) == (0.5, float)


def test_parameters_are_not_offloaded_below_stage_3_and_it_is_said() -> None:
    read = read_config(zero(2, offload_param={"device": "nvme", "nvme_path": "/x", "pin_memory": True}), 2)
    assert read.offload == OffloadPlan()
    (note,) = read.notes
    assert "offload_param has no effect at stage 2, as in DeepSpeed" in note
    assert read.idle == tuple(f"zero_optimization.offload_param.{key}" for key in ("pin_memory", "device", "nvme_path"))


def test_tuning_keys_are_accepted_and_reported_as_without_effect() -> None:
    read = read_config(
        zero(
            3,
            reduce_bucket_size=5e8,
            overlap_comm=True,
            stage3_max_live_parameters=1e9,
            offload_optimizer={"device": "none", "pin_memory": True},
        )
        | {"steps_per_print": 2000, "wall_clock_breakdown": False, "flops_profiler": {"enabled": False}}
        | {
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "elasticity": {"enabled": False},
        },
        2,
    )
    assert read.plan == ZeroPlan.from_stage(3)
    assert read.idle == (
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "elasticity",
    )
    sizes, others = read.without_effect()  # one line for all keys with one reason
    path = "zero_optimization."
    assert sizes == (
        f"without effect here: {path}reduce_bucket_size, {path}overlap_comm, {path}stage3_max_live_parameters: each "
        "block is one unit, which is gathered one ahead, reduced and updated as a whole"
    )
    assert others.startswith("without effect here: zero_optimization.offload_optimizer.pin_memory, zero_allow")


@pytest.mark.parametrize("key", ["prefetch_bucket_size", "stage3_prefetch_bucket_size"])
def test_a_prefetch_of_nothing_is_one_here_too(key: str) -> None:
    none = read_config(zero(3, **{key: 0}), 2)
    assert (none.prefetch, none.idle) == (0, ())
    for size in (5e7, "auto"):
        some = read_config(zero(3, **{key: size}), 2)
        assert (some.prefetch, some.idle) == (1, (f"zero_optimization.{key}",))


def test_the_configuration_in_full_has_settings_keys_and_what_has_no_effect() -> None:
    text = read_config(zero(2, overlap_comm=True) | {"activation_checkpointing": {"partition_activations": True}}, 2)
    lines = [line.strip() for line in text.text("mine").splitlines()]
    assert lines[0] == "mine:"
    assert {"batch = BatchSizes(train=8, micro=4, accumulation=1)", "clip_norm = None"} < set(lines)
    assert {"given: train_batch_size = 8", "given: zero_optimization.stage = 2"} < set(lines)
    first, second = lines[-2:]
    assert first.startswith("without effect here: zero_optimization.overlap_comm: each block is one unit")
    assert second.startswith(
        "without effect here: activation_checkpointing.partition_activations: each rank keeps those of its"
    )


@pytest.mark.parametrize("never", ["inf", "Infinity", math.inf])
def test_steps_per_print_may_be_never(never: object) -> None:
    assert read_config(config(steps_per_print=never), 2).idle == ()
    for found in ("often", 0):
        (told,) = problems(config(steps_per_print=found))
        assert f"steps_per_print: expected a number above 0, or inf, found {found!r}" in told


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_quantised_weights_and_gradients_are_gathers_in_int8_and_reductions_in_int4(
    weights: bool, gradients: bool
) -> None:
    given = {"zero_quantized_weights": weights, "zero_quantized_gradients": gradients}
    read = read_config(zero(3, **given), 2)
    assert read.wire == Wire("int8" if weights else None, "int4" if gradients else None)
    assert [note.partition(":")[0] for note in read.notes] == [name for name, value in given.items() if value]
    assert list(read.idle) == [f"zero_optimization.{name}" for name, value in given.items() if not value]


def test_one_bit_adam_says_how_it_differs_and_what_has_no_effect() -> None:
    given = {"freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl", "bias_correction": True}
    for level in (0, 1):
        read = read_config(
            zero(level, stage3_max_live_parameters=1) | {"optimizer": {"type": "OneBitAdam", "params": given}}, 2
        )
        assert [note.partition(":")[0] for note in read.notes] == ["OneBitAdam"] * (level + 1)
        assert "corrects none, whatever bias_correction says" in read.notes[0]
        names = ("cuda_aware", "comm_backend_name", "bias_correction")
        assert read.idle[1:] == tuple(f"optimizer.params.{name}" for name in names)
        assert read.wire == EXACT


@pytest.mark.parametrize("home", sorted(path for paths in HOMES.values() for path in paths))
def test_every_key_is_mapped_or_idle_or_refused_and_checks_its_type(home: str) -> None:
    """A value of a type that no key has is never silently accepted: it is refused, or its key is reported."""
    *outer, name = home.split(".")
    inside: dict[str, Any] = {name: object()}
    for part in reversed(outer):
        inside = {part: inside}
    told = "\n".join(problems({**config(), **inside}))
    assert f"{home}: " in told


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"train_batch_size": 12}, (12, 6, 1)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, (12, 2, 3)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, (12, 3, 2)),
        ({"train_micro_batch_size_per_gpu": 3}, (6, 3, 1)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, (24, 3, 4)),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4.0},
            (24, 3, 4),
        ),
    ],
)
def test_missing_batch_sizes_are_computed_from_the_given_ones(
    given: dict[str, int], found: tuple[int, int, int]
) -> None:
    batch = read_config(given, 2).batch
    assert (batch.train, batch.micro, batch.accumulation) == found


def test_precision_and_loss_scale_follow_their_sections() -> None:
    assert read_config(config(), 2).precision == MixedPrecision()
    read = read_config(config(bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}), 2)
    assert read.precision == MixedPrecision(param="bf16", accumulate="bf16")
    assert read.loss_scale == UNSCALED
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 3}
    read = read_config(
        config(
            fp16={**fp16, "consecutive_hysteresis": True, "min_loss_scale": 2, "auto_cast": True},
            communication_data_type="fp16",
        ),
        2,
    )
    assert read.precision == MixedPrecision(param="fp16", reduce="fp16")
    assert read.loss_scale == LossScaleRule(None, 12, 50, 3, True, 2)
    assert read.casts_inputs
    assert read_config(config(fp16={"enabled": True, "loss_scale": 128}), 2).loss_scale.static == 128.0


@pytest.mark.parametrize(
    ("kind", "params", "found", "lr"),
    [
        ("AdamW", {"lr": 3e-4, "weight_decay": 0.1}, AdamWConfig(0.9, 0.999, 1e-8, 0.1, no_decay=False), 3e-4),
        ("Adam", {}, AdamWConfig(0.9, 0.999, 1e-8, 0.0, no_decay=False), 1e-3),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, AdamConfig(0.9, 0.999, 1e-8, 0.1, no_decay=False), 1e-3),
        ("adamw", {"torch_adam": True}, AdamWConfig(0.9, 0.999, 1e-8, 0.01, no_decay=False), 1e-3),
        (
            "OneBitAdam",
            {"lr": 2e-4, "freeze_step": 400, "weight_decay": 0.1, "betas": [0.8, 0.999], "max_grad_norm": 0},
            OneBitAdamConfig(0.8, 0.999, 1e-8, 0.1, warmup_updates=400, no_decay=False),
            2e-4,
        ),
        ("onebitadam", {}, OneBitAdamConfig(0.9, 0.999, 1e-8, 0.0, warmup_updates=100_000, no_decay=False), 1e-3),
        ("Lion", {"betas": [0.8, 0.9]}, LionConfig(0.8, 0.9, 0.0, no_decay=False), 1e-3),
        ("Lamb", {"eps": 1e-6}, LambConfig(0.9, 0.999, 1e-6, 0.0, 0.01, 10.0, "rate", no_decay=False), 1e-3),
        (
            "Lamb",
            {"bias_correction": False, "max_coeff": 0.3, "min_coeff": 0},
            LambConfig(0.9, 0.999, 1e-8, 0.0, 0.0, 0.3, "none", no_decay=False),
            1e-3,
        ),
        ("Adam", {"bias_correction": False}, AdamWConfig(weight_decay=0.0, no_decay=False, corrects_bias=False), 1e-3),
        ("SGD", {"momentum": 0.9, "nesterov": True}, SgdConfig(0.9, 0.0, 0.0, True, no_decay=False), 1e-3),
        (
            "Muon",
            {},
            MuonConfig(
                **{"lr_scaling": "original", "ns_dtype": "fp32", "adamw_lr_ratio": 3e-4 / 0.02},
                **{"eps": 1e-10, "weight_decay": 0.0, "no_decay": False},
            ),
            0.02,
        ),
        ("Adagrad", {"eps": 1e-9}, TorchConfig("Adagrad", {"eps": 1e-9}, 0, no_decay=False), 1e-2),
        (
            "AdamW",
            {"amsgrad": True},
            TorchConfig("AdamW", {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": True}, 0.0, no_decay=False),
            1e-3,
        ),
    ],
)
def test_an_optimizer_has_the_constants_and_defaults_of_its_type(
    kind: str, params: dict[str, Any], found: object, lr: float
) -> None:
    chosen = read_config(config(optimizer={"type": kind, "params": params}), 2).optimizer
    assert chosen is not None
    assert (chosen.config, chosen.lr) == (found, lr)


@pytest.mark.parametrize(
    ("kind", "params", "found"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.5}, WarmupLR(warmup_max_lr=0.5)),
        ("WarmupDecayLR", {"total_num_steps": 100}, WarmupDecayLR(total_num_steps=100)),
        ("WarmupCosineLR", {"total_num_steps": 100}, WarmupCosineLR(0.25, 100)),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1}, OneCycle(0.1, 1)),
        ("LRRangeTest", {"lr_range_test_step_size": 7}, LRRangeTest(lr_range_test_step_size=7)),
    ],
)
def test_a_scheduler_section_gives_the_schedule_of_its_type(kind: str, params: dict[str, Any], found: object) -> None:
    schedule = read_config(config(scheduler={"type": kind, "params": params}), 2).schedule
    assert schedule is not None
    assert schedule(0.25) == found


def test_a_file_may_have_comments_and_trailing_commas(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '// one\n{"train_batch_size": 8, /* two\n */ "gradient_clipping": 0.5, # three\n"wandb": '
        '{"project": "http://a#b,}"},\n}'
    )
    read = read_config(path, 2)
    assert (read.batch.train, read.clip_norm, read.idle) == (8, 0.5, ("wandb",))
    assert read_config(str(path), 2) == read


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '{"fp16": {"enabled": true, "enabled": false}}',
            "expected each key once in an object, found enabled more than",
        ),
        ('{\n"a": 1 "b"}', "line 2: expected JSON"),
        ("[]", "expected an object {...}, found a list"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_config(path, 1)
    assert told in str(caught.value)


HJSON = "{\n  # as DeepSpeed reads it\n  train_batch_size: 8\n  gradient_clipping: 0.5\n}\n"


class _Hjson:
    """Stands for the package hjson, which the tests do not need: `loads` of HJSON above alone."""

    @staticmethod
    def loads(text: str, object_pairs_hook: Any) -> Any:
        if text != HJSON:
            raise {"{a": IndexError, "{a 1e999": OverflowError}.get(text, ValueError)(text)
        return object_pairs_hook([("train_batch_size", 8), ("gradient_clipping", 0.5)])


def test_hjson_is_read_where_its_package_is_and_else_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(HJSON)
    monkeypatch.setitem(sys.modules, "hjson", None)  # importing it raises ImportError
    assert "line 3: expected JSON, found: Expecting property name" in refused(path)
    assert "is read if the package hjson is installed" in refused(path)
    monkeypatch.setitem(sys.modules, "hjson", _Hjson)
    assert read_config(path, 2).clip_norm == 0.5
    for text in ("{a b c", "{a", "{a 1e999"):
        path.write_text(text)
        assert "line 1: expected JSON" in refused(path)


def test_a_missing_file_and_a_value_that_is_no_dict_are_refused() -> None:
    with pytest.raises(PlanError, match="found no file 'nowhere"):
        read_config("nowhere.json", 1)
    with pytest.raises(PlanError, match="JSON file, found a int"):
        read_config(3, 1)  # type: ignore[arg-type]


def test_a_complete_configuration_of_a_common_form_is_accepted() -> None:
    text = json.dumps(
        config(
            bf16={"enabled": True},
            optimizer={"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
            scheduler={
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 9},
            },
            activation_checkpointing={"partition_activations": False},
            tensor_parallel={"enabled": False, "tp_size": 4},
        )
    )
    assert read_config(json.loads(text), 2).optimizer is not None
    assert len(TOP) > 50


# ---- invalid configuration files ------------------------------------------------------------------------------------


def refused(source: Any) -> str:
    with pytest.raises(PlanError) as error:
        read_config(source, 2)
    return str(error.value)


def test_json_text_instead_of_a_path_is_refused(tmp_path: Path) -> None:
    for text in (json.dumps(config()), "\n" + json.dumps(config(), indent=2)):
        assert "found JSON itself; give json.loads of it" in refused(text)
    assert "found no file" in refused("missing.json")
    assert len(refused("x" * 5000)) < 500
    assert "'a\\x00b'" in refused("a\0b")
    assert "found no file" in refused(tmp_path)


def test_files_that_cannot_be_parsed_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"train_batch_size": 8, "a": "\xff"}')
    assert refused(path).startswith(f"config {str(path)!r}: expected a JSON file in UTF-8, found: 'utf-8' codec")
    path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    assert "expected JSON of a configuration, found: maximum recursion depth" in refused(path)
    path.write_text('{"train_batch_size": ' + "9" * 5000 + "}")
    assert refused(path).startswith(f"config {path}: expected JSON") or "expected a whole number" in refused(path)


def test_a_loss_scale_out_of_range_is_refused() -> None:
    assert "initial_scale_power must be from -127 to 127" in refused(
        {"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 2**200}}
    )
    with pytest.raises(PlanError, match="initial_scale_power must be from -127 to 127"):
        LossScaleRule(initial_power=1024)
    assert LossScaleRule(initial_power=127).start().scale == 2.0**127


def test_many_keys_are_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{" + ",".join(f'"key{number}": 1' for number in range(100_000)) + ', "key7": 2}')
    assert "found key7 more than once" in refused(path)
