"""Codes of weights: how far a value moves, and that values which were read back have the same codes again."""

from __future__ import annotations

import pytest
import torch
from harness.read_back import read_back

from zero_runtime.kernels.weight_codes import (
    BLOCK_NUMEL,
    CHUNK_NUMEL,
    LEVELS,
    READ_NUMEL,
    decode_weights_,
    encode_weights_,
)
from zero_runtime.kernels.weight_codes import stored_bytes as bytes_of
from zero_runtime.predict.messages import READ_BACK_NUMEL

# More than is converted at a time, and not a whole number of times.
NUMEL = CHUNK_NUMEL["cpu"] + 3 * BLOCK_NUMEL


def _values(kind: str) -> torch.Tensor:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
    if kind == "spread":  # magnitudes over 60 powers of two
        values *= torch.exp2(torch.arange(NUMEL) // BLOCK_NUMEL % 60 - 30)
    values[:BLOCK_NUMEL] = 0
    return values if kind != "bf16" else values.bfloat16()


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("kind", ["normal", "spread", "bf16"])
def test_values_move_by_half_a_scale_at_most_and_have_the_same_codes_again(kind: str, bits: int) -> None:
    values = _values(kind)
    codes, again = (torch.empty(bytes_of(NUMEL, bits), dtype=torch.uint8) for _ in range(2))
    encode_weights_(codes, values, bits)
    read = torch.empty(NUMEL)
    decode_weights_(read, codes, bits)
    assert torch.equal(read, read_back(values, LEVELS[bits]))
    blocks = values.double().view(-1, BLOCK_NUMEL)
    # A scale is the largest magnitude / L, rounded to bf16 (2^-9 of it), after a division in fp32 (2^-24); the quotient
    # that is rounded to a code is wrong by 2^-24 of at most L + 1/2, which moves a tie by less than 2^-16 of a scale.
    half = blocks.abs().amax(1, keepdim=True) / LEVELS[bits] / 2 * (1 + 2.0**-8)
    assert ((blocks - read.double().view_as(blocks)).abs() <= half * (1 + 2.0**-15)).all()
    encode_weights_(again, read, bits)
    assert torch.equal(again, codes)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = torch.empty(NUMEL, dtype=dtype)
        decode_weights_(rounded, codes, bits)
        assert torch.equal(rounded, read.to(dtype))


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_shows_in_its_block_alone(bad: float, bits: int) -> None:
    values = torch.ones(2 * BLOCK_NUMEL)
    values[3] = bad
    codes = torch.empty(bytes_of(values.numel(), bits), dtype=torch.uint8)
    encode_weights_(codes, values, bits)
    decode_weights_(values, codes, bits)
    assert not values[:BLOCK_NUMEL].isfinite().any()
    assert torch.equal(values[BLOCK_NUMEL:], read_back(torch.ones(BLOCK_NUMEL), LEVELS[bits]))


def test_a_prediction_counts_as_many_elements_as_are_read_at_a_time() -> None:
    assert READ_BACK_NUMEL == READ_NUMEL
