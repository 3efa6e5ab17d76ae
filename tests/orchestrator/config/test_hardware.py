"""Descriptions of hardware: the files of conf/hardware agree with themselves, and odd ones are refused with a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.hardware import AUTO, GpuNode
from orchestrator.config.strict import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "conf" / "hardware"
NODES = {file.stem: GpuNode(**yaml.safe_load(file.read_text())) for file in sorted(FOLDER.glob("*.yaml"))}
DESCRIBED = {name: node for name, node in NODES.items() if name != AUTO}
# Memory by the data sheet, in GB of 10^9 bytes or in GiB: makers use either and call both GB.
SOLD_GB = {
    **{"v100_16gb": 16, "v100_32gb": 32, "t4": 16, "a10": 24, "a100_40gb": 40, "a100_80gb": 80, "l40s": 48},
    **{"h100_80gb": 80, "h200": 141, "b200": 192, "rtx_3090": 24, "rtx_4090": 24, "mi300x": 192},
}


def test_the_common_gpus_are_described_and_auto_describes_nothing() -> None:
    assert set(DESCRIBED) == set(SOLD_GB)
    assert NODES[AUTO] == GpuNode()
    assert not GpuNode().is_described


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_file_has_its_own_name_and_names_the_source_of_its_memory(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert DESCRIBED[name].name == name
    assert DESCRIBED[name].is_described
    assert "# Source" in text
    (memory,) = [line for line in text.splitlines() if line.startswith("memory_mib")]
    assert "#" in memory


@pytest.mark.parametrize("name", DESCRIBED)
def test_memory_is_a_little_below_what_the_data_sheet_says(name: str) -> None:
    node = DESCRIBED[name]
    assert node.memory_bytes is not None
    # ECC without memory of its own takes 1/16 (T4, A10, L40S); the driver takes some 100 MiB more.
    assert (
        0.9 < node.memory_bytes / (SOLD_GB[name] << 30) <= 1 or 0.9 < node.memory_bytes / (SOLD_GB[name] * 10**9) <= 1
    )


@pytest.mark.parametrize("name", DESCRIBED)
def test_peaks_are_dense_so_that_half_the_bits_are_at_most_about_twice_as_fast(name: str) -> None:
    node = DESCRIBED[name]
    assert node.fp16_tflops is not None
    assert node.bf16_tflops in (None, node.fp16_tflops)
    for slow, fast in (("tf32", "fp16"), ("bf16", "fp8")):
        low, high = node.tflops(slow), node.tflops(fast)
        if low is not None and high is not None:
            assert high / low == pytest.approx(2, rel=0.02)  # a figure with sparsity would make it 1 or 4


@pytest.mark.parametrize("name", DESCRIBED)
def test_links_are_no_faster_than_what_they_connect(name: str) -> None:
    node = DESCRIBED[name]
    assert node.memory_gb_per_s is not None
    assert node.link_gb_per_s is not None
    assert node.host_link_gb_per_s is not None
    assert node.memory_gb_per_s > node.link_gb_per_s >= node.host_link_gb_per_s
    assert node.host_link_gb_per_s > (node.network_gb_per_s or 0)


def test_dtypes_that_a_gpu_lacks_are_known_and_an_empty_description_claims_nothing() -> None:
    lacking = {name: {dtype for dtype in ("tf32", "bf16", "fp8") if node.lacks(dtype)} for name, node in NODES.items()}
    assert lacking["v100_32gb"] == lacking["t4"] == {"tf32", "bf16", "fp8"}
    assert lacking["a100_40gb"] == {"fp8"}
    assert lacking["h200"] == lacking["mi300x"] == lacking[AUTO] == set()
    assert not any(node.lacks("fp32") for node in NODES.values())  # B200's peak in fp32 is only not known
    assert not GpuNode("mine", gpus=2).lacks("bf16")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"gpus": 4}, "hardware.name=auto is this machine and has no hardware.gpus, found 4 +fix: hardware.gpus=null"),
        ({"memory_mib": 4}, "hardware.name=auto is this machine and has no hardware.memory_mib"),
        ({"name": "mine"}, "hardware=mine needs hardware.gpus, found null +fix: hardware.gpus=8"),
        ({"name": "mine", "gpus": 0}, "hardware.gpus must be at least 1, found 0 +fix: hardware.gpus=8"),
        ({"name": "mine", "gpus": 1, "bf16_tflops": 0.0}, "hardware.bf16_tflops must be above 0, or null"),
        ({"name": "mine", "gpus": 1, "host_memory_gib": -1.0}, "hardware.host_memory_gib must be above 0, or null"),
        ({"name": "", "gpus": 1}, "hardware.name must be the name of the hardware, or auto"),
    ],
)
def test_an_odd_description_is_refused_with_a_fix(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")) as caught:
        GpuNode(**values)
    assert len(caught.value.broken) == 1
    assert caught.value.broken[0].fix


def test_memory_is_converted_to_bytes() -> None:
    node = GpuNode("mine", gpus=1, memory_mib=3, host_memory_gib=1.5)
    assert (node.memory_bytes, node.host_bytes) == (3 << 20, 3 << 29)
    assert GpuNode().memory_bytes is GpuNode().host_bytes is None


def test_this_machine_may_have_a_price_and_no_other_key() -> None:
    assert GpuNode(price_per_hour=0.5, currency="EUR").price_per_hour == 0.5
    assert not GpuNode(price_per_hour=0.5).is_described
    with pytest.raises(ConfigError) as caught:
        GpuNode(price_per_hour=-1.0, currency="", gpus=2)
    assert [one.fix for one in caught.value.broken] == [
        ("hardware.price_per_hour=null",),
        ("hardware.currency=null",),
        ("hardware.gpus=null",),
    ]
