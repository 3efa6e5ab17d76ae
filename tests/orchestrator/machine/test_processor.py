"""The 16-bit dtypes that a processor multiplies natively, and what precision.compute=auto stands for on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.schema import Device, Resources
from orchestrator.config.state_groups import Precision
from orchestrator.machine import hardware
from orchestrator.planning.rules.precision import computed_in
from orchestrator.planning.rules.scene import Scene
from zero_runtime.precision import MixedPrecision

PROCESSORS = {  # the line of /proc/cpuinfo; computed in with bf16 and with fp16 parameters
    "AVX2": ("flags\t\t: sse4_2 avx2 fma f16c", "fp32", "fp32"),
    "AVX-512 alone": ("flags\t\t: avx2 avx512f avx512bw avx512vl avx512dq", "fp32", "fp32"),
    "AVX512-BF16": ("flags\t\t: avx2 avx512f avx512_bf16", "bf16", "fp32"),
    "AMX": ("flags\t\t: avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8", "bf16", "fp16"),
    "arm64": ("Features\t: fp asimd asimdhp", "fp32", "fp16"),
    "arm64 with bf16": ("Features\t: fp asimd asimdhp sve bf16", "bf16", "fp16"),
    "unknown": ("", "fp32", "fp32"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_auto_computes_16_bit_parameters_in_fp32_unless_the_processor_multiplies_their_dtype(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines stand in for processors; they do not show that torch uses the instructions."""
    flags, bf16, fp16 = PROCESSORS[name]
    info = tmp_path / "cpuinfo"
    info.write_text(f"model name\t: Some CPU\n{flags}\n", encoding="utf-8")
    monkeypatch.setattr(hardware, "CPU_INFO", info)
    scene, resources = Scene(hardware.detect({})), Resources(device=Device.cpu)
    found = [computed_in(Precision(MixedPrecision(param)), scene, resources) for param in ("fp32", "bf16", "fp16")]  # type: ignore[arg-type]  # words
    assert found == ["fp32", bf16, fp16]
    assert hardware.described_cpu() == f"Some CPU, {'native' if bf16 == 'bf16' else 'no native'} bf16"
