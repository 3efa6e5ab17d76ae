"""Each Triton kernel is launched on the device of its tensors, with the settings that keep the reference's bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from zero_runtime.kernels.registration import _sample
from zero_runtime.kernels.settings import Lion, Sgd

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install '.[dev]' on Linux)"
)


class Launches:
    """Replaces the kernels and torch.cuda.device_of: records each launch and the device that is current then."""

    def __init__(self) -> None:
        self.current: torch.device | None = None
        self.found: list[tuple[str, torch.device | None, dict[str, object]]] = []
        self.devices: list[torch.device] = []

    def kernel(self, name: str) -> Launched:
        return Launched(self, name)

    def device_of(self, tensor: torch.Tensor) -> Guard:
        return Guard(self, tensor.device)


class Launched:
    def __init__(self, launches: Launches, name: str) -> None:
        self._launches, self._name = launches, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **constants: object) -> None:
            self._launches.found.append((self._name, self._launches.current, constants))
            self._launches.devices += [one.device for one in args if isinstance(one, torch.Tensor)]

        assert grid[0] > 0
        return launch


class Guard:
    def __init__(self, launches: Launches, device: torch.device) -> None:
        self._launches, self._device = launches, device

    def __enter__(self) -> None:
        self._launches.current = self._device

    def __exit__(self, *_: object) -> None:
        self._launches.current = None


def _kernels(*modules: ModuleType) -> list[tuple[ModuleType, str]]:
    return [(module, name) for module in modules for name in vars(module) if name.endswith("_kernel")]


def test_every_launch_is_guarded_and_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_runtime.kernels.triton import moments, operations, streams, updates

    launches, kernels = Launches(), _kernels(moments, streams, updates)
    for module, name in kernels:
        monkeypatch.setattr(module, name, launches.kernel(name))
    monkeypatch.setattr(torch.cuda, "device_of", launches.device_of)
    _sample(operations, torch.device("cpu"))
    one, scale = torch.ones(5), torch.ones(())
    operations.lion_(one, one, one, scale, Lion(1e-2, 0.9, 0.98, 0.1).numbers)
    operations.sgd_(one, one, None, scale, Sgd(1e-2, 0.0, 0.0, 0.1, False, 2).numbers, False, False)
    operations.cast_copy_(one, one)
    operations.cast_copy_(one[:0], one[:0])  # nothing to launch
    assert {name for name, _, _ in launches.found} == {name for _, name in kernels}
    assert {device for _, device, _ in launches.found} == {torch.device("cpu")} == set(launches.devices)
    assert all(constants["enable_fp_fusion"] is False for _, _, constants in launches.found)
