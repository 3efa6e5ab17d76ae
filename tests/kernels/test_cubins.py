"""Every Triton launch, compiled to machine code for GPUs that are not there: no spilled registers, vectors where
addresses allow them, element offsets in 64 bits, no fused or approximate arithmetic.

Each operation is called as the runtime calls it and compiled as its wrapper launches it (harness/cubins.py), by the
assembler that Triton brings.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness.attack_counts import Tally
from harness.cubins import Binary, compiled_for
from harness.machine_code import approximations, contractions, global_accesses, local_accesses, narrow_offsets
from triton_launches import HUGE, LAYOUTS, Launch, launches, of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install '.[dev]' on Linux)"
)

CAPABILITIES = {80: "A100", 90: "H100", 100: "B200"}
CUT = ("adamw_", "accumulate_", "sum_of_squares")
ROW_KERNELS = ("squares_kernel", "lamb_squares_kernel")  # a program adds up rows of 256 elements in a loop
FOLD = "fold_kernel"  # a program adds numbers that are not neighbours, one for each 16,384 elements


@pytest.mark.full
def test_the_main_kernels_of_an_h100_are_what_the_source_means(checked: Tally) -> None:
    """One launch each of the update, of the accumulation and of the norm, with aligned tensors."""
    aligned = {launch.operation: launch for launch in launches(LAYOUTS[:1])}
    count_and_check(90, [aligned[name] for name in CUT], checked)


@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_launch_is_what_the_source_means(capability: int, checked: Tally) -> None:
    found = list(launches())
    assert len(found) > 60
    count_and_check(capability, found, checked)


@pytest.mark.full
def test_launches_over_more_than_2_to_the_31_elements_are_the_same(checked: Tally) -> None:
    """The number of elements then has 64 bits, which makes other variants of all kernels."""
    count_and_check(90, launches((HUGE,)), checked)


def count_and_check(capability: int, chosen: Iterable[Launch], checked: Tally) -> None:
    troubles = []
    for launch in chosen:
        with compiled_for(capability) as binaries:
            launch.call(operations())
        assert binaries, f"{launch} launched nothing"
        for binary in binaries:
            troubles += [f"{launch}: {trouble}" for trouble in troubles_of(binary, launch)]
            checked(f"kernels compiled for sm_{capability}", launches=1)
    assert not troubles, "\n".join(troubles)


def operations() -> object:
    return importlib.import_module("zero_runtime.kernels.triton.operations")


def troubles_of(binary: Binary, launch: Launch) -> list[str]:
    """What differs from the source's meaning, one line each; empty if nothing does."""
    found = [f"an offset of less than 64 bits: {text}" for text in narrow_offsets(binary.ptx)]
    found += [f"fused, or free to be: {text}" for text in contractions(binary.ptx)]
    found += [f"approximate: {text}" for text in approximations(binary.ptx)]
    if binary.is_fused:
        found.append("the compiler may fuse multiplications with additions")
    if local_accesses(binary.sass):
        found.append(f"{local_accesses(binary.sass)} accesses to spilled registers")
    of_elements = launch.layout.is_aligned and binary.name != FOLD
    return found + (narrow_vectors(binary, launch) if of_elements else [])


def narrow_vectors(binary: Binary, launch: Launch) -> list[str]:
    """Accesses to tensors that are narrower than they could be.

    Each thread has a run of consecutive elements. Its accesses to them should have 16 bytes (or 32, which Blackwell
    has), or all bytes of the run if they are fewer.
    """
    accesses = global_accesses(binary.sass)
    in_rows = binary.name in ROW_KERNELS
    sizes = binary.arguments
    program = sizes["LANES"] if in_rows else sizes["BLOCK"] if "BLOCK" in sizes else sizes["ROWS"] * sizes["PER"]
    elements = program // binary.threads
    found = []
    for kind, tensors in (("LDG", launch.reads), ("STG", launch.writes)):
        for size, wanted in expected(tensors, elements).items():
            moved = sum(
                bytes_ * number for (own, bytes_), number in accesses.items() if own == kind and fits(bytes_, size)
            )
            # A loop over rows may be unrolled or not, so there the number of accesses is the compiler's choice.
            if not moved or (not in_rows and moved != wanted):
                found.append(
                    f"{kind}: expected {wanted} bytes per thread in accesses of {size}, found {dict(accesses)}"
                )
    return found


def expected(tensors: Iterable[torch.Tensor], elements: int) -> dict[int, int]:
    """Bytes per thread by the size of the widest accesses to them."""
    found: dict[int, int] = {}
    for tensor in tensors:
        run = elements * tensor.element_size()
        found[min(run, 16)] = found.get(min(run, 16), 0) + run
    return found


def fits(found: int, size: int) -> bool:
    return found in (16, 32) if size == 16 else found == size


# ---- the checks report what they are for -----------------------------------------------------------------------------


@pytest.mark.full
def test_each_fault_of_a_kernel_is_reported() -> None:
    import faulty_kernels

    from zero_runtime.kernels.triton import streams, updates

    aligned, unaligned = LAYOUTS[0], LAYOUTS[2]
    target, values = of(aligned, torch.float32), of(aligned, torch.float32)
    numel, unfused = aligned.numel, {"BLOCK": 1024, "enable_fp_fusion": False}
    copy = Launch("", "", aligned, print, (values,), (target,))
    summed = Launch("", "", aligned, print, (target, values), (target,))
    adam = (*(of(aligned, torch.float32) for _ in range(4)), torch.empty((), device="meta"))

    def troubles(launch: Launch, kernel: Any, *arguments: object, **options: object) -> str:
        with compiled_for(90) as binaries:
            kernel[(4,)](*arguments, **{**unfused, **options})
        return "\n".join(troubles_of(binaries[0], launch))

    assert troubles(summed, streams.accumulate_kernel, target, values, numel, 0.5) == ""
    assert "less than 64 bits" in troubles(copy, faulty_kernels.narrow_kernel, target, values, numel)
    assert "approximate: div.full" in troubles(copy, faulty_kernels.approximate_kernel, target, values, numel)
    fused = troubles(summed, streams.accumulate_kernel, target, values, numel, 0.5, enable_fp_fusion=True)
    assert "fused, or free to be" in fused
    assert "the compiler may fuse" in fused
    away = of(unaligned, torch.float32)
    assert "LDG: expected 64 bytes" in troubles(summed, streams.accumulate_kernel, target, away, numel, 0.5)
    flags = {"HAS_OUT": False, "FROM_END": False, "L2": False}
    spilled = troubles(
        summed._replace(layout=unaligned), updates.adamw_kernel, *adam, adam[0], numel, *[0.5] * 8, **flags, maxnreg=24
    )
    assert "accesses to spilled registers" in spilled


PTX = """
.visible .entry kernel(
    .param .u64 kernel_param_0
)
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
$L__BB0_1:
    shl.b32 %r3, %r2, 3;                    // no offset of a program
    mul.wide.u32 %rd2, %r1, 4096;           // 64 bits
    cvt.u64.u32 %rd3, %r3;
    or.b64 %rd4, %rd2, %rd3;
    setp.lt.s64 %p1, %rd4, %rd1;
    @%p1 ld.global.v2.b32 { %r4, %r5 }, [ %rd4 + 0 ];
    mul.rn.f32 %r6, %r4, %r5;
    add.rn.f32x2 %rd9, %rd9, %rd9;
    @%p1 bra $L__BB0_1;
    ret;
"""


@pytest.mark.parametrize(
    ("more", "check", "reported"),
    [
        ("", narrow_offsets, 0),
        ("shl.b32 %r7, %r1, 10;", narrow_offsets, 1),
        ("mov.b32 %r7, %r1;\n mad.lo.s32 %r8, %r7, 1024, %r3;\n add.s32 %r9, %r8, 1;", narrow_offsets, 2),
        ("cvt.u32.u64 %r7, %rd4;", narrow_offsets, 1),
        ("mov.b64 {%r7, _}, %rd4;", narrow_offsets, 1),
        ("add.s64 %rd5, %rd4, 64;", narrow_offsets, 0),
        ("", contractions, 0),
        ("fma.rn.f32 %r7, %r4, %r5, %r6;", contractions, 1),
        ("fma.rn.f32x2 %rd9, %rd9, %rd9, %rd9;", contractions, 1),
        ("mul.f32 %r7, %r4, %r5;", contractions, 1),
        ("mad.lo.s32 %r7, %r4, %r5, %r6;", contractions, 0),
        ("", approximations, 0),
        ("div.full.f32 %r7, %r4, %r5;", approximations, 1),
        ("sqrt.approx.ftz.f32 %r7, %r4;", approximations, 1),
        ("add.rn.ftz.f32 %r7, %r4, %r5;", approximations, 1),
        ("div.rn.f32 %r7, %r4, %r5;", approximations, 0),
    ],
)
def test_ptx_is_read(more: str, check: Callable[[str], list[str]], reported: int) -> None:
    assert len(check(PTX.replace("    ret;", f"    {more}\n    ret;"))) == reported


def test_sass_is_read() -> None:
    sass = """
        /*0070*/                   LDG.E R2, [R2.64] ;
        /*0080*/              @!P0 LDG.E.128 R4, [R2.64] ;
        /*0090*/                   LDG.E.U8.CONSTANT R4, [R2.64] ;
        /*00a0*/                   LDG.E.ENL2.256 R12, R8, desc[UR4][R2.64] ;
        /*00b0*/                   STG.E.U16 desc[UR4][R2.64], R3 ;
        /*00c0*/                   STG.E.EF.64 desc[UR4][R2.64], R4 ;
        /*00d0*/                   STL [R1+0x14], R76 ;
        /*00e0*/                   LDL.LU R4, [R1+0x14] ;
    """
    loads = {("LDG", 4): 1, ("LDG", 16): 1, ("LDG", 1): 1, ("LDG", 32): 1}
    assert global_accesses(sass) == {**loads, ("STG", 2): 1, ("STG", 8): 1}
    assert local_accesses(sass) == 2
