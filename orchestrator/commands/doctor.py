"""`zlab doctor`: reports this machine's hardware and software, what works on it, and which commands to try."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator import wings
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser, with_flags
from orchestrator.config.cluster import ClusterError
from orchestrator.machine import hardware, provenance
from orchestrator.machine.loopback import loopback
from orchestrator.machine.processes import output_of
from orchestrator.report.summary import Row
from orchestrator.text.paths import program
from orchestrator.text.units import size
from zero_runtime.wings import SHM_TROUBLE, load

ENOUGH_DISK_BYTES = 10 << 30
SLURM_GPUS, TORCH, NETWORK = "SLURM GPUs", "torch", "network"


class Finding(NamedTuple):
    """One line of the report: the item that was checked, its state, and advice if it is a problem."""

    name: str
    text: str
    advice: str = ""


def main(argv: Sequence[str]) -> int:
    """Prints the findings. Returns 0, or 1 if a problem affects every run."""
    arguments = parser().parse_args(with_flags(argv))
    results = findings(Path(arguments.output))
    if arguments.bundle:
        lines = [f"{finding.name}: {finding.text}  {finding.advice}" for finding in results]
        return int(wings.load(wings.BUNDLE)(Path(arguments.bundle), Path(arguments.output), lines))
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in results], ensure_ascii=False))
    else:
        from orchestrator.report.screen import Screen

        screen = Screen()
        screen.rows([Row(finding.name, finding.text) for finding in results])
        for finding in results:
            if finding.advice:
                screen.warn(f"{finding.name}: {finding.advice}")
        screen.closing(what_works(results))
    return int(bool(_of_every_run(results)))


def parser() -> VerbParser:
    parser = verb_parser("doctor", "The hardware and software of this machine, and the commands that work on it.")
    parser.add_argument("--output", default="outputs", help="the folder that runs will write to")
    said = "write what an issue needs, without secrets; default: zlab-bundle.zip"
    parser.add_argument("--bundle", nargs="?", const="zlab-bundle.zip", metavar="FILE", help=said)
    add_json(parser)
    return parser


def findings(output: Path) -> list[Finding]:
    """All checks, in order of importance."""
    machine = [_python(), *_packages(), _processor(), _memory(), *_gpus(), _cpu_ranks()]
    return [*machine, *_slurm(), _disk(output), _compiler(), *_launcher(), _loopback()]


def _of_every_run(results: Sequence[Finding]) -> list[str]:
    """The names of the findings without which no run starts."""
    return [finding.name for finding in results if finding.name in (TORCH, NETWORK) and finding.advice]


def what_works(results: Sequence[Finding]) -> list[Row]:
    """The commands worth trying on this machine."""
    if missing := _of_every_run(results):
        return [Row("works here", f"no run, before the warnings are followed: {' and '.join(missing)}")]
    problems = {finding.name for finding in results if finding.advice}
    machine = hardware.detect()
    ranks = f"{machine.gpus} GPUs" if machine.gpus else f"{machine.cores} cores: their speed says nothing about GPUs"
    rows = [Row("works here", f"runs and sweeps on {ranks}")]
    rows += [Row("first", f"{program()} zero=stage2"), Row("then", f"{program()} sweeps=stages --plan")]
    if shutil.which("sbatch") and "SLURM" not in problems:
        device = "cuda" if any(finding.name == SLURM_GPUS for finding in results) else "cpu"
        options = f"zero=stage1,stage2,stage3 cluster=slurm resources.device={device} resources.ranks=2 --plan"
        rows.append(Row("cluster", f"{program()} -m {options}"))
    return rows


def _python() -> Finding:
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("machine", f"{socket.gethostname()}: {system}")


def _packages() -> list[Finding]:
    versions = {name: provenance.version_of(name) for name in (*provenance.PACKAGES, "deepspeed")}
    results = [Finding("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version))]
    if versions["torch"] is None:
        results.append(Finding(TORCH, "not installed", "nothing runs without it: make install"))
    return results


def _processor() -> Finding:
    dtypes = hardware.cpu_dtypes()
    native = f"matrix instructions for {' and '.join(sorted(dtypes))}" if dtypes else "no matrix instructions for bf16"
    advice = "" if dtypes else "bf16 is computed in fp32 on it: the bytes are those of bf16, the speed is not"
    return Finding("processor", f"{hardware.cpu_model()}, {hardware.usable_cores()} cores, {native}", advice)


def _memory() -> Finding:
    return Finding("memory", f"{size(hardware.memory_bytes())} for processes")


def _gpus() -> list[Finding]:
    machine, gpus = hardware.detect(), hardware.visible_gpus()
    if machine.idle_gpus:
        advice = "the installed torch is built without CUDA: install a build with it"
        return [Finding("GPUs", f"{machine.idle_gpus}, none usable", advice)]
    if not gpus:
        return [Finding("GPUs", "none: ranks are CPU processes")]
    memory = {gpu.memory_bytes for gpu in gpus}
    each = f", {size(memory.pop())} each" if len(memory) == 1 and None not in memory else ""
    busy = hardware.gpu_processes()
    advice = f"{len(busy)} processes compute on them now" if busy else ""
    return [Finding("GPUs", f"{len(gpus)} x {machine.gpu}{each}", advice), *_links()]


def _cpu_ranks() -> Finding:
    """What comm=auto gives to ranks on this machine's CPUs."""
    if reason := load(SHM_TROUBLE)():
        return Finding("CPU ranks", "communicate over gloo", f"{reason}. Runs work, and wait longer for each other")
    return Finding("CPU ranks", "read each other's memory (comm=shm); one that read another's was tried")


def _links() -> list[Finding]:
    table = output_of("nvidia-smi", "topo", "-m")
    if table is None:
        return []
    links = "NVLink" if " NV" in table or "\tNV" in table else "PCIe"
    return [Finding("links", f"GPUs communicate over {links}")]


def _slurm() -> list[Finding]:
    if shutil.which("sbatch") is None:
        return [Finding("SLURM", "no sbatch on PATH: cluster=local")]
    try:
        nodes = wings.load(wings.ASK_SLURM)(["sinfo", "--noheader", "--format=%P %l %D %G"], timeout_s=15)
    except ClusterError as error:
        reason = str(error).splitlines()[-1].removeprefix("sinfo --noheader: ")  # sinfo names itself
        advice = "; is slurmctld up?" if shutil.which("sinfo") else ""
        return [Finding("SLURM", "sbatch is installed", reason + advice)]
    rows = [line.split() for line in nodes.splitlines() if line.split()]
    partitions = ", ".join(dict.fromkeys(row[0].rstrip("*") for row in rows))
    gpus = ", ".join(dict.fromkeys(row[-1] for row in rows if "gpu" in row[-1]))
    results = [Finding("SLURM", f"partitions {partitions or 'none'}")]
    return [*results, Finding(SLURM_GPUS, f"{gpus} a node")] if gpus else results


def _disk(output: Path) -> Finding:
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding("disk", f"{folder}", "it cannot be written to: choose another with output=FOLDER")
    advice = "checkpoints and scratch files may not fit" if free < ENOUGH_DISK_BYTES else ""
    return Finding("disk", f"{size(free)} free for {output}", advice)


def _compiler() -> Finding:
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        return Finding("compiler", "none", "the C++ kernels cannot be built: the plain ones are several times slower")
    return Finding("compiler", f"{compiler}: kernels are compiled on first use")


def _launcher() -> list[Finding]:
    """What Triton compiles on each machine to launch a kernel needs a C compiler and Python's header."""
    if not hardware.detect().gpus:
        return []
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    missing = [*([] if compiler else ["gcc"]), *([] if header.exists() else [str(header)])]
    if missing:
        advice = "the reference is used on GPUs instead of the Triton kernels; install it on every machine with ranks"
        return [Finding("launcher", f"no {' and no '.join(missing)}", advice)]
    return [Finding("launcher", f"{compiler} and Python.h: Triton's kernels can be launched")]


def _loopback() -> Finding:
    """The loopback interface, over which the ranks of one machine rendezvous."""
    try:
        address = loopback()
    except OSError as error:
        return Finding(NETWORK, "no loopback", str(error))
    return Finding(NETWORK, f"ranks of this machine meet over loopback, {address}")
