"""The code, packages and settings that produced an attempt's numbers. Recorded next to them, never part of their id."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.machine.processes import output_of
from orchestrator.text.paths import CODE

PACKAGES = ("zero-lab", "torch", "transformers", "hydra-core", "submitit", "mlflow", "safetensors", "peft", "triton")
# Variables of the underlying libraries that affect what is measured. No others are recorded: some contain secrets.
PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "GLIBC_TUNABLES", "ZLAB_", "SLURM_JOB_ID")
LONGEST_DIFF_BYTES = 1 << 20
OURS, SOURCES = ("kernels", "orchestrator", "zero_runtime"), ("*.py", "*.cpp", "*.h")  # of a checkout


class Code(NamedTuple):
    """The checkout that the code runs from. `commit`: empty if there is none, as in an installed package.

    `diff`: changes of tracked files since that commit. `untracked`: files that git neither tracks nor ignores.
    """

    commit: str
    diff: str
    untracked: tuple[str, ...]

    @property
    def dirty(self) -> bool:
        return bool(self.diff or self.untracked)


@functools.cache
def code(other: str | None = None) -> Code:
    """The checkout of this process's code, or another one, read once."""
    folder = Path(other or CODE)
    if not (folder / ".git").exists():
        return Code("", "", ())
    diff = _git(folder, "diff", "HEAD")[:LONGEST_DIFF_BYTES]
    untracked = _git(folder, "ls-files", "-o", "--exclude-standard").split()
    return Code(_git(folder, "rev-parse", "HEAD"), diff, tuple(untracked))


def facts(other: str | None = None) -> dict[str, Any]:
    """The contents of provenance.json as plain data, for ranks of this code or of another checkout."""
    return {
        "commit": code(other).commit or None,
        "dirty": code(other).dirty,
        "untracked": list(code(other).untracked),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "command": sys.argv,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def sources(folder: Path) -> list[Path]:
    """The files of the code in a checkout, or in site-packages."""
    return sorted(file for room in OURS for ending in SOURCES for file in (folder / room).rglob(ending))


@functools.cache
def code_digest() -> str:
    """A hash of all of this process's code: a list of single files would become wrong when code moves."""
    digest = hashlib.sha256()
    for file in sources(CODE):
        digest.update(f"{file.relative_to(CODE)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def version_of(package: str) -> str | None:
    """The version of an installed package, torch's with its build; None if it is not installed."""
    # Imported here, so that the answer to a typo does not wait for them.
    from importlib import metadata

    from orchestrator.machine import hardware

    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    return (hardware.torch_build() or version) if package == "torch" else version


def _git(folder: Path, *words: str) -> str:
    return (output_of("git", *words, timeout_s=10, folder=folder) or "").strip()
