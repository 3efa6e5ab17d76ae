"""Detects the hardware of this machine without importing torch: GPUs, CPU cores, memory, and short names for them."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from orchestrator.config.schema import Device
from orchestrator.machine.processes import output_of
from zero_runtime import cgroups

PROC_GPUS = Path("/proc/driver/nvidia/gpus")
CPU_INFO = Path("/proc/cpuinfo")
MIG = "-MIG"


@dataclass(frozen=True)
class Hardware:
    """The hardware of this machine that this process can use.

    `gpus`: number of GPUs that the installed torch can use. `idle_gpus`: number of visible GPUs that it cannot use.
    `cpu_dtypes`: the 16-bit dtypes that the CPU has matrix instructions for. `slurm`: whether jobs can be submitted to
    a SLURM cluster from here.
    """

    cores: int
    cpu: str
    gpus: int = 0
    gpu: str = ""
    idle_gpus: int = 0
    cpu_dtypes: frozenset[str] = frozenset()
    slurm: bool = False

    @property
    def is_mig(self) -> bool:
        """Whether the GPU is a MIG device, a part of a GPU, which only a single rank can use."""
        return self.gpu.endswith(MIG)

    def name(self, device: Device) -> str:
        """A short name for the identity of a point. Measurements on hardware of the same name can be compared."""
        return self.gpu if device is Device.cuda else f"{self.cpu}/{self.cores}-cores"


def detect(environ: Mapping[str, str] | None = None) -> Hardware:
    """The hardware that a process with this environment (None: our own) can use."""
    setting = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    models = visible(gpu_models(), setting)
    usable = models if torch_has_cuda() else []
    return Hardware(
        cores=usable_cores(),
        cpu=cpu_model(),
        gpus=len(usable),
        gpu="+".join(sorted(set(usable))),
        idle_gpus=len(models) - len(usable),
        cpu_dtypes=cpu_dtypes(),
        slurm=shutil.which("sbatch") is not None,
    )


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use; `visible` is its entry of CUDA_VISIBLE_DEVICES, unknown memory is None."""

    visible: str
    uuid: str = ""
    memory_bytes: int | None = None


def visible_gpus() -> list[Gpu]:
    """The GPUs that `detect` counts, in the same order."""
    models = gpu_models()
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(visible(models, setting))
    entries = [part.strip() for part in setting.split(",")] if setting is not None else list(map(str, range(count)))
    rows = _smi("--query-gpu=index,uuid,memory.total")
    facts = {name: (uuid, int(mib) << 20) for index, uuid, mib in rows if mib.isdigit() for name in (index, uuid)}
    return [Gpu(entry, *facts.get(entry, ("", None))) for entry in entries[:count]]


def gpu_processes() -> list[tuple[str, str, str]]:
    """(UUID of the GPU, pid, memory) of every process that now computes on a GPU of this machine."""
    return [(uuid, pid, used) for uuid, pid, used in _smi("--query-compute-apps=gpu_uuid,pid,used_memory")]


def _smi(query: str) -> list[list[str]]:
    """The rows that nvidia-smi prints for a query of three columns; empty if it is missing or fails."""
    rows = (output_of("nvidia-smi", query, "--format=csv,noheader,nounits") or "").splitlines()
    return [[cell.strip() for cell in row.split(",")] for row in rows if row.count(",") == 2]


def memory_bytes() -> int:
    """The memory in bytes that this machine, or our container on it, has for processes."""
    total: int = psutil.virtual_memory().total
    limit = cgroups.memory_limit()
    return total if limit is None else min(total, limit)


def free_bytes() -> int:
    """The memory in bytes that new processes may take before others are pushed out."""
    return min(int(psutil.virtual_memory().available), memory_bytes())


def usable_cores() -> int:
    """The number of cores that this process may use, limited by its affinity and by the CPU share of its container."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1  # macOS has no affinity
    share = cgroups.cpu_share()
    return cores if share is None else max(1, min(cores, int(share)))


def visible(models: list[str], setting: str | None) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects.

    As in CUDA, entries after the first invalid one are ignored, and so are those after a MIG device.
    """
    if setting is None:
        return models
    left = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(models):
            left.append(models[int(entry)])
        elif entry.startswith("GPU-") and models:
            left.append(models[0])
        elif entry.startswith("MIG-") and models:
            return left or [f"{models[0]}{MIG}"]
        else:
            break
    return left


def gpu_models() -> list[str]:
    """The short name of each NVIDIA GPU, from the driver's files, or from the slower nvidia-smi if they are hidden."""
    models = [match_in(folder / "information", r"^Model:\s*(.+)$") or "GPU" for folder in sorted(PROC_GPUS.glob("*"))]
    return [short_name(model) for model in models] if models else _ask_nvidia_smi()


def short_name(model: str) -> str:
    """The model's name without filler: "Intel-Xeon-Gold" for "Intel(R) Xeon(R) Gold CPU @ 2.70GHz"."""
    quiet = re.sub(r"\(R\)|\(TM\)|\bNVIDIA\b|\bCPU\b|\bProcessor\b|@.*$", " ", model)
    return "-".join(quiet.split()) or "unknown"


def cpu_model() -> str:
    """The short name of the CPU."""
    return short_name(_model_name())


def _model_name() -> str:
    return match_in(CPU_INFO, r"^model name\s*:\s*(.+)$") or platform.machine()


def described_cpu() -> str:
    """The CPU's name and whether it multiplies bf16 natively: a hypervisor gives the same name to both kinds."""
    native = "native" if "bf16" in cpu_dtypes() else "no native"
    return f"{_model_name()}, {native} bf16"


def cpu_dtypes() -> frozenset[str]:
    """The dtypes among bf16 and fp16 for which the CPU has matrix instructions, which are 5 to 100 times faster."""
    flags = set((match_in(CPU_INFO, r"^(?:flags|Features)\s*:\s*(.+)$") or "").split())
    native = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
    return frozenset(dtype for dtype, names in native.items() if names & flags)


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA."""
    return _in_version_of_torch(r"^cuda\b[^=]*=\s*(['\"])") is not None


def torch_build() -> str | None:
    """The version of the installed torch with its build, such as 2.13.0+cu130; None if it is not known.

    The metadata of the package from PyPI have the version alone.
    """
    return _in_version_of_torch(r"^__version__\s*=\s*['\"](.+?)['\"]")


def _in_version_of_torch(pattern: str) -> str | None:
    """`match_in` torch's version file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return match_in(Path(spec.origin).with_name("version.py"), pattern)


def match_in(file: Path, pattern: str) -> str | None:
    """The group of the first match of a pattern in a file, with ^ and $ at line ends; None without one."""
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _ask_nvidia_smi() -> list[str]:
    listed = output_of("nvidia-smi", "-L") or ""
    return [short_name(model) for model in re.findall(r"^GPU \d+: (.+?) \(UUID", listed, re.MULTILINE)]
