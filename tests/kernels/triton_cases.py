"""The cases of test_triton.py, which runs this file under TRITON_INTERPRET=1. Writes a pickled dictionary: by case, the
largest difference divided by its bound.

fp32 and fp16 results, codes and scales have the reference's bits. Triton's interpreter truncates to bf16 where a GPU
rounds to nearest, so bf16 results may differ by one unit of bf16: 2^-7 of the largest number. Sums of squares are added
in another order.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator

import torch

from zero_runtime.kernels import reference
from zero_runtime.kernels.block_formats import BLOCK_NUMEL, blocks_of, dynamic_codes
from zero_runtime.kernels.settings import Adam, AdamW, Lamb, Lion, Sgd
from zero_runtime.kernels.triton import operations as compiled

LENGTHS = (0, 1, 15, 16, 17, 1025, 20003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BF16_UNIT = 2.0**-7
SETTINGS = {
    "adamw": AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1, 3),
    "adam": Adam(1e-2, 0.9, 0.95, 1e-8, 0.1, 3),
    "adam_from_end": Adam(1e-2, 0.4, 0.95, 1e-8, 0.0, 1),
    "sgd": Sgd(1e-2, 0.9, 0.1, 0.1, False, 2),
    "sgd_first": Sgd(1e-2, 0.9, 0.1, 0.0, False, 1),
    "sgd_plain": Sgd(1e-2, 0.0, 0.0, 0.1, False, 2),
    "nesterov": Sgd(1e-2, 0.9, 0.0, 0.1, True, 2),
    "lion": Lion(1e-2, 0.9, 0.98, 0.1),
    "adamw_bf16_states": AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1, 3),
    "sgd_bf16_states": Sgd(1e-2, 0.9, 0.1, 0.1, False, 2),
    "lion_bf16_states": Lion(1e-2, 0.9, 0.98, 0.1),
}
IS_CUT = sys.argv[1] == "cut"  # else "others"
Numbers = Iterator[tuple[str, float]]


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dtypes_at(row: int, numel: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.dtype, ...]:
    """In the cut one dtype at every second length, which both alternate along the rows; else the others."""
    place = lengths.index(numel)
    chosen = DTYPES[(row + place // 2) % len(DTYPES)] if (row + place) % 2 == 0 else None
    return tuple(dtype for dtype in DTYPES if (dtype == chosen) is IS_CUT)


def updates() -> Numbers:
    for row, (name, settings) in enumerate(SETTINGS.items()):
        for numel in LENGTHS:
            for dtype in dtypes_at(row, numel):
                for master_dtype in (torch.float32, dtype):
                    found, wanted = (
                        update(which, name, settings, numel, dtype, master_dtype) for which in (compiled, reference)
                    )
                    pairs = zip(found, wanted, strict=True)
                    yield f"updates {name} {numel} {dtype} {master_dtype}", max(excess(a, b) for a, b in pairs)


def update(which, name, settings, numel, dtype, master_dtype) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    master, grad = random(numel, 1, master_dtype), random(numel, 2, dtype)
    states = [random(numel, 3), random(numel, 4).abs()]
    if name.endswith("bf16_states"):
        states = [state.bfloat16() for state in states]
    out, scale = torch.zeros(numel, dtype=dtype), torch.tensor(0.5)
    if "adam" in name:
        which.adamw_(master, grad, *states, scale, settings.numbers, out)
    elif name.startswith("lion"):
        which.lion_(master, grad, states[0], scale, settings.numbers, out)
    else:
        momentum_buffer = None if name == "sgd_plain" else states[0]
        flags = (settings.nesterov, settings.is_first)
        which.sgd_(master, grad, momentum_buffer, scale, settings.numbers, *flags, out)
    return [master, *states, out]


def lamb() -> Numbers:
    for step in (1, 3):
        settings = Lamb(1e-2, 0.4 if step == 1 else 0.9, 0.95, 1e-6, 0.1, step)
        for numel in LENGTHS:
            for dtype in dtypes_at(step, numel):
                pairs = zip(
                    *(lamb_parts(which, settings, numel, dtype) for which in (compiled, reference)), strict=True
                )
                (found, wanted), *others = pairs
                # Two orders of n sums in fp64 differ by at most 2 n roundings.
                bound = 2 * max(numel, 1) * 2.0**-53 * max(float(wanted.max()), 1.0)
                yield f"lamb squares {step} {numel} {dtype}", float((found - wanted).abs().max()) / bound
                yield f"lamb {step} {numel} {dtype}", max(excess(a, b) for a, b in others)


def lamb_parts(which, settings, numel, dtype) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    master, grad = random(numel, 1, dtype), random(numel, 2, dtype)
    states, out, scale = [random(numel, 3), random(numel, 4).abs()], torch.zeros(numel, dtype=dtype), torch.tensor(0.5)
    which.lamb_moments_(grad, *states, scale, settings.numbers)
    squares = which.lamb_squares(master, *states, settings.lamb_numbers)
    which.lamb_(master, *states, torch.tensor(0.7), settings.lamb_numbers, out)
    return [squares, master, *states, out]


def moments() -> Numbers:
    """Starts from random codes, so that the complete table is read."""
    lengths = (*LENGTHS, 256)
    for row, name in enumerate(("adamw", "adam", "adam_from_end")):
        for numel in lengths:
            for dtype in dtypes_at(row, numel, lengths):
                found, wanted = (moments_after(which, SETTINGS[name], numel, dtype) for which in (compiled, reference))
                yield f"moments {name} {numel} {dtype}", max(map(excess, found, wanted))
    for which, wanted in zip(beside_borders(compiled), beside_borders(reference), strict=True):
        yield f"moments beside borders {len(which)} {which.dtype}", excess(which, wanted)
    codes, scales = torch.zeros(2, 300, dtype=torch.uint8), torch.zeros(2, 2)
    bad = torch.zeros(300)
    bad[299] = torch.nan
    for which, place in ((compiled, 0), (reference, 1)):
        states = (codes[place], scales[place], codes[place].clone(), scales[place].clone())
        which.adamw8bit_(torch.zeros(300), bad, *states, torch.tensor(1.0), SETTINGS["adamw"].numbers)
    yield "moments codes of a NaN", excess(codes[0], codes[1])
    yield "moments scale of a NaN", excess(scales[0].nan_to_num(9), scales[1].nan_to_num(9))


def beside_borders(which) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """The states after gradients that are the borders between codes and between decades, and the numbers beside them.

    Both betas are 0, so that the moments are the gradients and their squares; a 1 in each block is its scale.
    """
    edges = [torch.tensor([10.0**-decade for decade in range(1, 8)])]
    for signed in (True, False):
        table = dynamic_codes(torch.device("cpu"), signed=signed)
        middles = ((table[1:] + table[:-1]) / 2).abs()
        edges += [middles, middles.sqrt()]
    beside = torch.cat([(edge.view(torch.int32) + away).view(torch.float32) for edge in edges for away in range(-2, 3)])
    beside = torch.cat([beside, -beside, torch.zeros(-2 * len(beside) % (BLOCK_NUMEL - 1))])
    grad = torch.nn.functional.pad(beside.view(-1, BLOCK_NUMEL - 1), (0, 1), value=1.0).flatten()
    codes = torch.zeros(2, len(grad), dtype=torch.uint8).unbind()
    scales = torch.zeros(2, blocks_of(len(grad))).unbind()
    settings = AdamW(0.0, 0.0, 0.0, 1e-8, 0.0, 1)
    which.adamw8bit_(
        torch.zeros(len(grad)), grad, codes[0], scales[0], codes[1], scales[1], torch.tensor(1.0), settings.numbers
    )
    return [*codes, *scales]


def moments_after(which, settings, numel, dtype) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    master, grad = random(numel, 1), random(numel, 2, dtype)
    generator = torch.Generator().manual_seed(9)
    codes = [torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8) for _ in range(2)]
    scales = [random(blocks_of(numel), 3), random(blocks_of(numel), 4).abs()]
    out = torch.zeros(numel, dtype=dtype)
    states = (codes[0], scales[0], codes[1], scales[1])
    which.adamw8bit_(master, grad, *states, torch.tensor(0.5), settings.numbers, out)
    return [master, out, *scales, *codes]


def excess(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """0 for equal bits; for bf16 the largest difference, in bf16 units of the largest number; 9 for other dtypes."""
    if torch.equal(found, wanted):
        return 0.0
    if wanted.dtype != torch.bfloat16:
        return 9.0
    largest = max(float(wanted.double().abs().max()), 1.0)
    return float((found.double() - wanted.double()).abs().max()) / (BF16_UNIT * largest)


def streams() -> Numbers:
    for numel in LENGTHS:
        for dtype in dtypes_at(0, numel):
            values = random(numel, 5, dtype)
            for other in DTYPES:
                found, wanted = random(numel, 6, other), random(numel, 6, other)
                compiled.accumulate_(found, values, 0.3)
                reference.accumulate_(wanted, values, 0.3)
                yield f"streams accumulate {numel} {dtype} {other}", excess(found, wanted)
                compiled.cast_copy_(found, values)
                reference.cast_copy_(wanted, values)
                yield f"streams cast {numel} {dtype} {other}", excess(found, wanted)
            total, sums = compiled.sum_of_squares(values), reference.sum_of_squares(values)
            # The squares are exact; two orders of n sums in fp64 differ by at most 2 n roundings.
            bound = 2 * max(numel, 1) * 2.0**-53 * max(float(sums), 1.0)
            yield f"streams squares {numel} {dtype}", abs(float(total - sums)) / bound
    for count in (1, 2, 3, 2048, 2049, 4097) if IS_CUT else (5, 64, 8193, 40001):
        groups = random(2 * count, 8).double().square().view(2, count)
        yield f"streams fold {count}", excess(compiled.folded(groups), reference.folded(groups))
    for bad in (torch.inf, torch.nan):
        values = random(300, 7)
        values[299] = bad
        finite = bool(compiled.sum_of_squares(values).isfinite())
        yield f"streams squares {bad}", 9.0 if finite else 0.0


if __name__ == "__main__":
    parts = (updates(), lamb(), moments(), streams())
    sys.stdout.buffer.write(pickle.dumps({name: found for part in parts for name, found in part}))
