"""Configurations must be complete and valid, all mistakes are reported together, and they are written as plain data."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from orchestrator.config.schema import (
    AskedConfig,
    Device,
    Measure,
    MeasureKind,
    Model,
    Optimizer,
    ResolvedBatch,
    ResolvedResources,
    RunConfig,
    from_dict,
    to_dict,
)
from orchestrator.config.state_groups import Offload, Zero
from orchestrator.config.strict import ConfigError

TINY = Model("tiny", "llama", {"vocab_size": 256})
CONFIG = RunConfig(
    model=TINY,
    batch=ResolvedBatch(accumulation=2, global_size=16),
    resources=ResolvedResources(ranks=2, threads=1),
)


def test_a_config_survives_json_unchanged() -> None:
    assert from_dict(json.loads(json.dumps(to_dict(CONFIG)))) == CONFIG
    assert list(to_dict(CONFIG)["batch"]) == list(to_dict(AskedConfig(model=TINY))["batch"]), "records have one order"


def test_a_configuration_with_open_sizes_is_none_of_a_run() -> None:
    with pytest.raises(ConfigError, match=r"batch\.accumulation must be a whole number, found None"):
        from_dict(to_dict(AskedConfig(model=TINY)))


def test_all_linear_is_the_empty_list_of_targets_and_one_target_is_a_list() -> None:
    recorded = to_dict(CONFIG)
    for typed, targets in (("all-linear", []), (["all-linear"], []), ("q_proj", ["q_proj"])):
        recorded["adapter"]["targets"] = typed
        assert to_dict(from_dict(recorded))["adapter"]["targets"] == targets
    assert from_dict(recorded | {"adapter": {**recorded["adapter"], "targets": "all-linear"}}) == CONFIG


def test_enums_are_written_by_their_name() -> None:
    written = to_dict(CONFIG)
    assert written["precision"]["reduce"] == "fp32"
    assert written["resources"]["device"] == "auto"
    assert f"{Device.cuda}" == "cuda"


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CONFIG.zero.stage = 3  # type: ignore[misc]


def test_all_mistakes_are_reported_together() -> None:
    data = to_dict(CONFIG)
    data["zero"]["bogus"] = 1
    data["batch"] |= {"micro": 0, "seq": 0}
    data["precision"]["param"] = "fp8"
    data["measure"]["steps"] = "many"
    data["wide"] = {}
    del data["offload"]
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    told = str(caught.value)
    for word in ("zero.bogus", "batch.micro", "batch.seq", "precision.param", "measure.steps", "'wide'", "offload"):
        assert word in told
    assert len(caught.value.broken) == 7


@pytest.mark.parametrize("value", [True, 4.0, "4", None, [4]])
def test_only_integers_are_accepted_as_whole_numbers(value: object) -> None:
    data = to_dict(CONFIG)
    data["batch"]["micro"] = value
    with pytest.raises(ConfigError, match=r"batch\.micro must be a whole number"):
        from_dict(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "0.1"])
def test_only_finite_numbers_are_accepted_as_numbers(value: object) -> None:
    data = to_dict(CONFIG)
    data["optimizer"]["lr"] = value
    with pytest.raises(ConfigError, match=r"optimizer\.lr must be a number"):
        from_dict(data)


@pytest.mark.parametrize(
    ("group", "key", "value", "told"),
    [
        ("batch", "micro", 10**400, "batch.micro must be a whole number of at most 64 bits, found 1000"),
        ("batch", "micro", 16**5000, "a whole number of at most 64 bits, found one of type int, too long to show"),
        (
            "optimizer",
            "lr",
            16**5000,
            "optimizer.lr must be a number, of at most 3.4e+38, found one of type int, too long",
        ),
        (
            "optimizer",
            "weight_decay",
            1e300,
            "optimizer.weight_decay must be a number, of at most 3.4e+38, found 1e+300",
        ),
        ("tracking", "experiment", 16**5000, "must be text, or null, found one of type int, too long"),
        (
            "model",
            "config",
            {"a": [{"b": 2**64}]},
            "numbers of at most 64 bits, found {'a': [{'b': 18446744073709551616}]}",
        ),
        ("model", "config", {"a": 16**5000}, "model.config must be a mapping, of texts"),
        ("model", "config", {"a": b"x"}, "model.config must be a mapping, of texts"),
        ("model", "config", {"a": {1: 2, "b": 3}}, "model.config must be a mapping, of texts"),
    ],
    ids=[
        "400 digits",
        "6000 digits",
        "as a number",
        "not in fp32",
        "as text",
        "inside",
        "6000 digits inside",
        "bytes",
        "keys",
    ],
)
def test_values_that_a_record_cannot_store_are_refused(group: str, key: str, value: object, told: str) -> None:
    data = to_dict(CONFIG)
    data[group][key] = value
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    assert told in str(caught.value)


def test_an_integer_is_accepted_as_a_number_and_becomes_a_float() -> None:
    data = to_dict(CONFIG)
    data["optimizer"]["lr"] = 1
    lr = from_dict(data).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


def test_values_out_of_range_are_refused_with_the_key_and_a_fix() -> None:
    with pytest.raises(ConfigError, match=r"zero\.stage must be 0, 1, 2 or 3, found 4 +fix: zero\.stage=2"):
        Zero(stage=4)
    with pytest.raises(ConfigError) as caught:
        Optimizer(lr=-1.0, clip_norm=0.0)
    assert len(caught.value.broken) == 2
    with pytest.raises(ConfigError) as caught:
        Offload(ratio=2.0, block_mib=0, requests=0, ahead=-1)
    assert len(caught.value.broken) == 4
    with pytest.raises(ConfigError) as caught:
        Zero(stage=4, prefetch=-1, unit_numel=0)
    assert len(caught.value.broken) == 3


def test_null_switches_clipping_off() -> None:
    assert Optimizer(clip_norm=None).clip_norm is None


def test_an_evaluation_has_no_profile() -> None:
    with pytest.raises(ConfigError, match="training is profiled"):
        Measure(kind=MeasureKind.eval, profile=True)
