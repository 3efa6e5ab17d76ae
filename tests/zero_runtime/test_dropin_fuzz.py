"""Whatever a DeepSpeed JSON holds, reading it gives a configuration or a PlanError of readable length."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from zero_runtime.dropin.config import read_config
from zero_runtime.dropin.keys import TOP
from zero_runtime.dropin.schema import Key
from zero_runtime.errors import PlanError
from zero_runtime.loss_scaler import LossScaleRule

WHOLE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 100, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/drive", "ratio": 0.5, "pipeline_read": True},
        "offload_param": {"device": "cpu"},
    },
    "aio": {"block_size": 1048576, "queue_depth": 8},
    "communication_data_type": "fp32",
}
TYPES = ["SGD", "Lion", "Lamb", "Adam", "RMSprop", "Adagrad", "OneCycle", "LRRangeTest", "WarmupLR", "WarmupCosineLR"]
NUMBERS = [0, 1, -1, 2, 3, 0.5, 1e-320, 1e308, -1e308, 2**31, 2**63, 2**200, 2**2000, 10**5000, float("nan")]
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]
ODD = [None, True, False, "", "auto", "no such", "cpu", "nvme", "\ud800", "x" * 5000, [], {}, [1, 2], [[]], {"a": {}}]
ODD += [{"enabled": True}, {"type": 3}, {"params": []}, {"device": []}, float("inf"), DEEP, "\0", "0", *TYPES, *NUMBERS]


def keys_of(table: Any) -> list[str]:
    found: list[str] = []
    for name, key in table.items():
        found += [name, *(keys_of(key.table) if isinstance(key, Key) and key.table else [])]
    return found


KEYS = [*keys_of(TOP), "lr", "momentum", "cycle_min_lr", "cycle_max_lr", "decay_step_size", "lr_range_test_min_lr", "x"]


def change(found: dict[str, Any], rng: random.Random) -> None:
    """One value of it, at any depth, or a key more."""
    places = [found]
    while rng.random() < 0.7:
        inner = [value for value in places[-1].values() if isinstance(value, dict)]
        if not inner:
            break
        places.append(rng.choice(inner))
    place = places[-1]
    if place and rng.random() < 0.6:
        place[rng.choice(list(place))] = rng.choice(ODD)
    else:
        place[rng.choice(KEYS)] = rng.choice(ODD)


def read(source: Any) -> str:
    """What it is refused with; empty where it is read."""
    try:
        found = read_config(source, 2)
        if found.schedule is not None:
            found.schedule(1e-3)
        found.loss_scale.start()
    except PlanError as error:
        return str(error).encode().decode()
    return ""


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(500), id="short"), pytest.param(range(500, 20_000), marks=pytest.mark.full, id="long")]
)
def test_any_dict_is_read_or_refused(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        config = json.loads(json.dumps(WHOLE))
        for _ in range(rng.choice((1, 1, 2, 4))):
            change(config, rng)
        assert len(read(config)) < 20_000, seed


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(300), id="short"), pytest.param(range(300, 5000), marks=pytest.mark.full, id="long")]
)
def test_any_file_is_read_or_refused(seeds: range, tmp_path: Path) -> None:
    whole = json.dumps(WHOLE, indent=1).encode()
    path = tmp_path / "ds.json"
    for seed in seeds:
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.choice((1, 2, 6))):
            start = rng.randrange(len(data))
            what = rng.randrange(4)
            if what == 0:
                del data[start : start + rng.choice((1, 5, 50))]
            elif what == 1:
                data[start:start] = data[start : start + 30]
            else:
                data[start] = rng.choice(b'{}[]",:0e-\x00\xff/#\\') if what == 2 else rng.randrange(256)
        path.write_bytes(data)
        assert len(read(path)) < 20_000, seed


def refused(source: Any) -> str:
    with pytest.raises(PlanError) as error:
        read_config(source, 2)
    return str(error.value)


def test_json_in_the_place_of_its_path_is_told(tmp_path: Path) -> None:
    for text in (json.dumps(WHOLE), "\n" + json.dumps(WHOLE, indent=2)):
        assert "found JSON itself; give json.loads of it" in refused(text)
    assert "found no file" in refused("missing.json")
    assert len(refused("x" * 5000)) < 500
    assert "'a\\x00b'" in refused("a\0b")
    assert "found no file" in refused(tmp_path)


def test_files_that_no_reader_takes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"train_batch_size": 8, "a": "\xff"}')
    assert refused(path).startswith(f"config {str(path)!r}: expected a JSON file in UTF-8, found: 'utf-8' codec")
    path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    assert "expected JSON of a configuration, found: maximum recursion depth" in refused(path)
    path.write_text('{"train_batch_size": ' + "9" * 5000 + "}")
    assert refused(path).startswith(f"config {path}: expected JSON") or "expected a whole number" in refused(path)


def test_a_loss_scale_that_no_number_holds_is_refused() -> None:
    assert "initial_power: expected at most 127" in refused(
        {"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 2**200}}
    )
    with pytest.raises(PlanError, match="initial_power: expected at most 127"):
        LossScaleRule(initial_power=1024)
    assert LossScaleRule(initial_power=127).start().scale == 2.0**127


def test_many_keys_are_read_in_the_time_of_their_number(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{" + ",".join(f'"key{number}": 1' for number in range(100_000)) + ', "key7": 2}')
    assert "found key7 more than once" in refused(path)
