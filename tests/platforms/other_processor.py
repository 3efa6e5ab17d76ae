"""A pytest plugin that runs the kernels' tests against C++ kernels compiled for another processor.

`ZLAB_PROCESSOR=aarch64 pytest -p platforms.other_processor tests/kernels` runs the kernels in a separate process. The
program around them is generated from their declarations: it reads a call from stdin (the function, its numbers, the
bytes behind its pointers), makes the call, and writes back those bytes and the return value.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.helper_process import HelperProcess

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels" / "cpu"
DECLARATION = re.compile(r'extern "C" (\w+) (zlab_\w+)\(([^)]*)\)')
BLOCK, CODES = 256, 256


@dataclass(frozen=True)
class Processor:
    """How to compile for it and what runs the program; `needs`: required flags of /proc/cpuinfo without an emulator."""

    compiler: str
    flags: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()

    def missing(self) -> str | None:
        """Why programs for it cannot be compiled or run here; None if they can."""
        for tool in (self.compiler, *self.emulator[:1]):
            if shutil.which(tool) is None:
                return f"no {tool} on the PATH"
        lacking = sorted(self.needs - _processor_flags()) if self.needs else []
        return f"this processor has no {' '.join(lacking)}" if lacking else None


PROCESSORS = {
    "aarch64": Processor("aarch64-linux-gnu-g++", ("-march=armv8-a+crc",), ("qemu-aarch64",)),
    "x86-64": Processor("g++", ("-march=x86-64",), needs=frozenset({"sse2"})),
    "avx2": Processor("g++", ("-march=x86-64-v3", "-mavx2"), needs=frozenset({"avx2", "fma", "f16c"})),
    "avx512": Processor("g++", ("-march=x86-64-v4", "-mavx512f"), needs=frozenset({"avx512f", "avx512dq"})),
}


def _processor_flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


@dataclass(frozen=True)
class Parameter:
    """`type` is pointer, int32_t, int64_t or float; `element_bytes` is 0 if a dtype argument decides."""

    name: str
    type: str
    constant: bool = False
    element_bytes: int = 0


@dataclass(frozen=True)
class Function:
    name: str
    returns: str
    parameters: tuple[Parameter, ...]


def declared() -> list[Function]:
    """The exported functions, in the order of the sources."""
    found = []
    for file in sorted(SOURCES.glob("*.cpp")):
        for returns, name, text in DECLARATION.findall(file.read_text(encoding="utf-8")):
            parts = [one for one in (" ".join(part.split()) for part in text.split(",")) if one]
            found.append(Function(name, returns, tuple(map(_parameter, parts))))
    return found


def _parameter(text: str) -> Parameter:
    kind, _, name = text.replace("*", "* ").rpartition(" ")
    if not kind.strip().endswith("*"):
        return Parameter(name, kind.strip())
    bytes_ = {"float": 4, "double": 8, "uint8_t": 1, "void": 0}[kind.replace("const", "").strip(" *")]
    return Parameter(name, "pointer", "const" in kind, bytes_)


# ---- the program -----------------------------------------------------------------------------------------------------

MAIN = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
%(declarations)s
namespace {
union Number { int64_t integer; float real; };
struct Argument { int64_t kind = 0, bytes = -1; Number number{}; std::vector<char> room; };

// Bytes stay at the offset to a cache line that they have in the caller; what lies around them must not change.
constexpr int64_t FENCE = 64;
char* start(Argument& one) {
    if (one.bytes < 0) return nullptr;
    char* base = one.room.data() + FENCE;
    return base + ((one.number.integer - reinterpret_cast<intptr_t>(base)) & 63);
}
void in(void* to, size_t size) { if (size && std::fread(to, 1, size, stdin) != size) std::exit(0); }
void out(const void* from, size_t size) { std::fwrite(from, 1, size, stdout); }
template <class T> T* pointer(Argument& one) { return reinterpret_cast<T*>(start(one)); }
}
int main() {
    for (;;) {
        int64_t which, count, answer = 0;
        in(&which, 8);
        in(&count, 8);
        std::vector<Argument> a(count);
        for (Argument& one : a) {
            in(&one.kind, 8);
            in(&one.bytes, 8);
            in(&one.number, 8);
            if (one.kind != 2 || one.bytes < 0) continue;
            one.room.assign(one.bytes + 3 * FENCE, 0x5A);
            in(start(one), one.bytes);
        }
        switch (which) {
%(calls)s
            default: return 2;
        }
        for (Argument& one : a) {
            if (one.kind != 2 || one.bytes < 0) continue;
            const char *first = start(one), *last = first + one.bytes;
            for (const char& byte : one.room)
                if ((&byte < first || &byte >= last) && byte != 0x5A) return 3;
            out(first, one.bytes);
        }
        out(&answer, 8);
        std::fflush(stdout);
    }
}
"""


def program_source(functions: list[Function]) -> str:
    """C++ source of the program, with a case for each function."""
    declarations, calls = [], []
    for number, function in enumerate(functions):
        types = ", ".join("void*" if one.type == "pointer" else one.type for one in function.parameters)
        kinds = {"pointer": "pointer<void>(a[{0}])", "float": "a[{0}].number.real"}
        whole = "static_cast<{1}>(a[{0}].number.integer)"
        given = ", ".join(kinds.get(p.type, whole).format(i, p.type) for i, p in enumerate(function.parameters))
        declarations.append(f'extern "C" {function.returns} {function.name}({types});')
        keeps = "" if function.returns == "void" else "answer = "
        calls.append(f"            case {number}: {keeps}{function.name}({given}); break;")
    return MAIN % {"declarations": "\n".join(declarations), "calls": "\n".join(calls)}


def compile_program(processor: Processor, folder: Path) -> Path:
    """Compiles the program; it is linked statically, so that an emulator needs no libraries of the other processor."""
    from zero_runtime.kernels.cpu.build import FLAGS

    (folder / "main.cpp").write_text(program_source(declared()), encoding="utf-8")
    shared = {"-march=native", "-shared", "-fPIC"}
    flags = [flag for flag in FLAGS if flag not in shared]
    sources = map(str, sorted(SOURCES.glob("*.cpp")))
    command = [processor.compiler, *flags, *processor.flags, "-static", "-I", str(SOURCES), *sources]
    # In a static program, weak references to thread functions stay empty unless the complete library is linked in.
    whole = ["-Wl,--whole-archive", "-lpthread", "-Wl,--no-whole-archive"]
    subprocess.run([*command, str(folder / "main.cpp"), "-o", str(folder / "kernels"), *whole], check=True)
    return folder / "kernels"


# ---- the stand-in for the library ------------------------------------------------------------------------------------


class Library:
    """Replaces the ctypes.CDLL that kernels/cpu/operations.py calls."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._functions = {one.name: (number, one) for number, one in enumerate(declared())}
        self._process: tuple[int, HelperProcess] | None = None
        for name in self._functions:
            setattr(self, name, _Call(self, name))

    def call(self, name: str, given: tuple[Any, ...]) -> int:
        number, function = self._functions[name]
        assert len(given) == len(function.parameters), (name, len(given))
        values = [one.value for one in given]
        sizes = sizes_of(function, values)
        program = self._running()
        every = list(zip(function.parameters, values, sizes, strict=True))
        program.send(struct.pack("<qq", number, len(values)), *(packed(*one) for one in every))
        for parameter, value, size in every:
            if parameter.type == "pointer" and size >= 0:
                changed = program.read(size)
                if parameter.constant:
                    assert changed == ctypes.string_at(value, size), f"{name} changed {parameter.name}, which is const"
                else:
                    ctypes.memmove(value, changed, size)
        return int(struct.unpack("<q", program.read(8))[0])

    def _running(self) -> HelperProcess:
        """The program that this process started; a fork starts another, since it must not share its parent's pipes."""
        if self._process is None or self._process[0] != os.getpid():
            name = f"{self._command[-1]} (status 3: it wrote past its operands)"
            self._process = os.getpid(), HelperProcess(name, self._command)
        return self._process[1]


class _Call:
    restype: Any = None

    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *given: Any) -> int:
        answer = self._library.call(self._name, given)
        return answer & 0xFFFFFFFF if self.restype is ctypes.c_uint32 else answer


def sizes_of(function: Function, values: list[Any]) -> list[int]:
    """Bytes behind each pointer; -1 for null (0 if numel is 0) and for arguments that are not pointers."""
    by_name = dict(zip((one.name for one in function.parameters), values, strict=True))
    numel = by_name.get("numel", by_name.get("bytes"))
    sizes = []
    for parameter in function.parameters:
        if parameter.type != "pointer" or by_name[parameter.name] is None:
            sizes.append(0 if parameter.type == "pointer" and numel == 0 else -1)
            continue
        dtype = by_name.get(f"{parameter.name}_dtype", by_name.get("dtype"))
        sizes.append(_size(function.name, parameter, numel, dtype))
    return sizes


def _size(function: str, parameter: Parameter, numel: int, dtype: int | None) -> int:
    blocks, groups = -(-numel // BLOCK), -(-numel // (64 * BLOCK))
    special = {
        "grad_scale": 4,
        "ratio": 4,
        "exp_avg_scale": 4 * blocks,
        "exp_avg_sq_scale": 4 * blocks,
        "signed_codes": 4 * CODES,
        "unsigned_codes": 4 * CODES,
        "groups": 8 * groups * (2 if function == "zlab_lamb_squares" else 1),
        "total": 8,
        "totals": 16,
    }
    if parameter.name in special:
        return special[parameter.name]
    if function == "zlab_checksum":
        return numel
    return numel * (parameter.element_bytes or (4 if dtype == 0 else 2))


def packed(parameter: Parameter, value: Any, size: int) -> bytes:
    """An argument as bytes: kind (0 integer, 1 real, 2 pointer), size, number or address, bytes behind a pointer."""
    if parameter.type == "pointer":
        return struct.pack("<qqq", 2, size, value or 0) + (ctypes.string_at(value, size) if size > 0 else b"")
    if parameter.type == "float":
        return struct.pack("<qqf4x", 1, -1, value)
    return struct.pack("<qqq", 0, -1, value)


# ---- the plugin ------------------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    """Makes `load_library` return the other processor's library, before any test file is imported."""
    from zero_runtime.kernels.cpu import build

    processor = PROCESSORS[os.environ["ZLAB_PROCESSOR"]]
    program = compile_program(processor, Path(tempfile.mkdtemp(prefix="zlab-other-")))
    library = Library([*processor.emulator, str(program)])
    build.load_library = lambda *_: library  # type: ignore[assignment]
    assert "zero_runtime.kernels.cpu.operations" not in sys.modules, "the plugin comes too late: the kernels are loaded"
