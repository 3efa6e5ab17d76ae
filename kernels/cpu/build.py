"""Compiles the C++ sources into a cache on first use, once for all processes.

[Note: the cache] The folder (user_cache.py) is private to the user. A library's name is a hash of its sources, flags,
compiler and processor, so that machines of several kinds can share a home. Its checksum is stored next to it and
compared before the library is loaded: a truncated file would kill every process that maps it, and a flipped bit would
change the training. A library that does not verify is compiled again. A lock saves the work of compiling twice;
correctness does not depend on it. It is a lock of the kernel (flock), which is released when its holder dies, and a
process that has waited too long compiles without it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zero_runtime.kernels.user_cache import CacheError, cache_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
# No multiply-add is fused, so that every operation is rounded ([Note: bits] in common.h).
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
X86_FLAGS = ("-mprefer-vector-width=512",)  # processors without such vectors use their widest
COMPILERS = ("g++", "c++", "clang++")
COMPILE_LIMIT_S = 120.0


class BuildError(RuntimeError):
    """The library cannot be built or loaded on this machine; the message gives the reason."""


@dataclass(frozen=True)
class LockWait:
    """How long to wait for another process that compiles, and after how long to print a message."""

    limit_s: float = 180.0
    message_after_s: float = 2.0
    poll_s: float = 0.05


def load_library(wait: LockWait = LockWait()) -> ctypes.CDLL:
    """The library for this machine, compiled if it is not in the cache. Raises BuildError."""
    compiler = find_compiler()
    try:
        path = cache_folder() / f"kernels-{library_key(compiler)}.so"
    except CacheError as error:
        raise BuildError(str(error)) from error
    try:
        if not _verifies(path):
            _build_once(compiler, path, wait)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error


def _verifies(path: Path) -> bool:
    """Whether the library exists and matches its checksum."""
    try:
        return _checksum_path(path).read_bytes() == _checksum(path)
    except OSError:
        return False


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _checksum(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def find_compiler() -> str:
    """The path of $CXX, or of the first of g++, c++ and clang++ on the PATH. BuildError if there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise BuildError(f"expected a C++ compiler ({' or '.join(names)}) on the PATH, found none; install g++")
    return found


def flags() -> tuple[str, ...]:
    """The compiler's flags on this machine."""
    return FLAGS + (X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())


def library_key(compiler: str) -> str:
    """A hash of everything that determines the bytes of the library."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*flags(), compiler, _version(compiler), _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    try:
        run = subprocess.run(
            [compiler, "--version"], capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} --version failed: {error}") from error
    return run.stdout


def _processor() -> str:
    """The description of the processor, on which -march=native depends."""
    machine = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    about: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        about.setdefault(name.strip(), value.strip())
    features = about.get("flags", about.get("Features", ""))
    return " ".join((machine, about.get("model name", ""), about.get("CPU part", ""), features))


# ---- compiling -------------------------------------------------------------------------------------------------------


def _build_once(compiler: str, path: Path, wait: LockWait) -> None:
    with _lock(path.with_suffix(".lock"), wait):
        if not _verifies(path):
            compile_library(compiler, path)


def compile_library(compiler: str, path: Path) -> None:
    """Compile into `path`, with its checksum next to it. Raises BuildError with the first lines of the compiler."""
    part = path.with_name(f"{path.stem}.{os.getpid()}.part")
    beside = part.with_suffix(".sum")
    command = [compiler, *flags(), *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(part)]
    start = time.perf_counter()
    try:
        run = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILE_LIMIT_S, check=False
        )
        if run.returncode != 0:
            said = "\n".join(run.stderr.strip().splitlines()[:8])
            raise BuildError(f"{compiler} failed with exit status {run.returncode}: {said}")
        beside.write_bytes(_checksum(part))
        for one, name in ((beside, _checksum_path(path)), (part, path)):
            _make_durable(one)  # otherwise, after a power cut, a name may exist without its bytes
            os.replace(one, name)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} did not compile the CPU kernels: {error}") from error
    finally:
        part.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)
    logger.info("compiled the CPU kernels in %.1f s: %s", time.perf_counter() - start, path)


def _make_durable(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


@contextmanager
def _lock(path: Path, wait: LockWait) -> Iterator[None]:
    """Hold the lock, or continue without it if it cannot be acquired; see [Note: the cache]."""
    try:
        file = path.open("ab")
    except OSError as error:
        raise BuildError(f"the lock {path} cannot be opened: {error}") from error
    with file:
        try:
            if not _acquire(file.fileno(), path, wait):
                logger.warning("%s is still held after %.0f s; compiling without it", path, wait.limit_s)
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s); compiling without it", path, error)
        yield


def _acquire(descriptor: int, path: Path, wait: LockWait) -> bool:
    start, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - start
        else:
            return True
        if waited_s > wait.limit_s:
            return False
        if waited_s > wait.message_after_s and not said:
            said = True
            logger.warning(
                "waiting for another process that compiles the CPU kernels (%s), %.0f s at most", path, wait.limit_s
            )
        time.sleep(wait.poll_s)
