"""The sections offload_optimizer, offload_param and aio of a DeepSpeed configuration are mapped or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_runtime.deepspeed.config import DropinConfig, read_config
from zero_runtime.errors import PlanError
from zero_runtime.offload_plan import ALIGN_BYTES, OffloadPlan, ScratchSettings, Tier

FOLDER = Path("/drive/scratch")
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(FOLDER)}


def read(level: int, aio: dict[str, Any] | None = None, **zero: Any) -> DropinConfig:
    source = {"train_batch_size": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": level, **zero}}
    return read_config(source if aio is None else source | {"aio": aio}, 2)


@pytest.mark.parametrize(
    ("level", "zero", "found"),
    [
        (0, {}, OffloadPlan()),
        (0, {"offload_optimizer": {"device": "none"}, "offload_param": {}}, OffloadPlan()),
        (1, {"offload_optimizer": CPU}, OffloadPlan(optimizer=Tier.HOST)),
        (2, {"cpu_offload": True}, OffloadPlan(optimizer=Tier.HOST)),
        (2, {"cpu_offload": False}, OffloadPlan()),
        (3, {"cpu_offload": True, "cpu_offload_param": True}, OffloadPlan(Tier.HOST, Tier.HOST)),
        (3, {"offload_param": CPU}, OffloadPlan(params=Tier.HOST)),
        (3, {"offload_param": CPU, "offload_optimizer": {"ratio": 0.3}}, OffloadPlan(params=Tier.HOST)),
        (3, {"offload_optimizer": {**CPU, "ratio": 0.3}}, OffloadPlan(optimizer=Tier.HOST, ratio=0.3)),
        (1, {"offload_optimizer": NVME}, OffloadPlan(optimizer=Tier.NVME, scratch=ScratchSettings(FOLDER))),
        (
            3,
            {"offload_optimizer": NVME, "offload_param": {**CPU, "nvme_path": "/of/no/use"}},
            OffloadPlan(Tier.HOST, Tier.NVME, scratch=ScratchSettings(FOLDER)),
        ),
        (
            3,
            {"offload_optimizer": {**NVME, "ratio": 0.5}, "offload_param": {**NVME, "nvme_path": f"{FOLDER}/"}},
            OffloadPlan(Tier.NVME, Tier.NVME, 0.5, ScratchSettings(FOLDER)),
        ),
        (
            3,
            {"offload_optimizer": NVME, "offload_param": {"device": "nvme"}},
            OffloadPlan(Tier.NVME, Tier.NVME, scratch=ScratchSettings(FOLDER)),
        ),
    ],
)
def test_a_device_is_mapped_to_its_tier(level: int, zero: dict[str, Any], found: OffloadPlan) -> None:
    assert read(level, **zero).offload == found


@pytest.mark.parametrize(
    ("optimizer", "aio", "found"),
    [
        ({}, {}, {}),
        ({}, {"block_size": 1 << 20}, {"block_bytes": 1 << 20}),
        ({}, {"queue_depth": 8.0, "thread_count": 1}, {"requests": 8}),
        ({"pipeline_read": True}, None, {"ahead": 1}),
        ({"pipeline_read": False, "pipeline_write": True}, None, {"ahead": 1}),
        ({"pipeline_read": False}, None, {"ahead": 0}),
    ],
)
def test_block_size_queue_depth_and_pipelining_become_settings_of_the_scratch_file(
    optimizer: dict[str, Any], aio: dict[str, Any] | None, found: dict[str, int]
) -> None:
    scratch = ScratchSettings(FOLDER, **found)
    assert read(2, aio, offload_optimizer={**NVME, **optimizer}).offload.scratch == scratch


def test_keys_without_effect_for_the_device_are_reported() -> None:
    """The same keys, with a device for which they have an effect and with devices for which they have none."""
    aio = {"block_size": ALIGN_BYTES, "queue_depth": 1, "use_gds": False}
    tuned = {"nvme_path": "/x", "ratio": 1.0, "pipeline_read": True, "pipeline_write": True, "buffer_count": 5}
    optimizer, param = "zero_optimization.offload_optimizer.", "zero_optimization.offload_param."

    def idle(device: str) -> set[str]:
        sections = {"offload_optimizer": {**tuned, "device": device}, "offload_param": {"nvme_path": "/x"}}
        return set(read(3, aio, **sections).idle)

    always = {f"{param}nvme_path", f"{optimizer}buffer_count", "aio.use_gds"}
    of_nvme = {f"{optimizer}{name}" for name in ("nvme_path", "pipeline_read", "pipeline_write")}
    of_nvme |= {"aio.block_size", "aio.queue_depth"}
    assert idle("nvme") == always
    assert idle("cpu") == always | of_nvme
    assert idle("none") == always | of_nvme | {f"{optimizer}ratio"}


def test_a_ratio_that_applies_to_parameters_too_is_reported() -> None:
    (note,) = read(3, offload_optimizer={**CPU, "ratio": 0.25}, offload_param=CPU).notes
    assert note == "offload_optimizer.ratio holds for offload_param too: 0.25 of the parameters is offloaded"
    assert read(3, offload_optimizer={**CPU, "ratio": 0.25}).notes == ()
    assert read(3, offload_optimizer=CPU, offload_param=CPU).notes == ()


def test_a_configuration_published_for_nvme_offload_is_accepted() -> None:
    pool = {"pin_memory": True, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}
    states = {"pin_memory": True, "buffer_count": 4, "fast_init": False, "convert_grad_on_cpu": True}
    aio = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
    found = read(3, aio, offload_optimizer={**NVME, **states}, offload_param={**NVME, **pool})
    assert found.offload == OffloadPlan(Tier.NVME, Tier.NVME, scratch=ScratchSettings(FOLDER, 262144, 32))
    assert set(found.idle) == {
        *(f"zero_optimization.offload_optimizer.{name}" for name in states),
        *(f"zero_optimization.offload_param.{name}" for name in pool),
        *(f"aio.{name}" for name in ("thread_count", "single_submit", "overlap_events")),
    }


PATH = (
    "zero_optimization.offload_optimizer.nvme_path: expected a folder on a drive for the ranks' scratch files, found "
)
DEVICES = "expected 'none' or 'cpu' or 'nvme', found 'gpu': states are stored on the device, in host memory, or in a"
BOTH = {"offload_optimizer": NVME, "offload_param": NVME}


@pytest.mark.parametrize(
    ("level", "aio", "zero", "told"),
    [
        (3, {}, {"offload_param": {"device": "gpu"}}, f"zero_optimization.offload_param.device: {DEVICES} file"),
        (
            3,
            {},
            {"offload_optimizer": {"device": "gpu"}},
            f"zero_optimization.offload_optimizer.device: {DEVICES} file",
        ),
        (
            0,
            {},
            {"offload_optimizer": CPU},
            "zero_optimization.offload_optimizer.device: 'cpu' needs stage 1 or more, found stage 0; set it, or leave "
            "the section out",
        ),
        (
            2,
            {},
            {"offload_optimizer": {**CPU, "ratio": 0.3}},
            "zero_optimization.offload_optimizer.ratio: 0.3, a part of the optimizer's states, needs stage 3, found "
            "stage 2; set it, or leave the ratio out",
        ),
        (
            3,
            {},
            {"offload_optimizer": {**CPU, "ratio": 0}},
            "zero_optimization: offload.ratio must be above 0 and at most 1, found 0.0",
        ),
        (
            3,
            {},
            {"offload_optimizer": CPU, "offload_param": NVME},
            "zero_optimization: offload.params=nvme needs offload.optimizer=nvme, which is several times as large, "
            "found cpu",
        ),
        (3, {}, {"offload_optimizer": {"device": "nvme"}}, f"{PATH}none; name one"),
        (3, {}, {"offload_optimizer": {**NVME, "nvme_path": ""}}, f"{PATH}none; name one"),
        (
            3,
            {},
            {**BOTH, "offload_param": {**NVME, "nvme_path": "/other"}},
            f"{PATH}/other and {FOLDER}; here one file holds both, so name one folder",
        ),
        (
            2,
            {},
            {"cpu_offload": False, "offload_optimizer": CPU},
            "zero_optimization.cpu_offload: expected it or offload_optimizer, which replaced it, found both; keep "
            "offload_optimizer",
        ),
        (
            3,
            {"block_size": 100_000},
            BOTH,
            "aio: offload.block_bytes must be a multiple of 4,096 and above 0, which direct I/O needs, found 100000",
        ),
        (3, {"queue_depth": 0}, BOTH, "aio: offload.requests must be at least 1, found 0"),
        (
            3,
            {},
            {"offload_optimizer": {**CPU, "super_offload": True}},
            "zero_optimization.offload_optimizer.super_offload: expected False, found True: SuperOffload is not here; "
            "set it to false",
        ),
        (4, {}, BOTH, "zero_optimization.stage: expected 0, 1, 2 or 3, found 4"),
    ],
)
def test_each_invalid_setting_is_refused_with_one_message(
    level: int, aio: dict[str, Any], zero: dict[str, Any], told: str
) -> None:
    with pytest.raises(PlanError) as caught:
        read(level, aio, **zero)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [told]


def test_an_unsupported_device_is_reported_together_with_other_problems() -> None:
    """OffloadPlan.check is called with the ranks' own device, here one for which offload is not supported."""
    config = {"train_batch_size": 9, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    with pytest.raises(PlanError) as caught:
        read_config(config, 2, "mps")
    assert "zero_optimization: offload: expected a CPU or a CUDA device, found mps" in str(caught.value)
    assert "train_batch_size: expected a multiple of" in str(caught.value)
