"""Energy is what counters say: of a GPU by a stand-in for NVML, of processors by files as Linux has them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from orchestrator.rounds.recorded import Round
from orchestrator.wings.energy import Energy, EnergyMeter, gpu_counters, package_counters

UUID = "GPU-11111111-2222-3333-4444-555555555555"


class FakeNvml(ModuleType):
    """NVML with one GPU, whose counter is `millijoules`; None: the GPU has no counter."""

    class NVMLError(Exception):
        pass

    def __init__(self, millijoules: int | None = 5_000) -> None:
        super().__init__("pynvml")
        self.millijoules = millijoules

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise self.NVMLError("Not Found")
        return f"handle of {uuid}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == f"handle of {UUID}"
        if self.millijoules is None:
            raise self.NVMLError("Not Supported")
        return self.millijoules


def test_the_energy_of_a_gpu_is_the_difference_of_its_counter_in_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = EnergyMeter(gpu_counters(UUID))
    meter.begin()
    nvml.millijoules = 17_500
    assert meter.end() == {UUID: 12.5}
    meter.begin()
    nvml.millijoules = 20_000
    assert meter.end() == {UUID: 2.5}


def test_a_gpu_without_a_counter_and_a_machine_without_nvml_have_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(None))
    assert gpu_counters(UUID) == []
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert gpu_counters("GPU-0") == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_counters(UUID) == []


def test_a_counter_that_fails_later_leaves_the_energy_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = EnergyMeter(gpu_counters(UUID))
    meter.begin()
    nvml.millijoules = None
    assert meter.end() == {}
    nvml.millijoules = 9_000
    meter.begin()
    nvml.millijoules = 8_000  # the driver was loaded again
    assert meter.end() == {}


def package(powercap: Path, number: int, microjoules: str, name: str = "") -> Path:
    folder = powercap / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name or f'package-{number}'}\n")
    (folder / "max_energy_range_uj").write_text("1000000000\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_the_energy_of_processors_is_that_of_all_packages_also_when_a_counter_starts_again(tmp_path: Path) -> None:
    first, second = package(tmp_path, 0, "999000000"), package(tmp_path, 1, "5000000")
    package(tmp_path, 2, "77", "psys")
    meter = EnergyMeter(package_counters(tmp_path))
    meter.begin()
    first.write_text("3000000")
    second.write_text("5500000")
    assert sorted(meter.end().values()) == [0.5, 4.0]


def test_packages_that_cannot_all_be_read_have_no_energy(tmp_path: Path) -> None:
    package(tmp_path, 0, "1000000")
    package(tmp_path, 1, "")
    assert package_counters(tmp_path) == []
    assert package_counters(tmp_path / "missing") == []


def test_ranks_that_share_a_counter_count_it_once_and_one_without_leaves_the_sum_unknown() -> None:
    assert EnergyMeter.of_all([{"a": 2.0}, {"b": 3.0}]) == 5.0
    assert EnergyMeter.of_all([{"host package-0": 2.0}, {"host package-0": 2.1}]) == 2.1
    assert EnergyMeter.of_all([{"a": 2.0}, {}]) is None
    assert EnergyMeter.of_all([]) is None
    assert EnergyMeter().end() == {}


def test_the_energy_of_a_round_is_divided_by_all_of_its_steps_and_unknown_without_counters() -> None:
    steps, of_ranks = [9.0], iter([[{"a": 4.0}, {"b": 2.0}], [{"a": 4.0}, {}]])
    measurement = SimpleNamespace(readings=SimpleNamespace(step_s=steps))
    collectives = SimpleNamespace(gather_objects=lambda mine: next(of_ranks))
    runtime = SimpleNamespace(device=torch.device("cpu"), collectives=collectives)
    listener = Energy(SimpleNamespace(measurement=measurement, runtime=runtime))  # type: ignore[arg-type]
    for number, joules in ((1, 2.0), (2, None)):
        one = Round(number, 0.0, [])
        listener.before_round()
        steps += [1.0] * 3
        listener.after_round(one)
        assert one.joules_per_step == joules
