"""Whether processes of this user may read each other on this machine, by trying it, as the ranks of a run will.

A command asks before it starts ranks, so nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from functools import cache
from pathlib import Path

from zero_runtime.same_host import peer_memory

_ROOT = str(Path(__file__).resolve().parents[2])


@cache
def trouble() -> str:
    """Why a process may not read another's memory here; empty if it may. Starts two processes, once."""
    if known := peer_memory.trouble():
        return known
    # Two children, which are to each other what ranks are: Yama lets a parent read its own child in any case.
    pipe = subprocess.PIPE
    with subprocess.Popen(_command("hold"), stdin=pipe, stdout=pipe, encoding="ascii") as holder:
        assert holder.stdout is not None
        place = holder.stdout.readline().split()
        words = _command("read", str(holder.pid), *place)
        found = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
    told = f"{found.stdout}{found.stderr}".strip()
    return told.splitlines()[-1] if told else ""


def _command(what: str, *words: str) -> list[str]:
    code = f"import sys; sys.path[:0] = [{_ROOT!r}]; from zero_runtime.same_host import probe; probe.{what}()"
    return [sys.executable, "-I", "-S", "-c", code, *words]


def hold() -> None:
    """In a child: print where a number lies and what it is, and keep it until standard input is closed."""
    peer_memory.allow_reads()
    number = ctypes.c_uint64(secrets.randbits(64))
    print(ctypes.addressof(number), number.value, flush=True)
    sys.stdin.read()


def read() -> None:
    """In a child: read the number of another process, and print why it cannot be read."""
    pid, address, expected = map(int, sys.argv[1:])
    number = ctypes.c_uint64()
    try:
        peer_memory.read(ctypes.addressof(number), ctypes.sizeof(number), pid, address)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        print(f"processes may not read each other's memory here (process_vm_readv: {why}); {peer_memory.NEEDS}")
        return
    if number.value != expected:
        print(f"a process read {number.value} from another one's memory, expected {expected}")
