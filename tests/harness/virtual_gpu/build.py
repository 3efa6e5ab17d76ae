"""Compiles guard.cpp once for each version of torch, into the cache of the C++ kernels, and loads it around torch.

Imports no torch, but in load_guard.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from zero_runtime.kernels.cpu.build import BuildError, cache_folder, find_compiler

SOURCE = Path(__file__).with_name("guard.cpp")
FLAGS = ("-O1", "-shared", "-fPIC", "-std=c++20")  # the standard of the headers of torch 2.13
COMPILE_LIMIT_S = 300.0


def build_guard() -> Path:
    """The compiled library for the installed torch. Raises BuildError with the reason if it cannot be compiled."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("expected torch, found none")
    folder, version, compiler = Path(found.origin).parent, importlib.metadata.version("torch"), find_compiler()
    digest = hashlib.sha256(SOURCE.read_bytes())
    for part in (version, str(folder), compiler, *FLAGS):
        digest.update(part.encode() + b"\0")
    path = cache_folder() / f"virtual-gpu-{version}-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        _compile(compiler, folder, path)
    return path


def load_guard(path: str | Path) -> ctypes.CDLL:
    """The compiled library, loaded before torch, which this imports, and installed after it (see guard.cpp)."""
    assert "torch" not in sys.modules, "torch has asked for the hooks already"
    guard = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    guard.virtual_gpu_install()
    return guard


def _compile(compiler: str, torch: Path, path: Path) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    include, lib = torch / "include", torch / "lib"
    command = [compiler, *FLAGS, str(SOURCE)]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{lib}", "-ltorch_cpu", "-lc10"]
    command += [f"-Wl,-rpath,{lib}", "-o", str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
        if done.returncode != 0:
            said = "\n".join(done.stderr.strip().splitlines()[:8])
            raise BuildError(f"{compiler} failed with exit status {done.returncode}: {said}")
        os.replace(part, path)  # atomic: two test processes may compile at the same time
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} did not compile {SOURCE.name}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
