"""The code, packages and settings that produced an attempt's numbers. Recorded next to them, never part of their id."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.text.paths import CODE

PACKAGES = ("zero-lab", "torch", "transformers", "hydra-core", "submitit", "mlflow", "safetensors", "peft", "triton")
# Variables of the underlying libraries that affect what is measured. No others are recorded: some contain secrets.
PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "GLIBC_TUNABLES", "ZLAB_", "SLURM_JOB_ID")
LONGEST_DIFF_BYTES = 1 << 20


class Code(NamedTuple):
    """The checkout that the code runs from. `commit`: empty if there is none, as in an installed package.

    `diff`: changes of tracked files since that commit. `untracked`: files that git neither tracks nor ignores.
    """

    commit: str
    diff: str
    untracked: tuple[str, ...]


@functools.cache
def code() -> Code:
    """The checkout of this process's code, read once."""
    if not (CODE / ".git").exists():
        return Code("", "", ())
    diff = _git(CODE, "diff", "HEAD")[:LONGEST_DIFF_BYTES]
    return Code(
        _git(CODE, "rev-parse", "HEAD"), diff, tuple(_git(CODE, "ls-files", "-o", "--exclude-standard").split())
    )


def facts() -> dict[str, Any]:
    """The contents of provenance.json as plain data."""
    found = code()
    return {
        "commit": found.commit or None,
        "dirty": bool(found.diff or found.untracked),
        "untracked": list(found.untracked),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "command": sys.argv,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path, *words: str) -> str:
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, encoding="utf-8", errors="replace", timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
