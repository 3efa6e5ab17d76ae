"""Reading any DeepSpeed JSON gives a configuration or a PlanError of readable length."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import odd
import pytest
import torch.optim  # noqa: F401  here, and not while it is watched: torch's CUDA build asks ldconfig for libraries
from harness.attack_counts import Tally
from sandbox import TENSORS
from trials import Trial, Wrong, attack, numbers

from zero_runtime.deepspeed.config import read_config
from zero_runtime.deepspeed.keys import TOP
from zero_runtime.deepspeed.schema import Key
from zero_runtime.errors import PlanError

with suppress(
    ImportError
):  # what is no JSON is read by it where it is installed, and nothing is imported in the sandbox
    import_module("hjson")
DOOR = "DeepSpeed JSONs"

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


def change(found: dict[str, Any], chance: random.Random) -> None:
    """Changes one value, at any depth, or adds a key."""
    places = [found]
    while chance.random() < 0.7:
        inner = [value for value in places[-1].values() if isinstance(value, dict)]
        if not inner:
            break
        places.append(chance.choice(inner))
    place = places[-1]
    if place and chance.random() < 0.6:
        place[chance.choice(list(place))] = chance.choice(ODD)
    else:
        place[chance.choice(KEYS)] = chance.choice(ODD)


def file_of(found: dict[str, Any], chance: random.Random) -> bytes:
    """`found` as text, with additions such as comments that are not JSON, and possibly damaged."""
    text = json.dumps(found, indent=chance.choice((None, 1)))
    extras = ["// text", "/* text */", "# text", "/*", "//", ",", '"', "NaN", "-Infinity", '"a": 1, "a": 1,', "\ufeff"]
    for _ in range(chance.choice((0, 1, 3))):
        place = chance.randrange(len(text))
        text = text[:place] + chance.choice(extras) + text[place:]
    data = text.encode(chance.choice(("utf-8",) * 8 + ("utf-16", "latin-1")), errors="replace")
    return odd.changed(data, chance) if chance.random() < 0.7 else data


def read(source: Any) -> None:
    """Reads a configuration as an engine does when it starts."""
    try:
        found = read_config(source, 2)
        if found.schedule is not None:
            found.schedule(1e-3)
        found.loss_scale.start()
    except PlanError as error:
        text = str(error)
        if len(text.encode()) > 20_000:
            raise Wrong("unclear messages", f"{len(text)} signs: {text[:300]}") from None


@pytest.mark.parametrize("tried", numbers(120, 4000))
def test_any_deepspeed_configuration_is_read_or_refused(tried: list[int], tmp_path: Path, tally: Tally) -> None:
    path = tmp_path / "ds.json"

    def case(trial: Trial) -> None:
        chance = trial.chance
        config: Any = json.loads(json.dumps(WHOLE))
        for _ in range(chance.choice((1, 1, 2, 4))):
            change(config, chance)
        trial.shown = shortly(config)
        if chance.random() < 0.4 and can_be_written(config):
            path.write_bytes(file_of(config, chance))
            trial.shown = path.read_bytes()[:3000]
            trial.watched(lambda: read(path), may_import=TENSORS)
        else:
            trial.watched(lambda: read(config), may_import=TENSORS)

    attack(DOOR, tried, tally, case)


def can_be_written(found: Any) -> bool:
    try:
        json.dumps(found)
    except (ValueError, RecursionError):
        return False
    return True


def shortly(found: Any) -> str:
    try:
        return repr(found)[:3000]
    except (ValueError, RecursionError):  # a number with more digits than Python prints, or lists nested too deeply
        return "(it cannot be shown: try its number again)"
