"""What the PTX and the machine code (SASS) of a compiled kernel say about it. Pure functions of the two texts."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

_REGISTER = re.compile(r"%[a-z]+\d+")
_NARROW = ("%r", "%rs")  # registers of 32 and of 16 bits; %rd has 64, %p is a predicate


class Instruction(NamedTuple):
    """One PTX instruction: its opcode with all modifiers, the registers that it writes, and those that it reads."""

    opcode: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    text: str


def instructions(ptx: str) -> list[Instruction]:
    """The instructions of a PTX text, without directives, labels and comments, in order."""
    found = []
    for line in ptx.splitlines():
        text = re.sub(r"^@!?%p\d+\s+", "", line.split("//")[0].strip())
        if not re.match(r"[a-z][a-z0-9]*[.\s].*;$", text):
            continue
        opcode, _, operands = text.partition(" ")
        if opcode.split(".")[0] in ("st", "red", "bra", "bar", "ret"):  # these write no register
            found.append(Instruction(opcode, (), tuple(_REGISTER.findall(operands)), text))
            continue
        target, rest = _first_operand(operands)
        special = ["%ctaid"] if "%ctaid." in rest else []
        found.append(Instruction(opcode, tuple(_REGISTER.findall(target)), (*_REGISTER.findall(rest), *special), text))
    return found


def _first_operand(operands: str) -> tuple[str, str]:
    """The first operand, which may be a list in braces, and the rest."""
    operands = operands.strip()
    end = operands.find("}") if operands.startswith("{") else operands.find(",") - 1
    return operands[: end + 1], operands[end + 1 :]


def narrow_offsets(ptx: str) -> list[str]:
    """The instructions that compute with the number of the program in less than 64 bits.

    The number itself has 32 bits and is below 2^31. Its product with the size of a block is an element's offset, which
    passes 2^31 in a tensor of that many elements, so every value that is computed from it must have 64 bits.
    """
    number, derived = {"%ctaid"}, set[str]()
    program, found = instructions(ptx), []
    for _ in range(2):  # the second time for values that a loop carries
        found = []
        for one in program:
            tainted = derived.intersection(one.reads) or number.intersection(one.reads)
            if not tainted or one.opcode.startswith("ld.") or not one.writes:
                continue  # a loaded value is no offset
            if one.opcode.startswith("mov.") and not derived.intersection(one.reads):
                number.update(one.writes)
                continue
            derived.update(name for name in one.writes if not name.startswith("%p"))
            if any(re.match(r"%rs?\d", name) for name in one.writes):
                found.append(one.text)
    return found


def contractions(ptx: str) -> list[str]:
    """The instructions that are a fused multiplication and addition, or that the assembler may fuse.

    PTX ISA, "Floating Point Instructions": add, sub and mul with a rounding modifier are never fused; without one they
    may be.
    """
    floats = r"\.(f16|bf16|f32|f64)(x2)?$"
    found = []
    for one in instructions(ptx):
        name, *modifiers = one.opcode.split(".")
        if not re.search(floats, one.opcode):
            continue
        if name in ("fma", "mad") or (name in ("add", "sub", "mul") and "rn" not in modifiers):
            found.append(one.text)
    return found


def approximations(ptx: str) -> list[str]:
    """The instructions that are not correctly rounded, or that take subnormal numbers for zero."""
    return [one.text for one in instructions(ptx) if re.search(r"\.(approx|full|ftz)\b", one.opcode)]


def local_accesses(sass: str) -> int:
    """The number of loads and stores of a thread's local memory: spilled registers."""
    return len(re.findall(r"\b(?:LDL|STL)\b", sass))


def global_accesses(sass: str) -> Counter[tuple[str, int]]:
    """How many loads (LDG) and stores (STG) of global memory there are, by kind and bytes per thread."""
    found: Counter[tuple[str, int]] = Counter()
    for kind, modifiers in re.findall(r"\b(LDG|STG)\b((?:\.\w+)*)", sass):
        sizes = re.findall(r"\.(?:[US](8|16)|(64|128|256))\b", modifiers)
        bits = int("".join(sizes[-1])) if sizes else 32
        found[kind, bits // 8] += 1
    return found
