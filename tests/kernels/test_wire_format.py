"""Quantised messages: every element is read back within half a scale, whatever its block holds."""

from __future__ import annotations

import pytest
import torch

from zero_runtime.kernels import wire_format
from zero_runtime.kernels.wire_format import BLOCK_NUMEL, LEVELS, dequantise_, packed_numel, quantise_
from zero_runtime.predict.messages import CONVERTED_NUMEL, packed_bytes
from zero_runtime.wire import BITS
from zero_runtime.wire import BLOCK_NUMEL as PURE_BLOCK_NUMEL

LENGTHS = (8, 32, 256, 264, 1024 + 96)


def read_back(values: torch.Tensor, bits: int) -> torch.Tensor:
    packed = torch.empty(packed_numel(values.numel(), bits), dtype=torch.uint8)
    quantise_(packed, values, bits)
    found = torch.empty(values.numel())
    dequantise_(found, packed, bits)
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", LENGTHS)
def test_an_element_is_read_back_within_half_the_scale_of_its_block(numel: int, bits: int) -> None:
    """The quotient, the rounded code's product and the scale round once each, by 2^-24 of at most the largest element:
    three roundings beyond half of the scale."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 6, (numel,), generator=generator)
    for block, found in zip(values.split(BLOCK_NUMEL), read_back(values, bits).split(BLOCK_NUMEL), strict=True):
        largest = block.abs().max().double()
        bound = largest / LEVELS[bits] / 2 + 3 * 2.0**-24 * largest
        assert (found.double() - block.double()).abs().max() <= bound


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_rounded_to_nearest_ties_to_even(bits: int) -> None:
    level = LEVELS[bits]  # so that the scale is 1
    values = torch.tensor([float(level), 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -level])
    assert read_back(values, bits).tolist() == [level, 0, 2, 2, 0, -2, 0, -level]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_of_zeros_stays_zero_and_one_that_is_not_finite_has_no_finite_number(bits: int) -> None:
    values = torch.ones(4 * BLOCK_NUMEL)
    values[:BLOCK_NUMEL] = 0
    values[BLOCK_NUMEL + 3] = torch.inf
    values[2 * BLOCK_NUMEL + 5] = torch.nan
    zeros, infinite, missing, ones = read_back(values, bits).split(BLOCK_NUMEL)
    assert not zeros.any()
    assert infinite.isnan().all()
    assert missing.isnan().all()
    assert (ones == 1).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_chunks_and_dtypes_change_no_bits_and_values_can_be_added(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = read_back(values.float(), bits)
    monkeypatch.setattr(wire_format, "CHUNK_NUMEL", {"cpu": 2 * BLOCK_NUMEL})
    assert torch.equal(read_back(values, bits), wanted)
    packed = torch.empty(packed_numel(1000, bits), dtype=torch.uint8)
    quantise_(packed, values, bits)
    total = torch.ones(1000)
    dequantise_(total, packed, bits, adds=True)
    assert torch.equal(total, wanted + 1)


@pytest.mark.parametrize("numel", LENGTHS)
def test_the_pure_closed_form_is_the_length_of_a_message(numel: int) -> None:
    assert (PURE_BLOCK_NUMEL, CONVERTED_NUMEL) == (BLOCK_NUMEL, wire_format.CHUNK_NUMEL)
    assert {name: packed_bytes(numel, name) for name in BITS} == {
        name: packed_numel(numel, bits) for name, bits in BITS.items()
    }
