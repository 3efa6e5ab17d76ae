"""Describes this machine's processor in one line: model, vector extensions, instructions for 16-bit matrices."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path

VECTORS = ("sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512dq", "asimd", "sve")
MATRICES = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8", "bf16", "asimdhp")
BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


def _cpuinfo(key: str) -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^(?:{key})\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else ""


def flags() -> set[str]:
    """The feature flags that /proc/cpuinfo lists."""
    return set(_cpuinfo("flags|Features").split())


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def lacks_compiler() -> str | None:
    """Why C++ cannot be compiled here; None if it can."""
    return None if any(map(shutil.which, ("g++", "c++", "clang++"))) else "no C++ compiler on the PATH"


def describe() -> str:
    here = flags()
    model = _cpuinfo("model name") or platform.machine()
    family = "/".join(filter(None, map(_cpuinfo, ("cpu family", "model", "stepping"))))
    vectors = " ".join(name for name in VECTORS if name in here) or "no vectors known"
    native = " ".join(name for name in MATRICES if name in here) or "none"
    bf16 = "native" if here & BF16 else "not native"
    return (
        f"{model} (family {family}), {os.cpu_count()} cores; bf16 products: {bf16}; 16-bit matrix instructions: "
        f"{native}; vectors: {vectors}"
    )


if __name__ == "__main__":
    print(describe())
